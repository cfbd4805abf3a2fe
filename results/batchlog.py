"""`batches.csv` as a format: its columns, and one `LoggedBatch` for each of its lines, streamed, whatever the
size of the file. Everyone who reads batches of a run reads them here or as a table (`results.frames`).
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from policies.core.engine.batchlines import BATCH_COLUMNS
from policies.core.seam.batch import BATCH_STAGES, ScheduledRange, Stage
from results.csvlog import Columns, Fields, Row, read_rows

COLUMNS = Columns(BATCH_COLUMNS, ("exits", "grown", "preempted", "resumed", "reused"))
"""Runs recorded before there was early exit, or pressure on the KV pool, or shared prefixes lack the later
ones."""
MOST_LOOPS = 10_000
"""A longer batch is no batch of ours: readers take it apart loop by loop."""
STAGES = frozenset(map(str, BATCH_STAGES))


class LoggedRange(NamedTuple):
    """`request:stage:depth:start:count` of one range; `depth` is the first, the batch's `loop_count` says how
    many follow."""

    request_id: int
    stage: str
    depth: int
    token_start: int
    token_count: int

    @property
    def is_prompt(self) -> bool:
        return self.stage.startswith("PREFILL")


class LoggedBatch(NamedTuple):
    """One line of `batches.csv`: its numbers by name, times in ns, and all its fields as text in `row`.
    `ranges_text` is parsed by `ranges()` on demand."""

    row: Row
    seq: int
    stage: str
    loop_count: int
    num_requests: int
    rows: int
    submitted_ns: int
    started_ns: int
    finished_ns: int
    select_ns: int
    ranges_text: str
    collected_ns: int
    after_seq: int
    host_ns: int
    exits: frozenset[int]
    refused: frozenset[tuple[int, int]]

    @property
    def line(self) -> int:
        return self.row.line

    @property
    def fields(self) -> Fields:
        return self.row.fields

    @property
    def busy_ns(self) -> int:
        """How long the host chose, packed and launched it; from when on, the log does not say."""
        return self.select_ns + self.host_ns

    def ranges(self) -> list[LoggedRange]:
        """Raises `InputError` for text that is none."""
        try:
            return parse_ranges(self.ranges_text)
        except ValueError:
            raise self.row.wrong("ranges", "request:stage:depth:start:count with blanks between") from None

    @property
    def num_decode_rows(self) -> int:
        """Decode rows in a recurrent depth: RECURRENT ranges have one row each (prompt ranges say
        PREFILLING_RECURRENT)."""
        return self.ranges_text.count(":RECURRENT:")

    def invocations(self) -> list[tuple[int, int]]:
        """Start and end of each of its invocations in ns: `loop_count` equal parts of the batch, at least
        one.

        Four loops from 100 to 110 ns are (100, 102), (102, 105), (105, 107), (107, 110).
        """
        parts = max(self.loop_count, 1)
        span = self.finished_ns - self.started_ns
        edges = [self.started_ns + span * part // parts for part in range(parts + 1)]
        return list(pairwise(edges))


def parse_ranges(text: str) -> list[LoggedRange]:
    """The ranges of a `ranges` field, in batch order. Raises `ValueError` for other text."""
    found = []
    for item in text.split(" "):
        request_id, stage, depth, start, count = item.split(":")
        found.append(LoggedRange(int(request_id), stage, int(depth), int(start), int(count)))
    return found


def parse_work(text: str) -> tuple[ScheduledRange, ...]:
    """The ranges of a `ranges` field as work has them; a prompt range is taken to begin its chunk, which no
    log says. Raises `ValueError` for other text."""
    return tuple(
        ScheduledRange(
            item.request_id,
            Stage(item.stage),
            item.depth,
            item.token_start,
            item.token_count,
            item.token_start,
        )
        for item in parse_ranges(text)
    )


def _outcomes(row: Row) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """Requests whose token left early, or (request, position) where a guess was refused."""
    if ":" not in row.fields["exits"]:
        return frozenset(row.wholes("exits")), frozenset()
    found = set()
    for item in row.fields["exits"].split():
        request_id, _, position = item.partition(":")
        if not (request_id.isascii() and position.isascii() and request_id.isdigit() and position.isdigit()):
            raise row.wrong("exits", "requests, or request:position, with blanks between")
        found.add((int(request_id), int(position)))
    return frozenset(), frozenset(found)


def read_batches(path: Path) -> Iterator[LoggedBatch]:
    """Every batch of a `batches.csv`, in order.

    Raises `InputError` naming file, line and column when the file cannot be used (see
    `results.csvlog.read_rows`) or holds a line that is no batch. Whether one may follow the other is not
    asked here.
    """
    for row in read_rows(path, COLUMNS):
        fields, whole = row.fields, row.whole
        loop_count = whole("loop_count")
        if not 0 <= loop_count <= MOST_LOOPS:
            raise row.wrong("loop_count", f"0 to {MOST_LOOPS}")
        if fields["stage"] not in STAGES:
            raise row.wrong("stage", f"one of {', '.join(BATCH_STAGES)}")
        yield LoggedBatch(
            row,
            whole("seq"),
            fields["stage"],
            loop_count,
            whole("num_requests"),
            whole("rows"),
            whole("submitted_ns"),
            whole("started_ns"),
            whole("finished_ns"),
            whole("select_ns"),
            fields["ranges"],
            whole("collected_ns"),
            whole("after_seq"),
            whole("host_ns"),
            *_outcomes(row),
        )
