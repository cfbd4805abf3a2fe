"""The order among stages that all policies share, and the rule that says when a batch must come back early.

Building blocks for a policy's `select`; none of them knows a policy.
"""

from collections.abc import Callable, Sequence

from policies.core.seam.batch import ScheduledRange, Selection, Stage
from policies.core.seam.policy import decode_row, prompt_range
from policies.core.seam.view import RequestView, View


def in_stage_order(view: View, prompt_batch: Callable[[View], Selection | None]) -> Selection | None:
    """Decode stages around a policy's own prompt batch: PRELUDE, CODA, prompt work, RECURRENT.

    Prompt work steps back when `max_prefill_batches_before_decode` prompt batches have passed since decode
    rows last ran.
    """
    early = token_stages(view)
    if early is not None:
        return early
    if view.prompts and not (
        view.looping and view.prompt_batches_since_decode >= view.limits.max_prefill_batches_before_decode
    ):
        batch = prompt_batch(view)
        if batch is not None:
            return batch
    return decode_batch(view)


def token_stages(view: View) -> Selection | None:
    """The PRELUDE or CODA batch that is due before recurrent work, if any.

    Refill: an embedded token re-enters at once, and CODA runs when `min_coda_batch_size` states wait, when
    nothing else can run, or when one has waited for as many batches as the model has loops: whoever was
    looping beside it has come by then. No refill: both wait until the looping cohort has drained.
    """
    if view.limits.decode == "no_refill" and view.looping:
        return None
    if view.preludes:
        return token_batch(view, Stage.PRELUDE, view.preludes)
    if view.codas and (
        len(view.codas) >= view.limits.min_coda_batch_size
        or not (view.looping or view.prompts)
        or _waits_too_long(view)
    ):
        return token_batch(view, Stage.CODA, view.codas)
    return None


def _waits_too_long(view: View) -> bool:
    newest_seq = max([request.last_seq for request in view.running])
    return newest_seq - min([request.last_seq for request in view.codas]) >= view.num_loops


def token_batch(view: View, stage: Stage, requests: Sequence[RequestView]) -> Selection:
    """One PRELUDE or CODA row for each request, as the row budget allows, longest waiting first."""
    return Selection(
        stage, tuple([decode_row(request, stage) for request in within_budget(view, requests)]), 0
    )


def decode_batch(view: View) -> Selection | None:
    """All looping tokens, one depth, or all remaining depths when nothing needs a boundary before.

    The next boundary is needed when rows stand at different depths (the first to finish leaves), when not all
    fit, or when a token outside the batch waits to join; otherwise the next one at which a token may leave.
    """
    if not view.looping:
        return None
    requests, stage = within_budget(view, view.looping), Stage.RECURRENT
    ranges = tuple([decode_row(request, stage) for request in requests])
    depth = ranges[0].depth
    needs_boundary = (
        len(requests) < len(view.looping)
        or any([item.depth != depth for item in ranges])
        or (view.limits.decode == "refill" and bool(view.codas or view.preludes))
    )
    return Selection(stage, ranges, 1 if needs_boundary else view.exits.boundary(depth) - depth)


def within_budget(view: View, requests: Sequence[RequestView]) -> Sequence[RequestView]:
    """The requests themselves when one row each fits the budget, else those scheduled longest ago."""
    budget = view.limits.max_num_batched_tokens
    if len(requests) <= budget:
        return requests
    return sorted(requests, key=lambda request: (request.last_seq, request.order))[:budget]


def oldest_chunk_ranges(view: View, stage: Stage, max_rows: int) -> list[ScheduledRange]:
    """One range for each prompt, inside its oldest unfinished chunk and at the deepest depth that is ready.

    Without a wavefront a request has one chunk at a time, so the deepest ready range is the only one that
    brings it to an end.
    """
    ranges = []
    for request in view.prompts:
        if max_rows == 0:
            break
        depth, start, end = request.prompt.deepest_ready()
        end = min(end, start + max_rows)
        if end > start:
            ranges.append(prompt_range(request, stage, depth, start, end))
            max_rows -= end - start
    return ranges


def prompt_selection(view: View, ranges: list[ScheduledRange], comes_back: bool) -> Selection | None:
    """Prompt ranges as a batch: through all remaining depths, or one depth when something needs the boundary.

    `comes_back` is the policy's concrete reason to return before the chunk finishes. Ranges at different
    depths always return, because the first to finish leaves the batch.
    """
    if not ranges:
        return None
    depth = ranges[0].depth
    if comes_back or any([item.depth != depth for item in ranges]):
        return Selection(Stage.PREFILLING_RECURRENT, with_stage(ranges, Stage.PREFILLING_RECURRENT), 1)
    return Selection(Stage.PREFILL, with_stage(ranges, Stage.PREFILL), view.num_loops - depth)


def with_stage(ranges: Sequence[ScheduledRange], stage: Stage) -> tuple[ScheduledRange, ...]:
    return tuple([item if item.stage is stage else item._replace(stage=stage) for item in ranges])


def mixed_selection(view: View, ranges: Sequence[ScheduledRange]) -> Selection:
    """Decode rows and prompt ranges in one batch, one depth: both kinds need the boundary."""
    stage = Stage.RECURRENT
    rows = [decode_row(request, stage) for request in within_budget(view, view.looping)]
    return Selection(stage, (*rows, *ranges), 1)
