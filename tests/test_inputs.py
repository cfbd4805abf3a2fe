"""One input of each kind that once broke a command, and what is said now."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from policies.config.overrides import apply_overrides
from policies.config.runconfig import load_config, model_shape
from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B
from policies.process.documents import parse_json, parse_scalar, parse_yaml
from policies.process.sentences import one_line
from sim.cli import main
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

ROOT = Path(__file__).parent.parent
RUN = (
    "model: ouro-tiny\nworkload: {kind: synthetic, num_requests: 3, prompt_tokens: 40, output_tokens: 3}\n"
    "scheduler: {prefill_chunk_size: 16}\n"
)
PLAIN = "arrival_s,prompt_tokens,output_tokens\n0,8,3\n1,9,3\n"
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
OURO = {
    "model_type": "ouro", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 2, "num_attention_heads": 4, "total_ut_steps": 4, "max_position_embeddings": 4096,
    "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(RUN)
    return tmp_path / "c.yaml"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that ends with status 2."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (2, "", 1), captured.err[:500]
    assert len(captured.err) <= 400
    return captured.err


def load(path: Path, **keys: object) -> Workload:
    return load_workload(parse_workload({"kind": "trace", "path": path.name, **keys}, "test"), 0, path.parent)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 0x_", "'0x_' is no number (line 1)"),
        ("a: !!int x", "'x' is no number"),
        ("a: " + "9" * 5000, "is no number"),
        ("a: 9223372036854775808", "expected a number below 2**63"),
        ("seed: 1:30", "'1:30' is another number in YAML 1.1 than it looks like"),
        ("seed: 1:30.5", "'1:30.5' is another number"),
        ("n: 010", "'010' is another number"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}", "key 'c' occurs twice, expected it once (line 2)"),
        (LAUGHS, "its aliases stand for more than 50,000 values"),
        ("a: &a [*a]", "refers to itself"),
        ("[" * 100_000, "nested too deeply, expected at most 32 levels"),
        ("- " * 100_000, "nested too deeply"),
        ("a: [" + "1," * 60_000 + "]", "expected at most 50,000 values"),
        ("a: !!binary aGk=", "tag 'tag:yaml.org,2002:binary', expected plain values"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        ("{[1]: 2}", "not valid YAML"),
    ],
    ids=lambda value: value[:20],
)
def test_what_yaml_can_hold_is_bounded(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "c.yaml")
    assert str(caught.value).startswith("c.yaml: ") and sentence in str(caught.value)


def test_what_yaml_writes_plainly_keeps_its_meaning() -> None:
    text = "{a: 2026-13-01, b: 2026-01-02, c: '010', d: 0x10, e: 1_000, f: 010.5, g: -7, h: off, i: 1e9}"
    assert parse_yaml(text, "x") == {
        "a": "2026-13-01", "b": "2026-01-02", "c": "010", "d": 16, "e": 1000, "f": 10.5, "g": -7, "h": False,
        "i": "1e9",
    }  # fmt: skip
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, b: 2}", "x") == {"a": {"b": 1}, "c": {"b": 2}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1, "a": 2}', "key 'a' occurs twice"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ('{"a": 1e999}', "expected numbers below 2**63"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": ' + "9" * 40 + "}", "expected numbers below 2**63"),
        ("[" * 100_000, "too large"),
        ("[" * 900 + "]" * 900, "nested too deeply, expected at most 32 levels"),
    ],
    ids=lambda value: value[:20],
)
def test_what_json_can_hold_is_bounded(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(text, "m.json")
    assert str(caught.value).startswith("m.json: ") and sentence in str(caught.value)


def test_an_override_is_taken_as_it_was_typed() -> None:
    for text in ("a #1.csv", "x: y.csv", "- z", "&b", "*b", "!c", "|", ">", "%d", "@e", "`f", "a, b", "? g"):
        assert apply_overrides({}, [f"workload.path={text}"]) == {"workload": {"path": text}}
    for text, value in (
        ("3", 3), ("-1.5", -1.5), ("off", False), ("null", None), ("", None), (" x ", "x"), ("'7'", "7"),
        ("[1, 2]", [1, 2]), ("{a: {b: 1}}", {"a": {"b": 1}}), ("a=b", "a=b"),
    ):  # fmt: skip
        assert parse_scalar(text, "x") == value


def test_a_section_that_is_no_mapping_is_not_replaced_in_silence(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "run", config, "--set", "scheduler=7", "--set", "scheduler.inflight=1")
    assert "scheduler.inflight: scheduler is 7, expected a mapping to set inflight in" in said


def test_pipes_devices_loops_and_impossible_names_are_refused_at_once(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "/dev/zero"):
        said = refusal(capsys, "run", config, "--set", f"workload={{kind: trace, path: {name}}}")
        assert "is a pipe or a device and is read more than once, expected a trace on disk" in said
        assert "is a pipe or a device" in refusal(capsys, "run", config, "--set", f"model={name}")
        assert "is a pipe or a device" in refusal(capsys, "run", tmp_path / name)
    os.mkfifo(tmp_path / "pipe.json")
    said = refusal(capsys, "explain", tmp_path / "pipe.json", "--batch", "0:CODA:0:5:1")
    assert "is a pipe or a device" in said
    for name in ("loop", "x" * 5000, "a\0b", "\ud800", "~nobody-of-that-name/t.csv"):
        for override in (f"workload={{kind: trace, path: {json.dumps(name)}}}", f"model={json.dumps(name)}"):
            refusal(capsys, "run", config, "--set", override)
        refusal(capsys, "run", tmp_path / name)


def test_a_trace_from_another_process_is_refused_and_not_waited_for(config: Path) -> None:
    command = (
        f"{sys.executable} -m sim run {config} --set workload.kind=trace --set workload.path=<(cat /dev/null)"
    )
    command = command.replace("--set workload.kind=trace ", "--set 'workload={kind: trace, path: x}' ")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is a pipe or a device" in done.stderr


def test_home_is_where_the_user_lives(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my #1 traces").mkdir()
    path = tmp_path / "my #1 traces" / "a: 5.csv"
    path.write_text(PLAIN)
    overrides = ["workload={kind: trace, path: x}", "workload.path=~/my #1 traces/a: 5.csv"]
    assert load_config(config, overrides).workload["path"] == str(path)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["workload.num_requests=1000000000000"],
            "workload.num_requests: 1000000000000, expected at most 5000000",
        ),
        (["workload.num_requests=4611686018427387904"], "expected at most 5000000"),
        (
            ["workload.shared_prefix={groups: 18446744073709551616, tokens: 3}"],
            "expected a number below 2**63",
        ),
        (
            ["workload.arrival={process: closed, concurrency: 4611686018427387904}"],
            "expected at most 100000000",
        ),
        (
            ["workload.arrival={process: gamma, rate: 1, cv: 1.0e-200}"],
            "workload.arrival.cv: 1e-200, expected at",
        ),
        (
            ["workload={kind: trace, path: t.csv, repeat: 1000000000}"],
            "workload.repeat: 1000000000, expected at",
        ),
        (
            ["workload={kind: trace, path: t.csv, repeat: 4000000}"],
            "workload.repeat: 4000000 times 2 requests",
        ),
        (
            ["workload={kind: trace, path: t.csv, limit: 1.0e+30}"],
            "workload.limit: 1e+30, expected a valid integer",
        ),
        (
            ["workload={kind: trace, path: t.csv, jitter_s: 1.0e+300}"],
            "workload.jitter_s: 1e+300, expected at most",
        ),
        (
            ["exit.mode=trace", "workload.exit_loops=2", "workload.output_tokens=2000000000"],
            "workload.exit_loops",
        ),
        (["seed=99999999999999999999"], "expected a number below 2**63"),
        (["workload.kind=trace"], "belongs to synthetic and preset; another kind needs the whole section"),
        (["workload={kind: trace, path: t.csv, shared_prefix: 3}"], "it belongs to synthetic and preset"),
        (["policy=" + "x" * 5000], "policy.name: unknown policy 'xxx"),
        (["scheduler=[" + "1," * 3000 + "]"], "scheduler: [1, 1, "),
        (["a.b.c.d.e.f.g.h.i.j=1"], "expected KEY=VALUE"),
        (["device=h100-sxm"], "did you mean 'roofline:h100-sxm'?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_number_or_a_name_beyond_all_bounds_is_one_short_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], sentence: str
) -> None:
    (tmp_path / "t.csv").write_text(PLAIN)
    sets = [part for override in overrides for part in ("--set", override)]
    assert sentence in refusal(capsys, "run", config, *sets, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"total_ut_steps": 1_000_000}, "total_ut_steps is 1000000, expected at most 1024"),
        ({"rope_theta": 10**45}, "expected numbers below 2**63"),
        ({"rope_theta": 1e45}, "rope_theta is 1e+45, expected at most"),
        ({"hidden_size": True}, "hidden_size is true, expected a valid integer"),
        ({"vocab_size": "512"}, 'vocab_size is "512", expected a valid integer'),
        ({"quantization": {"bits": 4}}, "quantization is"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hugging_face_config_is_held_to_its_bounds(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**OURO, **change}))
    assert sentence in refusal(capsys, "run", config, "--set", "model=.")
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    assert "not valid JSON (nested too deeply" in refusal(capsys, "run", config, "--set", "model=.")


def test_a_gzip_of_two_gigabytes_of_nothing_ends_soon(tmp_path: Path) -> None:
    block = gzip.compress(b"\n" * 10_000_000, compresslevel=9)
    (tmp_path / "t.csv").write_bytes(block * 200)
    with pytest.raises(InputError, match="has more than 5,000,000 lines"):
        load(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_bytes(gzip.compress(b" " * 10_000_000))
    with pytest.raises(InputError, match="has a line of more than 4,000,000 characters"):
        load(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\n9223372036.8547,1,1\n", "within 146 years"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n9999-01-01 00:00:00,1,1\n",
            "expected a date from 1678 to 2261",
        ),
        ("arrival_s,arrival_s,prompt_tokens,output_tokens\n0,0,1,1\n", "'arrival_s' occurs 2 times"),
        ("arrival_s,prompt_tokens,output_tokens,priority,Priority\n0,1,1,2,3\n", "'priority' occurs 2 times"),
        (
            '{"timestamp": 0, "timestamp": 1, "input_length": 1, "output_length": 1}\n',
            "'timestamp' occurs twice",
        ),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "Timestamp": 9}\n',
            "line 2: two keys differ in case or blanks only",
        ),
        (
            '{"timestamp": 0.2, "input_length": 20, "output_length": 8, "hash_ids": [0, 1]}\n',
            "line 1: hash_ids: [0, 1], expected at most 1 ids for 20 tokens in blocks of 512; workload.",
        ),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}\n',
            "from 0 to 2**64 - 1",
        ),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_a_trace_that_contradicts_itself_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        load(tmp_path / "t.csv")
    assert sentence in str(caught.value)


def test_units_can_be_said_and_doubts_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0.2, "input_length": 40, "output_length": 8, "hash_ids": [0, 1, '
        "18446744073709551615]}\n"
        '{"timestamp": 0.7, "input_length": 400, "output_length": 8, "hash_ids": [0, 1]}\n'
    )
    workload = load(path, timestamp_unit="s", block_tokens=16)
    assert [request.arrival_ns for request in workload.requests] == [0, 500_000_000]
    assert workload.requests[0].content_tokens == 16
    assert workload.requests[0].content_ids == (0, 1, 2**64 - 1)
    account, sparse = workload.notes
    assert (
        account
        == "all 2 requests of t.jsonl: 220 prompt and 8 output tokens a request, 2 requests/s over 0.5 s"
    )
    assert sparse.startswith("line 2: 2 ids for 400 tokens leave the end of the prompt without one")
    path.write_text('{"timestamp": 0.2, "input_length": 40, "output_length": 8}\n' * 2)
    assert "has a fraction and was read as milliseconds" in load(path).notes[1]
    for unit, factor in (("us", 1000), ("ns", 1)):
        path.write_text(
            '{"timestamp": 0, "input_length": 4, "output_length": 8}\n'
            '{"timestamp": 9, "input_length": 4, "output_length": 8}\n'
        )
        assert load(path, timestamp_unit=unit).requests[1].arrival_ns == 9 * factor


def test_what_part_of_a_trace_was_taken_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "0,10,2\n4,30,4\n9,1,1\n"
    )
    assert load(tmp_path / "t.csv", limit=2).notes == (
        "the first 2 requests of t.csv: 20 prompt and 3 output tokens a request, 0.25 requests/s over 4 s "
        "(times read as seconds; workload.timestamp_unit says otherwise); what follows was not read "
        "and may differ",
    )


def test_a_published_model_is_known_by_its_hub_id(config: Path) -> None:
    loaded = load_config(config, ["model=ByteDance/Ouro-1.4B"])
    assert model_shape(loaded) == OURO_1_4B
    with pytest.raises(
        InputError, match=r"unknown model 'ByteDance/Ouro-1\.5B'.*did you mean 'ByteDance/Ouro-1\.4B'"
    ):
        model_shape(load_config(config, ["model=ByteDance/Ouro-1.5B"]))


def test_a_run_can_be_replayed_after_its_model_has_moved(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OURO))
    arguments = ["run", str(config), "--set", "model=ckpt", "--no-plots", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    folder.rename(tmp_path / "elsewhere")
    assert main(["replay", str(tmp_path / "run")]) == 0
    again = load_config(tmp_path / "run" / "config.yaml")
    assert model_shape(again).num_layers == 2
    assert load_config(tmp_path / "run" / "config.yaml", ["model=ouro-1.4b"]).model_shape is None
    text = (tmp_path / "run" / "config.yaml").read_text().replace(str(folder), "ouro-1.4b")
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"model_shape: is that of 'ckpt', not of model 'ouro-1\.4b'"):
        load_config(tmp_path / "run" / "config.yaml")


def test_a_sentence_is_one_line_that_any_terminal_takes() -> None:
    line = one_line("start\nof \x1b[31m \ud800 " + "x" * 5000 + " the end")
    assert len(line) <= 390 and line.startswith("start of \\x1b[31m \\ud800 x") and line.endswith(" the end")


def test_what_an_input_makes_python_raise_is_one_line_and_status_2(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (MemoryError(), RecursionError("deep"), OverflowError("large")):

        def raises(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("sim.run.load_workload", raises)
        assert f"the input asks for too much ({type(error).__name__}" in refusal(capsys, "run", config)
