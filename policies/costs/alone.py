"""What a request costs that has a device to itself: below that no scheduler can bring its latencies."""

from collections.abc import Iterable

from policies.core.seam.batch import ScheduledRange, Stage, Work
from policies.core.seam.exits import ExitRule
from policies.core.seam.objectives import Objectives
from policies.costs.latency import LatencyModel


def out_of_reach(
    objectives: Objectives, latency: LatencyModel, exits: ExitRule, prompts: Iterable[int], max_rows: int
) -> list[str]:
    """A sentence for every objective that the shortest of `prompts` could not keep alone, in batches of at
    most `max_rows`, counting the time of the device only."""
    shortest = min(prompts, default=1)
    first_ms = first_token_ns(latency, shortest, max_rows) / 1e6
    token_ms = token_ns(latency, exits, shortest) / 1e6
    floors_ms = {
        "ttft_ms": (first_ms, f"to the first token of a prompt of {shortest}"),
        "itl_ms": (token_ms, "per token"),
        "tpot_ms": (token_ms, "per token"),
        "e2e_ms": (first_ms, f"to the first token of a prompt of {shortest}"),
    }
    return [
        f"slo.{name}: {limit:g}: no request could keep it even alone: {floor_ms:.1f} ms {what}"
        for name, limit in objectives.limits_ms.items()
        for floor_ms, what in [floors_ms[name]]
        if floor_ms > limit
    ]


def token_ns(latency: LatencyModel, exits: ExitRule, position: int) -> int:
    """One decoded token at `position`: PRELUDE, as many loops as it must run, CODA, and the gaps between."""
    steps = ((Stage.PRELUDE, 0), (Stage.RECURRENT, exits.min_loops), (Stage.CODA, 0))
    return sum(
        latency.predict(Work.of(stage, loops, [ScheduledRange(0, stage, 0, position, 1)])).device_ns
        + latency.loop.device_gap_ns
        for stage, loops in steps
    )


def first_token_ns(latency: LatencyModel, prompt_tokens: int, max_rows: int) -> int:
    """A prompt in pieces of `max_rows` through all depths, and its CODA."""
    pieces = [
        ScheduledRange(0, Stage.PREFILL, 0, start, min(max_rows, prompt_tokens - start), start, embeds=True)
        for start in range(0, prompt_tokens, max_rows)
    ]
    works = [Work.of(Stage.PREFILL, latency.model.num_loops, [item]) for item in pieces]
    works.append(Work.of(Stage.CODA, 0, [ScheduledRange(0, Stage.CODA, 0, prompt_tokens - 1, 1)]))
    return sum(latency.predict(work).device_ns for work in works)
