"""From a policy's proposal to the work it asks for: what follows from the frontiers is derived, the rest is
checked.

Pure: nothing moves here. The engine runs this on every proposal of every policy, so a policy cannot corrupt a
run, only stop it.
"""

from collections.abc import Mapping

from policies.core.errors import SelectionError
from policies.core.progress.state import RequestState
from policies.core.seam.batch import Proposal, ScheduledRange, Selection, Stage, Work, new_range
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import GUESSING, PROMPT, RECURRENT, Phase
from policies.core.seam.settings import SchedulerSettings

STAGE_OF_PHASE = {
    Phase.PROMPT: Stage.PREFILLING_PRELUDE, Phase.PRELUDE: Stage.PRELUDE, Phase.CODA: Stage.CODA,
}  # fmt: skip
"""What a request does in a batch that runs no depth."""
DECODE, PREFILL, PREFILLING_RECURRENT = Stage.RECURRENT, Stage.PREFILL, Stage.PREFILLING_RECURRENT


def derive(
    selection: Selection,
    running: Mapping[int, RequestState],
    settings: SchedulerSettings,
    num_loops: int,
    exits: ExitRule,
    has_planes: bool,
) -> Work:
    """The work of a selection that may run, or `SelectionError` naming request, range and frontier."""
    proposals, loop_count = selection
    if not proposals:
        raise SelectionError("a batch without ranges")
    try:
        states = [running[item.request_id] for item in proposals]
    except KeyError as error:
        raise SelectionError(f"it names request {error.args[0]}, which is not running") from None
    if loop_count == 0:
        work = _without_depths(proposals, states, has_planes)
    else:
        work = _through_depths(proposals, states, loop_count, num_loops, exits, has_planes)
    if work.rows > settings.max_num_batched_tokens:
        raise SelectionError(
            f"invariant 5: {work.rows} rows in a batch, max_num_batched_tokens is "
            f"{settings.max_num_batched_tokens}"
        )
    if work.num_requests > settings.max_num_seqs:
        raise SelectionError(
            f"invariant 5: {work.num_requests} requests in a batch, max_num_seqs is {settings.max_num_seqs}"
        )
    return work


def _without_depths(proposals: tuple[Proposal, ...], states: list[RequestState], has_planes: bool) -> Work:
    """Tokens that are embedded or sampled, all of one kind."""
    if states[0].phase is GUESSING:
        heads = _heads(proposals, states)
        num_requests = len({item.request_id for item in heads})
        return Work(Stage.CODA, 0, tuple(heads), len(heads), num_requests, has_planes)
    stage = STAGE_OF_PHASE.get(states[0].phase)
    if stage is None:
        raise SelectionError(f"{states[0]} has nothing to embed or to sample")
    if stage is not Stage.PREFILLING_PRELUDE:
        rows = len(proposals)
        tokens = _decode_rows(proposals, states, states[0].phase, stage)
        return Work(stage, 0, tuple(tokens), rows, rows, has_planes)
    seen: set[int] = set()
    ranges = []
    for item, state in zip(proposals, states, strict=True):
        if state.phase is not PROMPT:
            raise SelectionError(f"{state} in a {stage} batch")
        if item.request_id in seen:
            raise SelectionError(f"request {item.request_id} stands twice in one {stage} batch")
        seen.add(item.request_id)
        ranges.append(_staging(item, state))
    rows = sum([item.token_count for item in ranges])
    return Work(stage, 0, tuple(ranges), rows, len(seen), has_planes)


def _heads(proposals: tuple[Proposal, ...], states: list[RequestState]) -> list[ScheduledRange]:
    """Rows of requests whose tokens are guessed, at the LM head: their next tokens in order of position, and
    guesses behind them."""
    num_leaving: dict[int, int] = {}
    guessed: set[int] = set()
    ranges = []
    for item, state in zip(proposals, states, strict=True):
        request_id, leaving = item.request_id, num_leaving.get(item.request_id, 0)
        tokens = state.tokens
        head = None if tokens is None else tokens.head(item.start, leaving)
        if tokens is None or head is None or request_id in guessed or item.end != item.start + 1:
            raise SelectionError(f"{item} has nothing to sample or to guess from: {state}")
        if item.depth != tokens.depth_at(item.start):
            raise SelectionError(f"{item} does not follow from {state}")
        stage = Stage.DRAFT if head.is_guess else Stage.VERIFY if head.rank else Stage.CODA
        if head.is_guess:
            guessed.add(request_id)
        else:
            num_leaving[request_id] = leaving + 1
        ranges.append(new_range((request_id, stage, head.rank, item.start, 1, 0, None, False)))
    return ranges


