"""Traces of every format, as they come: columns in any order, times in any spelling, however the file is
stored."""

import gzip
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.errors import InputError
from workloads.spec import parse_workload
from workloads.timestamps import TimestampError, guess_unit, iso_ns, number_ns
from workloads.workload import Workload, load_workload

SECOND = 10**9


def load(path: Path, **keys: object) -> Workload:
    return load_workload(parse_workload({"kind": "trace", "path": path.name, **keys}, "test"), 0, path.parent)


def write(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def shape(workload: Workload) -> list[tuple[int, int, int, int, int]]:
    """(id, arrival_ns, prompt, max_tokens, true output) in workload order."""
    output = workload.oracle.output_tokens
    return [
        (r.request_id, r.arrival_ns, r.prompt_tokens, r.max_tokens, output(r.request_id))
        for r in workload.requests
    ]


TWO_REQUESTS = [(0, 0, 374, 44, 44), (1, 1_500_000_000, 396, 109, 109)]
SAME_IN_EVERY_FORMAT = {
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 "
        "18:15:48.1805900,396,109\n"
    ),
    "azure relative": "TIMESTAMP,ContextTokens,GeneratedTokens\n0,374,44\n1.5,396,109\n",
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,374,44,418,Conversation log\n6.5,GPT-4,396,109,505,API log\n"
    ),
    "burstgpt with sessions": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,a,1,ChatGPT,374,44,418,Conversation log\n6.5,,2,GPT-4,396,109,505,API log\n"
    ),
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,374,44\n1.75,396,109\n",
    "plain s": "arrival_s,prompt_tokens,output_tokens\n0,374,44\n1.5,396,109\n",
    "plain ms": "arrival_ms,prompt_tokens,output_tokens\n0,374,44\n1500,396,109\n",
    "plain ns": "arrival_ns,prompt_tokens,output_tokens\n7,374,44\n1500000007,396,109\n",
    "plain iso": "arrival,prompt_tokens,output_tokens\n2024-05-12T00:00:10Z,374,44\n"
    "2024-05-12T00:00:11.5Z,396,109\n",
    "mooncake": (
        '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
        '{"timestamp": 1500, "input_length": 396, "output_length": 109, "hash_ids": [0]}\n'
    ),
    "plain json": (
        '{"arrival_s": 0.0, "prompt_tokens": 374, "output_tokens": 44}\n'
        '{"output_tokens": 109, "arrival_s": 1.5, "prompt_tokens": 396}\n'
    ),
    "mooncake as csv": 'timestamp,input_length,output_length,hash_ids\n0,374,44,"[0]"\n1500,396,109,"[0]"\n',
}


@pytest.mark.parametrize("name", SAME_IN_EVERY_FORMAT)
def test_the_same_two_requests_read_alike_in_every_format(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, SAME_IN_EVERY_FORMAT[name])
    assert shape(load(path)) == TWO_REQUESTS
    assert shape(load(path, format=name.split()[0])) == TWO_REQUESTS


@pytest.mark.parametrize("name", SAME_IN_EVERY_FORMAT)
@pytest.mark.parametrize(
    "dress",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.rstrip("\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: b"\n\n" + text.replace("\n", "\n\n").encode(),
        lambda text: gzip.compress(b"\xef\xbb\xbf" + text.encode()),
    ],
    ids=["crlf", "no final newline", "byte order mark", "blank lines", "gzip"],
)
def test_how_a_file_is_stored_changes_nothing(tmp_path: Path, name: str, dress) -> None:  # type: ignore[no-untyped-def]
    assert shape(load(write(tmp_path, dress(SAME_IN_EVERY_FORMAT[name])))) == TWO_REQUESTS


@given(
    st.permutations(["TIMESTAMP", "ContextTokens", "GeneratedTokens", "extra", "another"]),
    st.sampled_from([str, str.upper, str.lower]),
)
def test_columns_come_in_any_order_case_and_company(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], case
) -> None:  # type: ignore[no-untyped-def]
    rows = [("2023-11-16 18:15:46.68059", "374", "44"), ("2023-11-16 18:15:48.18059", "396", "109")]
    cells = [
        {
            **dict(zip(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), row, strict=True)),
            "extra": "x",
            "another": "-1",
        }
        for row in rows
    ]
    text = (
        ",".join(f" {case(name)} " for name in order)
        + "\n"
        + "".join(",".join(row[name] for name in order) + "\n" for row in cells)
    )
    assert shape(load(write(tmp_path_factory.mktemp("order"), text))) == TWO_REQUESTS


