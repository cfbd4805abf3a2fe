"""A wrong policy cannot corrupt a run, only stop it: one proposal for every rule, each refused by name, and
nothing has moved."""

import re

import pytest
from toy_backend import model_with

from policies.core.engine.scheduler import Scheduler
from policies.core.engine.validation import validate
from policies.core.errors import InputError, SelectionError
from policies.core.seam.batch import ScheduledRange, Selection, Stage
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.core.seam.view import View
from policies.registry import POLICIES

P, PP, PR = Stage.PREFILL, Stage.PREFILLING_PRELUDE, Stage.PREFILLING_RECURRENT


class Scripted(Policy):
    """Proposes what it is told to, whatever the view says."""

    name = "scripted"
    is_wavefront = True

    def __init__(self) -> None:
        self.proposal: Selection | None = None

    def select(self, view: View) -> Selection | None:
        return self.proposal


def pick(stage: Stage, *ranges: ScheduledRange, loops: int = 1) -> Selection:
    return Selection(stage, ranges, loops)


def part(
    request_id: int,
    stage: Stage,
    depth: int,
    start: int,
    count: int,
    embeds: bool = False,
    chunk: int | None = None,
    row: int | None = -1,
) -> ScheduledRange:
    """A prompt range in chunks of 4 with its true chunk start and ring row (of 4 slots), unless told
    otherwise."""
    chunk_start = start // 4 * 4 if chunk is None else chunk
    ring_row = start // 4 % 4 * 4 + start % 4 if row == -1 else row
    return ScheduledRange(request_id, stage, depth, start, count, chunk_start, ring_row, embeds)


def token(
    request_id: int, stage: Stage, depth: int, position: int, count: int = 1, embeds: bool = False
) -> ScheduledRange:
    return ScheduledRange(request_id, stage, depth, position, count, 0, None, embeds)


def scheduler_at(*script: Selection) -> tuple[Scheduler, Scripted]:
    """Requests 0, 1 and 2 with prompts of 24, 6 and 4 tokens, chunk 4, T = 4, 12 rows a batch, after `script`
    has run."""
    policy = Scripted()
    limits = SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=12, prefill_chunk_size=4)
    scheduler = Scheduler(policy, model_with(), limits, CacheSettings(num_blocks=400))
    for request in (Request(0, 0, 24, 3), Request(1, 0, 6, 3), Request(2, 0, 4, 3)):
        scheduler.enqueue(request)
    for selection in script:
        policy.proposal = selection
        assert scheduler.form_batch(0) is not None
    return scheduler, policy


def snapshot(scheduler: Scheduler) -> list[object]:
    """All state that a selection could move."""
    states = [
        (
            s.request_id,
            s.phase,
            s.depth,
            s.position,
            s.num_scheduled_outputs,
            s.last_seq,
            s.first_scheduled_ns,
            repr(s.prompt),
        )
        for s in scheduler.running.values()
    ]
    counts = (
        len(scheduler.in_flight),
        scheduler.blocks.used_blocks,
        scheduler.rings.used_slots,
        scheduler.peak_hidden_rows,
    )
    return [states, counts, scheduler._next_seq, scheduler._view.prompt_batches_since_decode]


START = pick(PR, part(0, PR, 0, 0, 4, True), part(1, PR, 0, 0, 4, True))
"""Requests 0 and 1: staged 4, depths [4, 0, 0, 0]."""
RING_FULL = [pick(PP, part(0, PP, 0, start, 4, True), loops=0) for start in (0, 4, 8, 12)]
DECODING = [START, pick(P, part(2, P, 0, 0, 4, True), loops=4)]
"""Request 2 has run its prompt and waits for CODA at position 3."""
LOOPING = [
    *DECODING,
    pick(Stage.CODA, token(2, Stage.CODA, 0, 3), loops=0),
    pick(Stage.PRELUDE, token(2, Stage.PRELUDE, 0, 4), loops=0),
]
"""Request 2 loops at position 4, depth 0."""
R = Stage.RECURRENT