def _token_row(item: Proposal, state: RequestState) -> ScheduledRange:
    """A row of a request whose tokens are guessed, which runs on; its prelude is folded into depth 0."""
    depth = None if state.tokens is None else state.tokens.depth_at(item.start)
    if depth is None or depth != item.depth or item.end != item.start + 1:
        raise SelectionError(f"{item} does not follow from {state}")
    return new_range((item.request_id, DECODE, depth, item.start, 1, 0, None, depth == 0))


def _check_token_rows(
    rows: list[ScheduledRange],
    running: Mapping[int, RequestState],
    loops: int,
    exits: ExitRule,
    has_ending_prompt: bool,
) -> None:
    """Raise `SelectionError` unless rows of requests whose tokens are guessed stop where they, or a prompt
    range beside them, must, and none runs a depth that the one before it has not run."""
    has_ending = has_ending_prompt or any([item.depth + loops == exits.boundary(item.depth) for item in rows])
    if loops > 1 and not has_ending:
        raise SelectionError(f"loop_count {loops}, neither one depth nor up to where a row must stop")
    depths = {(item.request_id, item.token_start): item.depth for item in rows}
    if len(depths) < len(rows):
        raise SelectionError(f"a row stands twice in one {DECODE} batch")
    for item in rows:
        if item.depth + loops > exits.boundary(item.depth):
            raise SelectionError(f"{item} with loop_count {loops} runs past where it is at the LM head")
        before = (item.request_id, item.token_start - 1)
        tokens = running[item.request_id].tokens
        assert tokens is not None
        done = tokens.depth_at(item.token_start - 1)
        if done is not None and before not in depths and item.depth + loops > done:
            raise SelectionError(f"{item} with loop_count {loops}, the token before it has run {done} depths")


def _decode_rows(
    proposals: tuple[Proposal, ...], states: list[RequestState], phase: Phase, stage: Stage
) -> list[ScheduledRange]:
    """Ranges of decode rows that are all in `phase`, each where its request stands, and each once.

    They are compared as a whole and looked at one by one only where something is wrong: most rows of a run
    come this way.
    """
    stand = tuple([(state.request_id, state.depth, at := state.position, at + 1) for state in states])
    if proposals != stand or [state.phase for state in states].count(phase) < len(states):
        for item, state in zip(proposals, states, strict=True):
            if state.phase is not phase:
                raise SelectionError(f"{state} in a {stage} batch")
            if item.start != state.position or item.depth != state.depth or item.end != item.start + 1:
                raise SelectionError(f"{item} does not follow from {state}")
    if len({request_id for request_id, _, _, _ in stand}) < len(stand):
        ids = [item.request_id for item in proposals]
        twice = next(request_id for request_id in ids if ids.count(request_id) > 1)
        raise SelectionError(f"request {twice} stands twice in one {stage} batch")
    return [
        new_range((request_id, stage, depth, start, 1, 0, None, False))
        for request_id, depth, start, _ in stand
    ]


