"""`batches.csv` read as a stream: one `LoggedBatch` at a time, whatever the size of the file. Knows the
format, not its meaning."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from policies.core.engine.runlog import BATCH_COLUMNS
from policies.core.errors import InputError
from policies.core.seam.batch import Stage

CONTRACT_COLUMNS = BATCH_COLUMNS[:10]
MOST_LOOPS = 10_000
"""A longer batch is no batch of ours: readers take it apart loop by loop."""


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
    """The public columns of one batch that readers here need; times in ns. `ranges_text` is parsed by
    `ranges()` on demand."""

    seq: int
    stage: str
    loop_count: int
    num_requests: int
    rows: int
    started_ns: int
    finished_ns: int
    ranges_text: str

    def ranges(self) -> list[LoggedRange]:
        return parse_ranges(self.ranges_text)

    @property
    def has_prompt(self) -> bool:
        return ":PREFILL" in self.ranges_text

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


def read_batches(path: Path) -> Iterator[LoggedBatch]:
    """Every batch of a `batches.csv`, in order.

    Raises `InputError` naming file and line when the file is missing, has other columns, or holds a line that
    is no batch.
    """
    try:
        with open(path, encoding="ascii") as file:
            header = file.readline().rstrip("\n").split(",")
            if tuple(header[: len(CONTRACT_COLUMNS)]) != CONTRACT_COLUMNS:
                raise InputError(
                    f"{path} line 1: columns start {','.join(header[:4])}, expected "
                    f"{','.join(CONTRACT_COLUMNS)}"
                )
            for number, line in enumerate(file, start=2):
                yield _parse(line, len(header), path, number)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file, expected a batches.csv") from None


def _parse(line: str, num_columns: int, path: Path, number: int) -> LoggedBatch:
    fields = line.rstrip("\n").split(",")
    try:
        if len(fields) != num_columns or not line.endswith("\n"):
            raise ValueError(f"{len(fields)} fields, expected {num_columns}")
        seq, stage, loops, requests, rows, _, started, finished, _, ranges = fields[:10]
        batch = LoggedBatch(
            int(seq),
            Stage(stage).value,
            int(loops),
            int(requests),
            int(rows),
            int(started),
            int(finished),
            ranges,
        )
        if not 0 <= batch.loop_count <= MOST_LOOPS:
            raise ValueError(f"loop_count: {batch.loop_count}, expected 0 to {MOST_LOOPS}")
        return batch
    except ValueError as error:
        raise InputError(f"{path} line {number}: {error}") from None
