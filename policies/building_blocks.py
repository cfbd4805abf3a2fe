"""What policies are made of: the order among stages that all share, decode rows, prompt ranges, and the rule
that says when a batch must come back early.

Building blocks for a policy's `select`; none of them knows a policy.
"""

from collections.abc import Callable, Sequence

from policies.core.seam.batch import Proposal, Selection, new_proposal
from policies.core.seam.view import RequestView, View

PromptRanges = Callable[[View, int], list[Proposal]]
"""A policy's prompt ranges for a batch: at most so many rows."""


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


def beside_decode(
    view: View,
    prompt_ranges: PromptRanges,
    prompt_batch: Callable[[View], Selection | None],
    regroups: Callable[[View, list[Proposal]], bool] = lambda view, ranges: False,
) -> Selection | None:
    """Decode stages around recurrent batches that decode rows and prompt ranges share.

    They take turns only where decode rows alone fill a whole batch: then `prompt_batch` has its turn in stage
    order, as it has where nobody loops. `regroups` says whether other ranges could join the prompt ranges at
    the next depth.
    """
    max_rows = view.limits.max_num_batched_tokens - len(view.looping)
    if max_rows <= 0:
        return in_stage_order(view, prompt_batch)
    early = token_stages(view)
    if early is not None:
        return early
    if not view.looping:
        return prompt_batch(view)
    ranges = prompt_ranges(view, max_rows)
    if not ranges:
        return decode_batch(view)
    rows = decode_rows(view, view.looping)
    return Selection((*rows, *ranges), 1 if regroups(view, ranges) else shared_depths(view, rows, ranges))


def token_stages(view: View) -> Selection | None:
    """The PRELUDE or CODA batch that is due before recurrent work, if any.

    Refill: an embedded token re-enters at once, and CODA runs when `min_coda_batch_size` states wait, when
    nothing else can run, or when one has waited for as many batches as the model has loops: whoever was
    looping beside it has come by then. No refill: both wait until the looping cohort has drained.
    """
    if view.limits.decode == "no_refill" and view.looping:
        return None
    if view.preludes:
        return Selection(decode_rows(view, view.preludes), 0)
    heads = (*view.codas, *view.drafts) if view.drafts else view.codas
    if heads and (
        len(heads) >= view.limits.min_coda_batch_size
        or not (view.looping or view.prompts)
        or _waits_too_long(view)
    ):
        return Selection(decode_rows(view, heads), 0)
    return None


def drafts_first(view: View) -> View:
    """`view` as policies see it that guess one token after another from early loops, and then check all of
    them in one submission of the loops that remain: without rows that wait for another guess behind them, and
    of the others only those with as many loops to the next boundary as the one that has waited longest."""
    if not view.exits.draft_loops:
        return view
    draft_loops = view.exits.draft_loops
    is_early = [request.depth < draft_loops for request in view.looping]
    drafting = {request.request_id for request in view.drafts}
    drafting.update([item.request_id for item, early in zip(view.looping, is_early, strict=True) if early])
    looping = [
        item
        for item, early in zip(view.looping, is_early, strict=True)
        if early or item.request_id not in drafting
    ]
    if looping:
        oldest = min(looping, key=lambda request: (request.last_seq, request.order))
        loops = view.exits.boundary(oldest.depth) - oldest.depth
        looping = [item for item in looping if view.exits.boundary(item.depth) - item.depth == loops]
    return view._replace(looping=tuple(looping))


def _waits_too_long(view: View, batches_ahead: int = 0) -> bool:
    """Whether a hidden state waits at the LM head for too long, once `batches_ahead` more have been
    formed."""
    newest_seq = max([request.last_seq for request in view.running]) + batches_ahead
    return newest_seq - min([request.last_seq for request in (*view.codas, *view.drafts)]) >= view.num_loops


def token_comes_next(view: View) -> bool:
    """Whether a token that waits outside, at the LM head for company, is let through after the next batch."""
    if not (view.codas or view.drafts) or (view.limits.decode == "no_refill" and view.looping):
        return False
    return _waits_too_long(view, batches_ahead=1)


def decode_comes_next(view: View) -> bool:
    """Whether decode work may have its turn after one more prompt batch: split's reason to come back
    early."""
    turn = view.prompt_batches_since_decode + 1 >= view.limits.max_prefill_batches_before_decode
    return (bool(view.looping) and turn) or token_comes_next(view)


def decode_rows(view: View, requests: Sequence[RequestView]) -> tuple[Proposal, ...]:
    """One row for each request, at its position and depth, as the row budget allows, longest waiting
    first."""
    return tuple(
        [
            new_proposal((request.request_id, request.depth, at := request.position, at + 1))
            for request in within_budget(view, requests)
        ]
    )


def decode_batch(view: View) -> Selection | None:
    """All looping tokens, as many depths as nobody needs a boundary."""
    if not view.looping:
        return None
    ranges = decode_rows(view, view.looping)
    return Selection(ranges, 1 if len(ranges) < len(view.looping) else shared_depths(view, ranges))


def shared_depths(view: View, rows: Sequence[Proposal], ranges: Sequence[Proposal] = ()) -> int:
    """How many depths a batch of decode rows and prompt ranges runs: up to the next boundary that is needed.

    That is the very next one when ranges stand at different depths (the first to finish leaves), or when a
    token outside the batch is about to join; otherwise the next one at which a token may leave. Where tokens
    are guessed, they run until the first of them is at the LM head, or through.
    """
    depth = rows[0].depth
    if token_comes_next(view):
        return 1
    if view.exits.draft_loops:
        ends = [view.exits.boundary(item.depth) - item.depth for item in rows]
        return min(ends + [view.num_loops - item.depth for item in ranges])
    if any([item.depth != depth for item in (*rows, *ranges)]):
        return 1
    return view.exits.boundary(depth) - depth


def within_budget(view: View, requests: Sequence[RequestView]) -> Sequence[RequestView]:
    """The requests themselves when one row each fits the budget, else those scheduled longest ago, and
    guesses after the tokens before them."""
    budget = view.limits.max_num_batched_tokens
    if len(requests) <= budget:
        return requests
    return sorted(requests, key=lambda request: (request.num_before, request.last_seq, request.order))[
        :budget
    ]


def oldest_chunks(view: View, max_rows: int) -> list[Proposal]:
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
            ranges.append(Proposal(request.request_id, depth, start, end))
            max_rows -= end - start
    return ranges


def prompt_selection(ranges: list[Proposal], comes_back: bool) -> Selection | None:
    """Prompt ranges as a batch: through all remaining depths, or one depth when something needs the boundary.

    `comes_back` is the policy's concrete reason to return before the chunk finishes: decode work goes next,
    or the wavefront regroups. Ranges at different depths always return, because the first to finish leaves
    the batch. (Nobody who must give up its blocks is ever in a batch: `policies.core.memory` withholds them.)
    """
    if not ranges:
        return None
    is_ragged = any([item.depth != ranges[0].depth for item in ranges])
    return Selection(tuple(ranges), 1 if comes_back or is_ragged else None)
