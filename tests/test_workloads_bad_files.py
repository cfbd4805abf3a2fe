"""Files that cannot be used: one sentence each, naming file, physical line, column, value and what was
expected."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.errors import InputError
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload


def load(path: Path, **keys: object) -> Workload:
    return load_workload(parse_workload({"kind": "trace", "path": path.name, **keys}, "test"), 0, path.parent)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


MOONCAKE = '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = "2023-11-16 18:15:46.6805900,374,44\n"
BAD_FILES = {
    "negative tokens": (
        HEAD + FIRST + "2023-11-16 18:15:47,-5,44\n",
        "t.csv: line 3: ContextTokens: '-5', expected a whole number of tokens from 0",
    ),
    "fractional tokens": (HEAD + "0,374,4.5\n", "line 2: GeneratedTokens: '4.5', expected a whole number"),
    "NaN tokens": (HEAD + "0,nan,4\n", "line 2: ContextTokens: 'nan', expected a whole number"),
    "huge tokens": (
        HEAD + "0,99999999999,4\n",
        "line 2: ContextTokens: '99999999999', expected a whole number",
    ),
    "text tokens": (HEAD + "0,many,4\n", "line 2: ContextTokens: 'many', expected a whole number"),
    "missing cell": (
        HEAD + FIRST + "2023-11-16 18:15:47,5\n",
        "line 3: GeneratedTokens: missing, expected a whole number",
    ),
    "empty cell": (HEAD + "0,,4\n", "line 2: ContextTokens: missing, expected"),
    "missing arrival": (HEAD + FIRST + ",5,4\n", "line 3: TIMESTAMP: missing, expected an arrival time"),
    "NaN arrival": (
        HEAD + "0,5,4\nnan,5,4\n",
        "line 3: TIMESTAMP: 'nan', expected a finite number of seconds that is not negative",
    ),
    "NaN arrival first": (HEAD + "NaN,5,4\n", "line 2: TIMESTAMP: 'NaN', expected a finite number"),
    "negative arrival": (HEAD + "0,5,4\n-1,5,4\n", "line 3: TIMESTAMP: '-1', expected a finite number"),
    "number among dates": (
        HEAD + FIRST + "12,5,4\n",
        "line 3: TIMESTAMP: '12', expected a date and time like",
    ),
    "date among numbers": (
        HEAD + "0,5,4\n" + FIRST,
        "line 3: TIMESTAMP: '2023-11-16 18:15:46.6805900', expected a number of seconds",
    ),
    "rubbish arrival": (
        HEAD + "soon,5,4\n",
        "line 2: TIMESTAMP: 'soon', expected a date and time like 2023-11-16 18:15:46.6805900 or a number",
    ),
    "unknown columns": (
        "a,b,c\n1,2,3\n",
        "line 1: unknown columns 'a,b,c', expected one of azure (TIMESTAMP,ContextTokens,GeneratedTokens); "
        "moon",
    ),
    "two formats": (
        "arrival_s,prompt_tokens,output_tokens,ContextTokens,GeneratedTokens\n0,1,1,1,1\n",
        "columns fit azure and plain, expected workload.format to say which",
    ),
    "two arrival columns": (
        "arrival_s,arrival_ms,prompt_tokens,output_tokens\n0,0,1,1\n",
        "columns arrival_s and arrival_ms both hold arrival times",
    ),
    "a column twice": (
        "arrival_s,prompt_tokens,output_tokens,Output_Tokens\n0,1,1,2\n",
        "column 'output_tokens' occurs 2 times, expected once",
    ),
    "header only": (HEAD, "has column names and no rows, expected at least one request"),
    "empty": ("", "is empty, expected a trace"),
    "blank": ("\n \n", "is empty, expected a trace"),
    "binary": (bytes(range(256)) * 20, "is binary, expected CSV or JSON lines in UTF-8"),
    "random bytes": (b"\xff\xfe\x80\x99" * 100, "is binary, expected CSV or JSON lines in UTF-8"),
    "utf-16": (HEAD.encode("utf-16"), "is binary, expected CSV or JSON lines in UTF-8"),
    "a damaged cell": (
        HEAD.encode() + b"0,3\xff4,4\n",
        "line 2: ContextTokens: '3\\udcff4', expected a whole number",
    ),
    "an unclosed quote": (HEAD + '0,"5,4\n1,5,4\n', "line 2: not valid CSV (unexpected end of data)"),
    "truncated gzip": (gzip.compress((HEAD + FIRST * 5).encode())[:-12], "damaged gzip data"),
    "truncated JSON": (MOONCAKE + MOONCAKE[:-40], "line 2: not valid JSON ("),
    "a JSON list": ('[{"timestamp": 0}]\n', "line 1: [{'timestamp': 0}], expected one JSON object a line"),
    "JSON without a key": (
        MOONCAKE * 2 + '{"timestamp": 2000, "output_length": 1}\n',
        "line 3: input_length: missing, expected",
    ),
    "JSON NaN": (
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
        "line 1: timestamp: 'NaN', expected a finite number of milliseconds",
    ),
    "JSON true": (
        '{"timestamp": 0, "input_length": true, "output_length": 1}\n',
        "line 1: input_length: True, expected a whole number",
    ),
    "JSON blocks": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}\n',
        "line 1: hash_ids: [Decimal('1.5')], expected a list of block ids",
    ),
    "deep JSON": ("{" + '"a":[' * 100_000 + "\n", "line 1: not valid JSON ("),
    "zero max_tokens": (
        "arrival_s,prompt_tokens,output_tokens,max_tokens\n0,1,1,0\n",
        "line 2: max_tokens: '0', expected nothing or a whole number",
    ),
    "text priority": (
        "arrival_s,prompt_tokens,output_tokens,priority\n0,1,1,high\n",
        "line 2: priority: 'high', expected nothing or a whole number",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence_with_line_column_and_value(tmp_path: Path, name: str) -> None:
    text, sentence = BAD_FILES[name]
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load(path)
    message = str(caught.value)
    assert sentence in message
    assert message.startswith(str(path))
    assert "\n" not in message
    message.encode()  # printable whatever the file holds


def test_line_numbers_are_physical_lines(tmp_path: Path) -> None:
    text = '\narrival_s,comment,prompt_tokens,output_tokens\n\n0,"two\nlines",5,1\n1,,x,1\n'
    with pytest.raises(InputError, match="line 6: prompt_tokens: 'x'"):
        load(write(tmp_path, text))
    with pytest.raises(InputError, match="line 2: unknown columns"):
        load(write(tmp_path, "\nfoo\n1\n"))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.csv: no such file, expected a trace"):
        load(tmp_path / "gone.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: is a folder, expected a trace"):
        load(tmp_path / "folder")


def test_a_format_that_was_named_must_fit(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + FIRST)
    with pytest.raises(
        InputError, match=r"are not burstgpt, expected burstgpt \(Timestamp,Request tokens,Response tokens\)"
    ):
        load(path, format="burstgpt")
    with pytest.raises(
        InputError, match=r"workload.dataset: 'x', expected none: it belongs to ServeGen traces"
    ):
        load(path, dataset="x")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_workload_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    path = write(tmp_path_factory.mktemp("fuzz"), b"arrival_s,prompt_tokens,output_tokens\n0,1,1\n" + tail)
    try:
        assert load(path).requests[0].arrival_ns == 0
    except InputError as error:
        assert "\n" not in str(error)