def _through_depths(
    proposals: tuple[Proposal, ...],
    states: list[RequestState],
    asked_loops: int | None,
    num_loops: int,
    exits: ExitRule,
    has_planes: bool,
) -> Work:
    """Ranges that run `asked_loops` depths, or all that remain to them (None)."""
    loops = num_loops - proposals[0].depth if asked_loops is None else asked_loops
    if not 1 <= loops <= num_loops:
        raise SelectionError(f"loop_count {loops} of a model with {num_loops} loops")
    num_leading = 0
    for state in states:
        if state.phase is not RECURRENT:
            break
        num_leading += 1
    has_decode = num_leading > 0 or any([state.phase in (RECURRENT, GUESSING) for state in states])
    prompt_stage = PREFILL if asked_loops is None and not has_decode else PREFILLING_RECURRENT
    ranges = _decode_rows(proposals[:num_leading], states[:num_leading], RECURRENT, DECODE)
    for item in {item.depth: item for item in proposals[:num_leading]}.values():
        _check_decode_depths(item, loops, exits)
    depths_run = {item.request_id: 1 for item in ranges}
    rows = num_leading
    token_rows: list[ScheduledRange] = []
    for item, state in zip(proposals[num_leading:], states[num_leading:], strict=True):
        request_id = item.request_id
        if state.phase is RECURRENT:  # behind a prompt range
            ranges += _decode_rows((item,), [state], RECURRENT, DECODE)
            _check_decode_depths(item, loops, exits)
            if request_id in depths_run:
                raise SelectionError(f"request {request_id} stands twice in one {DECODE} batch")
            depths_run[request_id] = 1
            rows += 1
        elif state.phase is GUESSING:
            token_rows.append(_token_row(item, state))
            ranges.append(token_rows[-1])
            depths_run[request_id] = 1
            rows += 1
        else:
            mask = _check_prompt_range(item, state, loops, depths_run.get(request_id, 0))
            # Beside decode rows it may also come back where one that stood with it would have to.
            boundary = exits.boundary(item.depth) if has_decode else num_loops
            if (
                1 < loops != num_loops - item.depth
                and item.depth + loops != boundary
                and not (has_decode and exits.draft_loops)
            ):
                raise SelectionError(
                    f"{item} with loop_count {loops}, neither one depth nor all {num_loops - item.depth} "
                    "remaining ones"
                )
            if asked_loops is None and item.depth + loops != num_loops:
                raise SelectionError(
                    f"{item} through all remaining depths beside one at depth {proposals[0].depth}: the "
                    "first to finish must leave the batch"
                )
            depths_run[request_id] = depths_run.get(request_id, 0) | mask
            found = _prompt_range(item, state, prompt_stage)
            rows += found.token_count
            ranges.append(found)
    if token_rows:
        at_end = any([item.stage is prompt_stage and item.depth + loops == num_loops for item in ranges])
        by_id = {state.request_id: state for state in states}
        _check_token_rows(token_rows, by_id, loops, exits, at_end)
    stage = DECODE if has_decode else prompt_stage
    return Work(stage, loops, tuple(ranges), rows, len(depths_run), has_planes)


def _prompt_range(item: Proposal, state: RequestState, stage: Stage) -> ScheduledRange:
    prompt, start = state.prompt, item.start
    return ScheduledRange(
        item.request_id,
        stage,
        item.depth,
        start,
        item.end - start,
        prompt.chunk_start(start),
        prompt.hidden_row_offset(start),
        prompt.embeds(item.depth, start),
    )


def _staging(item: Proposal, state: RequestState) -> ScheduledRange:
    try:
        if item.end <= item.start:
            raise SelectionError("it is empty")
        if item.depth != 0:
            raise SelectionError("staging names depth 0")
        state.prompt.check_stage(item.start, item.end - item.start)
    except SelectionError as error:
        raise _named(error, item, state, Stage.PREFILLING_PRELUDE) from None
    return _prompt_range(item, state, Stage.PREFILLING_PRELUDE)


def _check_decode_depths(item: Proposal, loops: int, exits: ExitRule) -> None:
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


def _check_prompt_range(item: Proposal, state: RequestState, loops: int, depths_run: int) -> int:
    """Return the depths this range runs as a bit mask; `depths_run` is the mask of the request's earlier
    ranges in the batch."""
    depth, start, end = item.depth, item.start, item.end
    try:
        if state.phase is not PROMPT:
            raise SelectionError(f"it is {state}")
        if end <= start:
            raise SelectionError("it is empty")
        if depth < 0:
            raise SelectionError("depths start at 0")
        state.prompt.check_advance(depth, start, end - start, loops)
        mask = ((1 << loops) - 1) << depth
        if depths_run & mask:
            raise SelectionError("one of its depths runs twice in one batch")
    except SelectionError as error:
        raise _named(error, item, state, PREFILLING_RECURRENT) from None
    return mask


def _named(error: SelectionError, item: Proposal, state: RequestState, stage: Stage) -> SelectionError:
    return SelectionError(
        f"request {item.request_id}, {stage} range [{item.start}, {item.end}) at depth {item.depth}: "
        f"{error}; frontiers: {state.prompt}"
    )