@pytest.mark.parametrize(
    ("text", "after_18_15_46"),
    [
        ("2023-11-16 18:15:46", 0),
        ("2023-11-16T18:15:46Z", 0),
        ("2023-11-16t18:15:46z", 0),
        ("2023/11/16 18:15:46", 0),
        ("2023-11-16 18:15", -46 * SECOND),
        ("2023-11-16 18:15:46.6805900", 680_590_000),
        ("2023-11-16 18:15:46,6805900", 680_590_000),
        ("2023-11-16 18:15:46.123456789", 123_456_789),
        ("2023-11-16 18:15:46.123456789999", 123_456_789),
        ("2023-11-16 18:15:46.5+00:00", 500_000_000),
        ("2023-11-16T20:15:46+02:00", 0),
        ("2023-11-16T20:15:46+0200", 0),
        ("2023-11-16T20:15:46 +02", 0),
        ("2023-11-16T12:45:46-05:30", 0),
        ("2023-11-17T00:15:46+06:00", 0),
        ("2023-11-16 18:15:46 UTC", 0),
    ],
)
def test_iso_times_of_every_variety_are_exact(text: str, after_18_15_46: int) -> None:
    assert iso_ns(text) == 1_700_158_546 * SECOND + after_18_15_46


@pytest.mark.parametrize(
    "text",
    [
        "2023-02-30 00:00:00",
        "2023-11-16 24:00:00",
        "2023-11-16 18:15:61",
        "2023-11-16",
        "18:15:46",
        "yesterday",
    ],
)
def test_dates_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(TimestampError, match="expected"):
        iso_ns(text)


@given(st.integers(0, 2**63 - 1), st.sampled_from([("s", 9), ("ms", 6), ("us", 3), ("ns", 0)]))
def test_numbers_lose_no_nanosecond(total_ns: int, unit: tuple[str, int]) -> None:
    name, digits = unit
    text = str(total_ns) if not digits else f"{total_ns // 10**digits}.{total_ns % 10**digits:0{digits}d}"
    assert number_ns(text, name) == total_ns


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "-0.5", "1e400", "9223372036854775808", "1_0"])
def test_times_at_which_nothing_can_arrive_are_refused(text: str) -> None:
    with pytest.raises(TimestampError, match="expected"):
        number_ns(text, "ns" if text.startswith("92") else "s")


@pytest.mark.parametrize(
    ("first", "unit"),
    [
        ("27499", "ms"),
        ("0", "ms"),
        ("1700158546", "s"),
        ("1700158546.68", "s"),
        ("1700158546680", "ms"),
        ("1700158546680590", "us"),
        ("1700158546680590000", "ns"),
    ],
)
def test_epoch_numbers_say_their_unit_by_their_size(first: str, unit: str) -> None:
    assert guess_unit(first, "ms") == unit


def test_epoch_times_keep_nanoseconds_and_are_rebased(tmp_path: Path) -> None:
    text = "Timestamp,Request tokens,Response tokens\n1700158546.680590001,10,2\n1700158546.680590004,11,3\n"
    assert shape(load(write(tmp_path, text))) == [(0, 0, 10, 2, 2), (1, 3, 11, 3, 3)]


def test_an_explicit_unit_wins_and_a_guessed_one_is_told(tmp_path: Path) -> None:
    path = write(
        tmp_path, "Timestamp,Request tokens,Response tokens\n1700158546000,10,2\n1700158547000,11,3\n"
    )
    assert load(path).requests[1].arrival_ns == SECOND
    assert load(path).notes[1:] == ("Timestamp was read as milliseconds",)
    path = write(tmp_path, "Timestamp,Request tokens,Response tokens\n5000,10,2\n6000,11,3\n")
    assert load(path).requests[1].arrival_ns == 1000 * SECOND
    assert load(path, timestamp_unit="ms").requests[1].arrival_ns == SECOND
    assert load(path, timestamp_unit="ms").notes[1:] == ()
    with pytest.raises(
        InputError, match=r"timestamp_unit: 's', expected auto: column arrival_ms says its unit"
    ):
        load(write(tmp_path, SAME_IN_EVERY_FORMAT["plain ms"]), timestamp_unit="s")


