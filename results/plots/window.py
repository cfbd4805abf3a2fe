"""Which batches the wavefront picture shows, and where every range's box goes. Geometry only; drawing is
`results.plots.wavefront`.

A lane is one depth; two thin lanes hold the prelude (embedding, below depth 0) and the coda (LM head, on
top). Time runs across.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from policies.core.errors import InputError
from policies.core.seam.batch import Stage
from results.batchlog import LoggedBatch, LoggedRange
from results.load import Run

WINDOW_BATCHES, LEAD_BATCHES = 24, 6
MOST_WINDOW_BATCHES = 96
"""How long the default window may get to show a second prompt."""
MOST_SEARCHED = 50_000
"""Batches in which the default window is looked for."""
PROMPT_START = re.compile(r":PREFILL[A-Z_]*:0:0:")
"""In a batch's ranges: prompt work at depth 0 from token 0."""
PROMPT = re.compile(r"(?:^| )(\d+):PREFILL")
MAX_BOXES = 20_000
EMBED_LANE = -1
MIN_DECODE_SHARE, MAX_DECODE_SHARE = 0.22, 0.5
"""A decode row is one row among hundreds: it gets at least this much of a lane, all decode rows of a lane at
most that much."""


@dataclass(frozen=True, slots=True)
class Window:
    """What to show: batches `first_batch..last_batch` (both included), or everything that runs in `[start_ns,
    end_ns)`."""

    first_batch: int | None = None
    last_batch: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None

    def select(self, batches: Iterable[LoggedBatch], name: str) -> list[LoggedBatch]:
        """The batches inside. Raises `InputError`, naming the run, when there is none or more than a picture
        can show."""
        chosen = self.clip(batches, MAX_BOXES + 1)
        if not chosen:
            raise InputError(f"{name}: no batch in {self}")
        if sum(map(_num_boxes, chosen)) > MAX_BOXES:
            raise InputError(f"{name}: {self} holds more than {MAX_BOXES} ranges, choose a shorter one")
        return chosen

    def clip(self, batches: Iterable[LoggedBatch], max_boxes: int = MAX_BOXES) -> list[LoggedBatch]:
        """The batches inside, perhaps none, up to and including the one that brings them to `max_boxes`
        ranges."""
        chosen: list[LoggedBatch] = []
        num_boxes = 0
        for batch in batches:
            if (self.last_batch is not None and batch.seq > self.last_batch) or (
                self.end_ns is not None and batch.started_ns >= self.end_ns
            ):
                break
            if (self.first_batch is not None and batch.seq < self.first_batch) or (
                self.start_ns is not None and batch.finished_ns <= self.start_ns
            ):
                continue
            chosen.append(batch)
            num_boxes += _num_boxes(batch)
            if num_boxes >= max_boxes:
                break
        return chosen

    def __str__(self) -> str:
        if self.start_ns is not None or self.end_ns is not None:
            start = "the start" if self.start_ns is None else f"{self.start_ns / 1e6:g} ms"
            return (
                f"the window from {start} to "
                f"{'the end' if self.end_ns is None else f'{self.end_ns / 1e6:g} ms'}"
            )
        return (
            f"the window of batches {self.first_batch or 0} to "
            f"{'the last' if self.last_batch is None else self.last_batch}"
        )


def default_window(run: Run, num_batches: int = WINDOW_BATCHES) -> Window:
    """`num_batches` consecutive batches in which a prompt joins running decodes and which show two prompts or
    more; else up to `MOST_WINDOW_BATCHES` of them, until a second prompt is there; else one prompt that
    joins; else the first batches of the run.

    A window begins up to `LEAD_BATCHES` before the batch in which a prompt starts, with decode rows in one of
    them. Where the device idles for longer than any of those took, nothing is joined.
    """
    lead: deque[LoggedBatch] = deque(maxlen=LEAD_BATCHES)
    found: list[_Candidate] = []
    opened: list[_Candidate] = []
    for batch in islice(run.batches(), MOST_SEARCHED):
        if lead and batch.started_ns - lead[-1].finished_ns > max(
            item.finished_ns - item.started_ns for item in lead
        ):
            lead.clear()
            opened.clear()
        prompts = PROMPT.findall(batch.ranges_text)
        if PROMPT_START.search(batch.ranges_text) and any(item.num_decode_rows for item in lead):
            before = {name for item in lead for name in PROMPT.findall(item.ranges_text)}
            candidate = _Candidate(lead[0].seq, before)
            found.append(candidate)
            opened.append(candidate)
        for candidate in opened:
            candidate.see(batch.seq, prompts)
            if candidate.second_seq is not None and candidate.second_seq < candidate.first_seq + num_batches:
                return Window(candidate.first_seq, candidate.first_seq + num_batches - 1)
        opened = [item for item in opened if batch.seq < item.first_seq + MOST_WINDOW_BATCHES]
        lead.append(batch)
    best = min(
        (item for item in found if item.second_seq is not None), key=lambda item: item.length, default=None
    )
    if best is not None:
        return Window(best.first_seq, best.first_seq + max(num_batches, best.length + LEAD_BATCHES) - 1)
    first_seq = found[0].first_seq if found else 0
    return Window(first_seq, first_seq + num_batches - 1)


