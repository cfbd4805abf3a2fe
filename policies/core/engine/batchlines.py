"""The lines of `batches.csv`: its columns, and how batches become text, one by one or many of one shape.

Column names and order are a public contract; columns after `ranges` are ours and may grow.
"""

from collections.abc import Iterator, Sequence
from itertools import count, cycle

from policies.core.seam.batch import NO_TRANSFERS, ExecutionBatch, ScheduledRange, Stage, Transfers, Work
from policies.core.seam.events import COMPONENTS, Completion, Times

BATCH_COLUMNS = (
    "seq", "stage", "loop_count", "num_requests", "rows", "submitted_ns", "started_ns", "finished_ns",
    "select_ns", "ranges", "collected_ns", "after_seq", "host_ns", "limit_ns",
    *(f"{name}_ns" for name in COMPONENTS), "allocated", "exits", "grown", "preempted", "resumed", "reused",
)  # fmt: skip

_STAGE_FIELD = {stage: f":{stage.value}:" for stage in Stage}


def ranges_text(ranges: tuple[ScheduledRange, ...]) -> str:
    """Ranges as `request:stage:depth:start:count`, joined by spaces, in batch order.

    Unpacked and not read by name: two thirds of the time, in the place where a run spends most of it.
    """
    return " ".join(
        [
            f"{request_id}{_STAGE_FIELD[stage]}{depth}:{start}:{count}"
            for request_id, stage, depth, start, count, _, _, _ in ranges
        ]
    )


_NOTHING_MOVED = ("", "", "", "", "")


def batch_line(batch: ExecutionBatch, completion: Completion) -> str:
    """One line of `batches.csv`; `exits` are the requests whose token the completion reported as having left
    early, or `request:position` of VERIFY rows whose token is not the one that was guessed.

    `allocated` and `grown` are `request:groups` (see `compress`). `preempted` is `request:recompute` or
    `request:swap:groups` with the groups copied out; `resumed` is `request:kept tokens:groups copied in` for
    those of `allocated` that had been preempted. `reused` is `request:groups` with the number of leading
    groups of `allocated` that hold a shared prefix.
    """
    work, formed_ns = batch.work, batch.formed_ns
    components = (
        ",".join(map(str, completion.components_ns))
        if completion.components_ns
        else "," * (len(COMPONENTS) - 1)
    )
    exits = " ".join(map(str, sorted(completion.exits))) if completion.exits else ""
    if completion.refused:
        exits = " ".join([f"{request_id}:{position}" for request_id, position in sorted(completion.refused)])
    moved = _NOTHING_MOVED if batch.transfers is NO_TRANSFERS else _moved(batch.transfers)
    allocated, grown, preempted, resumed, reused = moved
    return (
        f"{batch.seq},{work.stage},{work.loop_count},{work.num_requests},{work.rows},{formed_ns},"
        f"{completion.started_ns},{completion.finished_ns},{completion.select_ns},{ranges_text(work.ranges)},"
        f"{completion.now_ns},{batch.after_seq},{completion.host_ns},{completion.limit_ns},{components},"
        f"{allocated},{exits},{grown},{preempted},{resumed},{reused}\n"
    )


def repeated_lines(
    works: Sequence[Work], first_seq: int, after_seq: int, formed_ns: Sequence[int], times: Times
) -> Iterator[str]:
    """The lines of `RunLog.repeated`: what `batch_line` writes of each, text that stays made once."""
    shapes = []
    for work in works:
        head = f",{work.stage},{work.loop_count},{work.num_requests},{work.rows},"
        ranges = " ".join(
            [f"{item.request_id}:{item.stage}:{item.depth}:%d:{item.token_count}" for item in work.ranges]
        )
        shapes.append((head, ranges, [item.token_start for item in work.ranges]))
    moved = "," * len(_NOTHING_MOVED)
    texts: dict[tuple[int, ...], str] = {(): "," * (len(COMPONENTS) - 1)}
    rows = zip(cycle(shapes), count(), formed_ns, *times, strict=False)
    size = len(shapes)
    for shape, at, formed, now_ns, started_ns, finished_ns, select_ns, host_ns, limit_ns, parts_ns in rows:
        head, ranges, starts = shape
        turn = at // size
        positions = ranges % tuple([start + turn for start in starts])
        parts = texts.get(parts_ns)
        if parts is None:
            parts = texts[parts_ns] = ",".join(map(str, parts_ns))
        yield (
            f"{first_seq + at}{head}{formed},{started_ns},{finished_ns},{select_ns},{positions},{now_ns},"
            f"{after_seq + at},{host_ns},{limit_ns},{parts},{moved}\n"
        )


def _moved(transfers: Transfers) -> tuple[str, str, str, str, str]:
    """The columns that say what was transferred: allocated, grown, preempted, resumed, reused."""
    allocated = " ".join(f"{item.request_id}:{compress(item.block_groups)}" for item in transfers.allocations)
    grown = " ".join(f"{item.request_id}:{compress(item.block_groups)}" for item in transfers.growths)
    preempted = " ".join(
        f"{item.request_id}:swap:{compress(item.block_groups)}"
        if item.is_swapped
        else f"{item.request_id}:recompute"
        for item in transfers.preemptions
    )
    resumed = " ".join(
        f"{item.request_id}:{item.num_kept_tokens}:{item.num_swapped_groups}"
        for item in transfers.allocations
        if item.is_resumed
    )
    reused = " ".join(
        f"{item.request_id}:{item.num_reused_groups}"
        for item in transfers.allocations
        if item.num_reused_groups
    )
    return allocated, grown, preempted, resumed, reused


def compress(groups: tuple[int, ...]) -> str:
    """Block groups in token order as runs: (4, 5, 6, 2) is `4-6+2`."""
    runs: list[str] = []
    start = 0
    for end in range(1, len(groups) + 1):
        if end == len(groups) or groups[end] != groups[end - 1] + 1:
            runs.append(str(groups[start]) if end - start == 1 else f"{groups[start]}-{groups[end - 1]}")
            start = end
    return "+".join(runs)
