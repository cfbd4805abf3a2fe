"""Whether a selection follows from the frontiers as they stand. Pure checks: nothing moves here.

The engine runs this on every proposal of every policy, so a policy cannot corrupt a run, only stop it.
"""

from collections.abc import Mapping

from policies.core.errors import SelectionError
from policies.core.seam.batch import ScheduledRange, Selection, Stage
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import Phase, RequestState
from policies.core.seam.settings import SchedulerSettings

ALLOWED_STAGES = {stage: (stage,) for stage in Stage} | {
    Stage.RECURRENT: (Stage.RECURRENT, Stage.PREFILLING_RECURRENT)
}
"""Which range stages a batch of each stage may hold."""

DEPTH_FREE_STAGES = (Stage.PRELUDE, Stage.CODA, Stage.PREFILLING_PRELUDE)
PHASE_OF_STAGE = {Stage.PRELUDE: Phase.PRELUDE, Stage.RECURRENT: Phase.RECURRENT, Stage.CODA: Phase.CODA}


def validate(
    selection: Selection,
    running: Mapping[int, RequestState],
    settings: SchedulerSettings,
    num_loops: int,
    exits: ExitRule,
) -> tuple[int, int]:
    """Return (rows, distinct requests) of a selection that may run, or raise `SelectionError` naming request,
    range, frontier."""
    stage, ranges, loops = selection
    if not ranges:
        raise SelectionError(f"a {stage} batch without ranges")
    if (loops == 0) != (stage in DEPTH_FREE_STAGES) or not 0 <= loops <= num_loops:
        raise SelectionError(f"loop_count {loops} in a {stage} batch")
    allowed, phase_of_stage = ALLOWED_STAGES[stage], PHASE_OF_STAGE.get(stage)
    depths_run: dict[int, int] = {}
    rows = decode_rows = 0
    checked_depth = None
    for item in ranges:
        request_id, item_stage, depth, start, count, _, _, embeds = item
        state = running.get(request_id)
        if state is None:
            raise SelectionError(f"{item} names a request that is not running")
        if item_stage is stage:
            phase = phase_of_stage
        elif item_stage in allowed:
            phase = PHASE_OF_STAGE.get(item_stage)
        else:
            raise SelectionError(f"{item_stage} range of request {request_id} in a {stage} batch")
        rows += count
        if phase is None:
            earlier = depths_run.get(request_id, 0)
            depths_run[request_id] = earlier | _check_prompt_range(state, item, loops, earlier, num_loops)
            continue
        if (
            state.phase is not phase
            or start != state.position
            or depth != state.depth
            or count != 1
            or embeds
        ):
            raise SelectionError(f"{item} does not follow from {state}")
        if loops and depth != checked_depth:
            _check_decode_depths(item, loops, exits)
            checked_depth = depth
        if request_id in depths_run:
            raise SelectionError(f"request {request_id} decodes twice in one batch")
        depths_run[request_id] = 1
        decode_rows += 1
    if rows > settings.max_num_batched_tokens:
        raise SelectionError(
            f"invariant 5: {rows} rows in a batch, max_num_batched_tokens is "
            f"{settings.max_num_batched_tokens}"
        )
    if len(depths_run) > settings.max_num_seqs:
        raise SelectionError(
            f"invariant 5: {len(depths_run)} requests in a batch, max_num_seqs is {settings.max_num_seqs}"
        )
    if stage is Stage.RECURRENT and decode_rows == 0:
        raise SelectionError("a RECURRENT batch without decode rows")
    return rows, len(depths_run)


def _check_decode_depths(item: ScheduledRange, loops: int, exits: ExitRule) -> None:
    """Raise `SelectionError` unless a decode row may run `loops` depths from where it stands."""
    boundary = exits.boundary(item.depth)
    if item.depth + loops > boundary:
        what = (
            "a depth at which it may leave"
            if boundary < exits.max_loops
            else f"the last depth, {exits.max_loops - 1}"
        )
        raise SelectionError(f"{item} with loop_count {loops} runs past {what}")
    if 1 < loops < boundary - item.depth:
        raise SelectionError(
            f"{item} with loop_count {loops}, neither one depth nor all {boundary - item.depth} up to a "
            "boundary"
        )


def _check_prompt_range(
    state: RequestState, item: ScheduledRange, loops: int, depths_run: int, num_loops: int
) -> int:
    """Return the depths this range runs as a bit mask; `depths_run` is the mask of the request's earlier
    ranges in the batch."""
    prompt = state.prompt
    try:
        if state.phase is not Phase.PROMPT:
            raise SelectionError("its prompt is done")
        if item.token_count < 1:
            raise SelectionError("it is empty")
        if item.depth < 0:
            raise SelectionError("depths start at 0")
        if item.stage is Stage.PREFILLING_PRELUDE:
            if item.depth != 0 or not item.embeds:
                raise SelectionError("staging names depth 0 and embeds")
            prompt.check_stage(item.token_start, item.token_count)
            mask = 1
        else:
            prompt.check_advance(item.depth, item.token_start, item.token_count, loops, item.embeds)
            mask = ((1 << loops) - 1) << item.depth
            if item.depth + loops != num_loops:
                if item.stage is Stage.PREFILL:
                    raise SelectionError(
                        f"PREFILL runs all {num_loops - item.depth} remaining depths, not {loops}"
                    )
                if loops > 1:
                    raise SelectionError(
                        f"loop_count {loops} is neither one depth nor all {num_loops - item.depth} remaining "
                        "ones"
                    )
        if depths_run & mask:
            raise SelectionError("one of its depths runs twice in one batch")
        if item.chunk_start != prompt.chunk_start(item.token_start):
            raise SelectionError(
                f"its chunk starts at {prompt.chunk_start(item.token_start)}, not {item.chunk_start}"
            )
        offset = prompt.hidden_row_offset(item.token_start)
        if item.prefill_hidden_row_offset != offset:
            raise SelectionError(f"its hidden row is {offset}, not {item.prefill_hidden_row_offset}")
    except SelectionError as error:
        raise SelectionError(
            f"request {item.request_id}, {item.stage} range [{item.token_start}, {item.token_end}) at depth "
            f"{item.depth}: {error}; frontiers: {prompt}"
        ) from None
    return mask