@dataclass(slots=True)
class _Candidate:
    """A window that could begin at `first_seq`: the prompts it shows, and the batch that shows a second
    one."""

    first_seq: int
    prompts: set[str]
    second_seq: int | None = None

    def see(self, seq: int, prompts: Iterable[str]) -> None:
        self.prompts.update(prompts)
        if self.second_seq is None and len(self.prompts) > 1:
            self.second_seq = seq

    @property
    def length(self) -> int:
        assert self.second_seq is not None
        return self.second_seq - self.first_seq + 1


def shared_window(runs: Sequence[Run], num_batches: int = WINDOW_BATCHES) -> Window:
    """One stretch of time for several runs of a workload: the last run's default window, by the clock."""
    chosen = default_window(runs[-1], num_batches).clip(runs[-1].batches())
    return Window(start_ns=chosen[0].started_ns, end_ns=chosen[-1].finished_ns)


class Box(NamedTuple):
    """One range at one depth: where it lies and what it says. `y` and `height` are in lanes, depth 0 from 0
    to 1. `is_refused`: the row of a guess that turns out wrong within the panel."""

    start_ns: int
    end_ns: int
    y: float
    height: float
    item: LoggedRange
    depth: int
    is_refused: bool = False


LM_HEAD = (Stage.CODA, Stage.VERIFY, Stage.DRAFT)


def lane(stage: str, depth: int, num_loops: int) -> int:
    """-1 for embedding, the depth for recurrent work, `num_loops` for the LM head."""
    if stage in (Stage.PRELUDE, Stage.PREFILLING_PRELUDE):
        return EMBED_LANE
    return num_loops if stage in LM_HEAD else depth


def lane_bounds(number: int, num_loops: int) -> tuple[float, float]:
    """Bottom and height of a lane: 0.92 for a depth, 0.34 for embedding and LM head."""
    if number == EMBED_LANE:
        return -0.5, 0.34
    return (num_loops + 0.12, 0.34) if number == num_loops else (number + 0.04, 0.92)


def layout(panels: Sequence[Sequence[LoggedBatch]], num_loops: int) -> list[list[Box]]:
    """Boxes of every panel. A depth's box is as high as its share of rows, on one scale for all panels.

    The fullest (batch, depth) of all panels fills its lane: with 64 rows there, a chunk of 16 rows is a
    quarter of a lane high everywhere. Inside a lane prompts lie below decode rows, each by request.
    """
    cells = [_cells(batches, num_loops) for batches in panels]
    deep = [items for panel in cells for _, _, number, items, _ in panel if 0 <= number < num_loops]
    most_decode = max((sum(not item.is_prompt for item in items) for items in deep), default=0)
    floor = min(MIN_DECODE_SHARE, MAX_DECODE_SHARE / max(most_decode, 1))
    most_rows = max((sum(item.token_count for item in items) for items in deep), default=1)
    fullest = max((sum(_share(item, most_rows, floor) for item in items) for items in deep), default=1.0)
    boxes = []
    for panel, batches in zip(cells, panels, strict=True):
        found, refusals = [], _refusals(batches)
        for start_ns, end_ns, number, items, after_seq in panel:
            bottom, height = lane_bounds(number, num_loops)
            is_deep = 0 <= number < num_loops
            shares = [
                _share(item, most_rows, floor) / fullest if is_deep else 1 / len(items) for item in items
            ]
            for item, share in zip(items, shares, strict=True):
                is_refused = not item.is_prompt and any(
                    position < item.token_start and after_seq < seq
                    for position, seq in refusals.get(item.request_id, ())
                )
                found.append(Box(start_ns, end_ns, bottom, share * height, item, number, is_refused))
                bottom += share * height
        boxes.append(found)
    return boxes


def _num_boxes(batch: LoggedBatch) -> int:
    return max(batch.loop_count, 1) * (batch.ranges_text.count(" ") + 1)


def _refusals(batches: Sequence[LoggedBatch]) -> dict[int, list[tuple[int, int]]]:
    """By request (position, batch) of every guess that was refused: what the request runs beyond the
    position, in batches formed before that one was collected, stands on the guess."""
    found: dict[int, list[tuple[int, int]]] = {}
    for batch in batches:
        for request_id, position in batch.refused:
            found.setdefault(request_id, []).append((position, batch.seq))
    return found


def _cells(
    batches: Sequence[LoggedBatch], num_loops: int
) -> list[tuple[int, int, int, list[LoggedRange], int]]:
    """(start, end, lane, ranges from bottom to top, last batch collected before) of every lane in every
    invocation."""
    cells: list[tuple[int, int, int, list[LoggedRange], int]] = []
    for batch in batches:
        ranges = sorted(
            batch.ranges(), key=lambda item: (not item.is_prompt, item.request_id, item.token_start)
        )
        for part, (start_ns, end_ns) in enumerate(batch.invocations()):
            lanes: dict[int, list[LoggedRange]] = {}
            for item in ranges:
                lanes.setdefault(lane(item.stage, item.depth + part, num_loops), []).append(item)
            cells.extend(
                (start_ns, end_ns, number, lanes[number], batch.after_seq) for number in sorted(lanes)
            )
    return cells


def _share(item: LoggedRange, most_rows: int, floor: float) -> float:
    share = item.token_count / most_rows
    return share if item.is_prompt else max(share, floor)