def test_rows_out_of_order_are_sorted_stably_and_said_so(tmp_path: Path) -> None:
    workload = load(
        write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n5,50,1\n3,30,1\n5,51,1\n3,31,1\n9,90,1\n")
    )
    assert [(r.request_id, r.arrival_ns // SECOND, r.prompt_tokens) for r in workload.requests] == [
        (1, 0, 30), (3, 0, 31), (0, 2, 50), (2, 2, 51), (4, 6, 90),
    ]  # fmt: skip
    assert workload.notes[1:] == ("2 rows were out of order and were sorted stably by arrival time",)


def test_failed_rows_are_counted_and_left_out(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens\n0,a,10,0\n1,a,20,2\n2,a,0,0\n3,a,0,5\n4,a,30,3\n"
    workload = load(write(tmp_path, text))
    assert shape(workload) == [(0, 0, 20, 2, 2), (1, 3 * SECOND, 30, 3, 3)]
    assert workload.skipped_rows == 3
    assert workload.notes[1:] == (
        "3 failed rows (zero prompt or output tokens) were counted and not simulated",
    )
    with pytest.raises(InputError, match="all 1 rows failed"):
        load(write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,5,0\n"))


def test_limit_takes_the_first_usable_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n2,20,1\n0,1,0\n1,10,1\nrubbish,-5\n")
    workload = load(path, limit=2)
    assert [r.prompt_tokens for r in workload.requests] == [10, 20]
    assert workload.skipped_rows == 1
    with pytest.raises(InputError, match="line 5"):
        load(path, limit=3)


def test_a_long_file_is_not_held_in_memory(tmp_path: Path) -> None:
    line = "1,10,1," + "x" * 1000 + "\n"
    path = tmp_path / "long.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(b"arrival_s,prompt_tokens,output_tokens,comment\n" + line.encode() * 20_000)
    tracemalloc.start()
    assert len(load(path).requests) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000  # the text alone is 20 MB


def test_time_scale_stretches_exactly(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_ns,prompt_tokens,output_tokens\n0,1,1\n9007199254740993,1,1\n")
    assert load(path).requests[1].arrival_ns == 9007199254740993
    assert load(path, time_scale=0.1).requests[1].arrival_ns == 900719925474099
    assert load(path, time_scale=2).requests[1].arrival_ns == 2 * 9007199254740993
    with pytest.raises(InputError, match=r"time_scale: 10*\.0, expected a factor"):
        load(path, time_scale=1e9)


def test_what_the_client_asks_for_cuts_true_outputs(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens,max_tokens,priority\n0,8,100,,\n1,8,10,40,-3\n2,8,50,40,7\n",
    )
    assert [(r.max_tokens, r.priority) for r in load(path).requests] == [(100, 0), (40, -3), (40, 7)]
    workload = load(path, max_tokens=64, max_context=128)
    assert [row[3:] for row in shape(workload)] == [(64, 64), (40, 10), (40, 40)]
    assert workload.max_context == 128
    assert workload.notes[1:] == ("2 outputs were longer than max_tokens and were cut to it",)


def test_prefix_blocks_follow_their_request_through_sorting_and_skipping(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 9, "input_length": 600, "output_length": 1, "hash_ids": [0, 7]}\n'
        '{"timestamp": 1, "input_length": 600, "output_length": 0, "hash_ids": [5, 6]}\n'
        '{"timestamp": 0, "input_length": 10, "output_length": 1}\n'
    )
    requests = load(write(tmp_path, text)).requests
    assert {request.request_id: request.content_ids for request in requests} == {0: (0, 7), 1: ()}


LENGTHS_ONLY = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n1,2048,2049,0.0004\n"
)


def test_lengths_without_arrivals_need_a_process(tmp_path: Path) -> None:
    path = write(tmp_path, LENGTHS_ONLY)
    with pytest.raises(
        InputError,
        match=r"has lengths and no arrival times, expected a column arrived_at or an arrival process",
    ):
        load(path)
    workload = load(path, arrival={"process": "constant", "rate": 4, "concurrency": 3})
    assert shape(workload) == [(0, 0, 3772, 54, 54), (1, SECOND // 4, 1, 2048, 2048)]
    assert workload.concurrency == 3


def test_an_arrival_process_replaces_recorded_times_and_says_so(tmp_path: Path) -> None:
    workload = load(write(tmp_path, SAME_IN_EVERY_FORMAT["vidur"]), arrival={"process": "burst"})
    assert [r.arrival_ns for r in workload.requests] == [0, 0]
    assert workload.notes[1:] == ("recorded arrival times are replaced by a burst process",)
