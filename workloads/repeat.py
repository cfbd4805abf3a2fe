"""A workload several times over: the same requests again and again, each time a little later or earlier."""

from array import array

from policies.core.errors import InputError
from workloads.columns import Columns, IntLists
from workloads.drawn import MAX_REQUESTS
from workloads.rng import stream
from workloads.spec import TraceSpec
from workloads.timestamps import MAX_NS


def repeat_columns(columns: Columns, spec: TraceSpec, seed: int) -> None:
    """Append the requests of `columns` `spec.repeat` - 1 times; move every arrival by up to `spec.jitter_s`
    seconds.

    A repetition begins one mean gap after the last arrival of the one before. What prompts say is repeated
    too. Raises `InputError` when arrivals would pass 292 years.
    """
    count = len(columns)
    span_ns = max(columns.arrival_ns) - min(columns.arrival_ns)
    if count * spec.repeat > MAX_REQUESTS:
        raise InputError(
            f"workload.repeat: {spec.repeat} times {count} requests, expected at most {MAX_REQUESTS} in all"
        )
    period_ns = span_ns + span_ns // max(count - 1, 1)
    arrivals = [
        arrival_ns + turn * period_ns for turn in range(spec.repeat) for arrival_ns in columns.arrival_ns
    ]
    if spec.jitter_s:
        moved_ns = stream(seed, "jitter").random(len(arrivals)) * spec.jitter_s * 1e9
        arrivals = [arrival_ns + int(move_ns) for arrival_ns, move_ns in zip(arrivals, moved_ns, strict=True)]
    if max(arrivals) > MAX_NS:
        raise InputError(
            f"workload.repeat: {spec.repeat}, expected a number of times that ends within 292 years"
        )
    columns.arrival_ns = array("q", arrivals)
    columns.prompt_tokens *= spec.repeat
    columns.output_tokens *= spec.repeat
    columns.max_tokens *= spec.repeat
    columns.priority *= spec.repeat
    for lists in (columns.prefix_blocks, columns.exit_loops, columns.guessed):
        _append_again(lists, count, spec.repeat)
    recorded = list(columns.patience_ns.items())
    columns.patience_ns = {
        turn * count + at: patience_ns for turn in range(spec.repeat) for at, patience_ns in recorded
    }
    if spec.repeat > 1:
        columns.notes.append(f"the {count} requests of the file are run {spec.repeat} times")


def _append_again(lists: IntLists | None, count: int, repeat: int) -> None:
    if lists is not None:
        for at in range(count, count * repeat):
            lists.append(lists[at % count])
