"""The outside checker itself: it accepts a true log and names the invariant that a falsified one breaks."""

import csv
import io
from collections.abc import Callable

import pytest
from log_checker import Broken, Rules, check_log
from toy_backend import Run, World, run

from policies.core.seam.request import Request
from policies.core.seam.settings import SchedulerSettings
from policies.wcpb import Wavefront

Lines = list[list[str]]
RULES = Rules(
    num_loops=4, max_num_seqs=2, max_num_batched_tokens=16, chunk_tokens=4, inflight=2, resident_chunks=4,
    num_groups=4, block_size=16, outputs={0: 2, 1: 1, 2: 1, 3: 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def log() -> Run:
    """A wavefront of three chunks, a second request beside it, a third after the device was idle, a fourth
    that never fits."""
    requests = [
        Request(0, 0, 12, 2),
        Request(1, 500, 4, 1),
        Request(2, 20_000, 4, 1),
        Request(3, 20_000, 99, 9),
    ]
    limits = SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=16, prefill_chunk_size=4, inflight=2)
    return run(Wavefront(), requests, limits, num_blocks=16, world=World(host_ns=10))


def broken_by(log: Run, change: Callable[[Lines, Lines], None], rules: Rules = RULES) -> int:
    """Number of the invariant that the checker says is broken once `change` has falsified the fields; line 0
    is the header."""
    batches, requests = (list(csv.reader(io.StringIO(text))) for text in (log.batches_csv, log.requests_csv))
    change(batches, requests)
    with pytest.raises(Broken) as caught:
        check_log(joined(batches), joined(requests), rules)
    return caught.value.number


def joined(lines: Lines) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def test_the_checker_accepts_a_true_log_and_counts_what_it_saw(log: Run) -> None:
    replay = check_log(log.batches_csv, log.requests_csv, RULES)
    assert (replay.peak_resident_chunks, replay.surplus_rows) == (3, 0)


@pytest.mark.parametrize(
    ("number", "seq", "old", "new"),
    [
        (2, 1, "0:PREFILLING_RECURRENT:0:4:4", "0:PREFILLING_RECURRENT:1:4:4"),
        (2, 1, "0:PREFILLING_RECURRENT:0:4:4", "0:PREFILLING_RECURRENT:0:8:4"),
        (2, 1, "0:PREFILLING_RECURRENT:1:0:4", "0:PREFILLING_RECURRENT:2:0:4"),
        (2, 1, "0:PREFILLING_RECURRENT:1:0:4", "0:PREFILLING_RECURRENT:0:0:4"),
        (2, 1, "0:PREFILLING_RECURRENT:0:4:4", "0:RECURRENT:0:4:1 0:PREFILLING_RECURRENT:0:4:3"),
        (2, 2, "0:PREFILLING_RECURRENT:0:8:4", "0:PREFILLING_RECURRENT:0:9:3"),
        (4, 0, "0:0", "0:4"),
        (4, 0, "0:0", "0:0-1"),
        (4, 2, "1:1", "1:0"),
        (9, 2, "1:1", ""),
        (9, 0, "0:0", "0:0 1:1"),
    ],
)
def test_a_false_range_or_block_is_found(log: Run, number: int, seq: int, old: str, new: str) -> None:
    def change(batches: Lines, _: Lines) -> None:
        line = batches[seq + 1]
        column = 9 if "PREFILL" in old else 20
        assert old in line[column]
        line[column] = line[column].replace(old, new)
        ranges = line[9].split(" ")
        line[3] = str(len({item.split(":")[0] for item in ranges}))
        line[4] = str(sum(int(item.split(":")[4]) for item in ranges))

    assert broken_by(log, change) == number


@pytest.mark.parametrize(
    ("number", "column", "shift"),
    [
        (9, 5, 1),
        (6, 5, -1000),
        (6, 6, -1),
        (6, 7, 1),
        (6, 10, -100_000),
        (5, 11, -1),
        (0, 4, 1),
        (0, 3, 1),
        (0, 0, 1),
        (2, 2, 1),
    ],
    ids=[
        "late",
        "early",
        "started",
        "finished",
        "collected",
        "in flight",
        "rows",
        "requests",
        "seq",
        "loops",
    ],
)
def test_a_false_number_of_a_batch_is_found(log: Run, number: int, column: int, shift: int) -> None:
    def change(batches: Lines, _: Lines) -> None:
        batches[5][column] = str(int(batches[5][column]) + shift)

    assert broken_by(log, change) == number


@pytest.mark.parametrize(
    ("number", "request_id", "column", "text"),
    [
        (9, 0, 3, "1"),
        (7, 0, 4, "running"),
        (7, 1, 12, "5020"),
        (6, 1, 5, "1011"),
        (6, 1, 6, "1"),
        (6, 1, 7, "99999"),
        (6, 1, 1, "25000"),
        (9, 1, 1, "1500"),
        (7, 3, 4, "finished"),
        (7, 3, 11, ""),
        (7, 3, 7, ""),
        (7, 1, 4, "refused"),
    ],
)
def test_a_false_story_of_a_request_is_found(
    log: Run, number: int, request_id: int, column: int, text: str
) -> None:
    def change(_: Lines, requests: Lines) -> None:
        requests[request_id + 1][column] = text
        if column == 12:
            requests[request_id + 1][6] = text

    assert broken_by(log, change) == number


def test_a_missing_batch_a_lost_token_and_a_request_told_twice_are_found(log: Run) -> None:
    def lose_last(batches: Lines, _: Lines) -> None:
        batches.pop()

    def tell_twice(_: Lines, requests: Lines) -> None:
        requests.append(requests[1])

    assert broken_by(log, lose_last) == 9
    assert broken_by(log, tell_twice) == 7


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (3, {"resident_chunks": 2}),
        (5, {"max_num_batched_tokens": 12}),
        (5, {"inflight": 1}),
        (9, {"inflight": 3}),
        (7, {"num_groups": 40}),
        (9, {"concurrency": 1}),
        (7, {"outputs": {0: 1}}),
        (2, {"chunk_tokens": 3}),
    ],
    ids=str,
)
def test_a_log_is_held_to_the_limits_of_its_run(log: Run, number: int, change: dict[str, object]) -> None:
    rules = Rules(**{**RULES.__dict__, **change})  # type: ignore[arg-type]
    assert broken_by(log, lambda *_: None, rules) == number