WRONG: dict[str, tuple[list[Selection], Selection, str]] = {
    "nothing in it": ([START], pick(PR), "PREFILLING_RECURRENT batch without ranges"),
    "a prelude that loops": (
        [START],
        pick(PP, part(0, PP, 0, 4, 4, True)),
        "loop_count 1 in a PREFILLING_PRELUDE batch",
    ),
    "a recurrent batch that does not loop": (
        [START],
        pick(PR, part(0, PR, 1, 0, 4), loops=0),
        "loop_count 0",
    ),
    "more loops than depths": ([START], pick(P, part(0, P, 0, 4, 4, True), loops=5), "loop_count 5"),
    "negative loops": ([START], pick(PR, part(0, PR, 1, 0, 4), loops=-1), "loop_count -1"),
    "a request nobody knows": ([START], pick(PR, part(9, PR, 0, 0, 4, True)), "request_id=9.* not running"),
    "a foreign stage": (
        [START],
        pick(PR, part(0, P, 1, 0, 4)),
        "PREFILL range of request 0 in a PREFILLING_RECURRENT batch",
    ),
    "a prompt range in a coda": (
        DECODING,
        pick(Stage.CODA, part(0, PR, 1, 0, 4), loops=0),
        "PREFILLING_RECURRENT range of request 0 in a CODA batch",
    ),
    "tokens run twice": (
        [START],
        pick(PR, part(0, PR, 0, 0, 4)),
        r"request 0.*\[0, 4\) at depth 0.*frontier of depth 0 is 4.*depths \[4",
    ),
    "tokens skipped": (
        [START],
        pick(PR, part(0, PR, 0, 8, 4, True)),
        r"request 0.*\[8, 12\) at depth 0: it starts at 8.*depth 0 is 4",
    ),
    "a depth skipped": (
        [START],
        pick(PR, part(0, PR, 2, 0, 4)),
        r"request 0.*at depth 2: it ends at 4, depth 1 is done up to 0",
    ),
    "a depth ahead of the tokens": (
        [START, pick(PR, part(0, PR, 0, 4, 2, True), part(0, PR, 1, 0, 4))],
        pick(PR, part(0, PR, 1, 4, 4)),
        "it ends at 8, depth 0 is done up to 6",
    ),
    "two chunks at once": (
        [START],
        pick(PR, part(0, PR, 0, 4, 8, True)),
        r"request 0.*\[4, 12\) crosses the chunk end 8",
    ),
    "tokens beyond the prompt": (
        [START],
        pick(PR, part(1, PR, 0, 4, 4, True)),
        r"request 1.*\[4, 8\) crosses the chunk end 6",
    ),
    "no tokens": ([START], pick(PR, part(0, PR, 1, 0, 0)), r"request 0.*\[0, 0\) at depth 1: it is empty"),
    "fewer than no tokens": ([START], pick(PR, part(0, PR, 1, 4, -4)), "it is empty"),
    "a negative depth": ([START], pick(PR, part(0, PR, -1, 0, 4)), r"request 0.*at depth -1"),
    "a depth the model lacks": ([START], pick(PR, part(0, PR, 4, 0, 4)), r"request 0.*at depth 4"),
    "depths the model lacks": (
        [START],
        pick(PR, part(0, PR, 3, 0, 4), loops=2),
        "depths 3 to 4 asked of a model with 4",
    ),
    "an embedding at a later depth": (
        [START],
        pick(PR, part(0, PR, 1, 0, 4, True)),
        "it embeds at depth 1; only depth 0 may",
    ),
    "unstaged tokens that do not embed": (
        [START],
        pick(PR, part(0, PR, 0, 4, 4)),
        "it ends at 8, staged are 4 tokens",
    ),
    "staged tokens that embed again": (
        [RING_FULL[0]],
        pick(PR, part(0, PR, 0, 0, 4, True)),
        r"staging starts at 0, the staged frontier is 4.*staged 4, depths \[0, 0, 0, 0\] of 24",
    ),
    "staging twice": ([RING_FULL[0]], RING_FULL[0], "staging starts at 0, the staged frontier is 4"),
    "staging at a later depth": (
        [START],
        pick(PP, part(0, PP, 1, 4, 4, True), loops=0),
        "staging names depth 0 and embeds",
    ),
    "staging that does not embed": (
        [START],
        pick(PP, part(0, PP, 0, 4, 4), loops=0),
        "staging names depth 0 and embeds",
    ),
    "staging across a chunk": (
        [START],
        pick(PP, part(0, PP, 0, 4, 5, True), loops=0),
        "crosses the chunk end 8",
    ),
    "a chunk in a slot that is taken": (
        RING_FULL,
        pick(PP, part(0, PP, 0, 16, 4, True), loops=0),
        r"request 0.*\[16, 20\).*ends at 20, the hidden ring has room up to 16",
    ),
    "a chunk of which half is staged in a slot that is taken": (
        [
            *RING_FULL,
            *(pick(PR, part(0, PR, depth, 0, 4)) for depth in range(3)),
            pick(PR, part(0, PR, 3, 0, 3)),
        ],
        pick(PP, part(0, PP, 0, 16, 4, True), loops=0),
        "the hidden ring has room up to 16",
    ),
    "a PREFILL that stops early": (
        [START],
        pick(P, part(0, P, 1, 0, 4), loops=2),
        "PREFILL runs all 3 remaining depths, not 2",
    ),
    "one depth twice in a batch": (
        [START],
        pick(PR, part(0, PR, 1, 0, 4), part(0, PR, 1, 0, 4)),
        "request 0.*runs twice in one batch",
    ),
    "one depth in halves in a batch": (
        [START],
        pick(PR, part(0, PR, 1, 0, 2), part(0, PR, 1, 2, 2)),
        r"request 0.*\[2, 4\) at depth 1: it starts at 2, the frontier of depth 1 is 0",
    ),
    "one chunk at two depths in a batch": (
        [START],
        pick(PR, part(0, PR, 1, 0, 4), part(0, PR, 2, 0, 4)),
        "depth 1 is done up to 0",
    ),
    "a false chunk start": ([START], pick(PR, part(0, PR, 1, 0, 4, chunk=4)), "its chunk starts at 0, not 4"),
    "a false hidden row": (
        [START],
        pick(PR, part(0, PR, 0, 4, 4, True, row=0)),
        "its hidden row is 4, not 0",
    ),
    "no hidden row in a ring": (
        [START],
        pick(PR, part(0, PR, 0, 4, 4, True, row=None)),
        "its hidden row is 4, not None",
    ),
    "a prompt that is done": (
        DECODING,
        pick(PR, part(2, PR, 0, 0, 4, True)),
        "request 2.*its prompt is done; frontiers: staged 4",
    ),
    "a decode row before the prompt is done": (
        [START],
        pick(Stage.CODA, token(0, Stage.CODA, 0, 23), loops=0),
        r"request_id=0.*does not follow from request 0 \(prompt: staged 4, depths \[4, 0, 0, 0\] of 24\)",
    ),
    "a false position": (
        DECODING,
        pick(Stage.CODA, token(2, Stage.CODA, 0, 4), loops=0),
        r"request 2 \(coda: position 3, depth 0\)",
    ),
    "a stage too early": (
        DECODING,
        pick(Stage.PRELUDE, token(2, Stage.PRELUDE, 0, 3), loops=0),
        r"request 2 \(coda: position 3",
    ),
    "a false depth": (
        LOOPING,
        pick(R, token(2, R, 1, 4)),
        r"depth=1.*does not follow from request 2 \(recurrent: position 4, depth 0\)",
    ),
    "two tokens in a decode row": (
        LOOPING,
        pick(R, token(2, R, 0, 4, 2)),
        r"token_count=2.*does not follow from request 2",
    ),
    "a decode row that embeds": (
        LOOPING,
        pick(R, token(2, R, 0, 4, embeds=True)),
        "embeds=True.*does not follow from request 2",
    ),
    "a token twice in a batch": (
        LOOPING,
        pick(R, token(2, R, 0, 4), token(2, R, 0, 4)),
        "request 2 decodes twice in one batch",
    ),
    "a token past the last depth": (
        [*LOOPING, pick(R, token(2, R, 0, 4))],
        pick(R, token(2, R, 1, 4), loops=4),
        "loop_count 4 runs past the last depth, 3",
    ),
    "a recurrent batch of prompts alone": (
        LOOPING,
        pick(R, part(0, PR, 1, 0, 4)),
        "RECURRENT batch without decode rows",
    ),
    "more rows than the budget": (
        LOOPING,
        pick(R, token(2, R, 0, 4), part(0, PR, 1, 0, 4), part(0, PR, 0, 4, 4, True), part(1, PR, 1, 0, 4)),
        "invariant 5: 13 rows in a batch, max_num_batched_tokens is 12",
    ),
    "prompt depths between one and all": ([START], pick(PR, part(0, PR, 1, 0, 4), loops=2), "loop_count 2"),
    "decode depths between one and all": (LOOPING, pick(R, token(2, R, 0, 4), loops=2), "loop_count 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_proposal_is_refused_with_its_reason_and_moves_nothing(name: str) -> None:
    script, wrong, reason = WRONG[name]
    scheduler, policy = scheduler_at(*script)
    before = snapshot(scheduler)
    policy.proposal = wrong
    with pytest.raises(SelectionError, match=f"policy scripted: .*{reason}"):
        scheduler.form_batch(1)
    assert snapshot(scheduler) == before


def test_a_proposal_wrong_in_its_last_range_moves_none_of_the_others() -> None:
    scheduler, policy = scheduler_at(START)
    before = snapshot(scheduler)
    policy.proposal = pick(PR, part(0, PR, 1, 0, 4), part(1, PR, 1, 0, 4), part(2, PR, 1, 0, 4))
    with pytest.raises(
        SelectionError, match=re.escape("request 2, PREFILLING_RECURRENT range [0, 4) at depth 1")
    ):
        scheduler.form_batch(1)
    assert snapshot(scheduler) == before
    policy.proposal = pick(PR, part(0, PR, 1, 0, 4), part(1, PR, 1, 0, 4))
    batch = scheduler.form_batch(2)
    assert batch is not None and (batch.seq, batch.rows) == (1, 8)


def test_a_batch_may_not_hold_more_requests_than_may_run() -> None:
    scheduler, _ = scheduler_at(START)
    selection = pick(PR, part(0, PR, 1, 0, 4), part(1, PR, 1, 0, 4))
    assert validate(selection, scheduler.running, SchedulerSettings(max_num_seqs=2), 4, scheduler.exits) == (
        8,
        2,
    )
    with pytest.raises(SelectionError, match="invariant 5: 2 requests in a batch, max_num_seqs is 1"):
        validate(selection, scheduler.running, SchedulerSettings(max_num_seqs=1), 4, scheduler.exits)


def test_halves_of_a_chunk_may_run_at_two_depths_in_one_batch() -> None:
    scheduler, policy = scheduler_at(pick(PR, part(0, PR, 0, 0, 2, True)))
    policy.proposal = pick(PR, part(0, PR, 1, 0, 2), part(0, PR, 0, 2, 2, True))
    assert scheduler.form_batch(0) is not None
    assert scheduler.running[0].prompt.prefill_depth_ranges == [4, 2, 0, 0]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "atomic"])
def test_policies_that_split_prompts_refuse_shared_kv_and_models_that_cannot_stop_between_depths(
    name: str,
) -> None:
    policy = POLICIES[name]()
    with pytest.raises(
        InputError, match=f"policy {name} cannot run with cache.layout shared: .*; use atomic or last_exited"
    ):
        Scheduler(policy, model_with(), SchedulerSettings(), CacheSettings(num_blocks=40, layout="shared"))


def test_a_ring_slot_is_free_again_once_its_whole_chunk_has_run_the_last_depth() -> None:
    scheduler, policy = scheduler_at(*RING_FULL)
    used = [scheduler.rings.used_slots]
    for depth, start, count in ((0, 0, 4), (1, 0, 4), (2, 0, 4), (3, 0, 3), (3, 3, 1)):
        policy.proposal = pick(PR, part(0, PR, depth, start, count))
        scheduler.form_batch(0)
        used.append(scheduler.rings.used_slots)
    assert used == [4, 4, 4, 4, 4, 3]
    assert scheduler.rings.used_slots + scheduler.rings.free_slots == scheduler.rings.total_slots == 3 * 4
    assert scheduler.running[0].prompt.prefill_reclaimable_tokens == 4
