"""A wrong policy cannot corrupt a run, only stop it: one proposal for every rule, each refused by name, and
nothing has moved."""

import re

import pytest
from toy_backend import model_with

from policies.core.engine.scheduler import Scheduler
from policies.core.engine.validation import derive
from policies.core.errors import InputError, SelectionError, StuckError
from policies.core.seam.batch import Proposal, ScheduledRange, Selection, Stage, Work
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.core.seam.view import View
from policies.registry import POLICIES


class Scripted(Policy):
    """Proposes what it is told to, whatever the view says."""

    name = "scripted"
    is_wavefront = True

    def __init__(self) -> None:
        self.proposal: Selection | None = None

    def select(self, view: View) -> Selection | None:
        return self.proposal


def pick(*ranges: Proposal, loops: int | None = 1) -> Selection:
    return Selection(ranges, loops)


def part(request_id: int, depth: int, start: int, count: int) -> Proposal:
    """A prompt range."""
    return Proposal(request_id, depth, start, start + count)


def token(request_id: int, depth: int, position: int, count: int = 1) -> Proposal:
    return Proposal(request_id, depth, position, position + count)


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
    return [states, counts, scheduler.next_seq, scheduler.prompt_batches_since_decode]


START = pick(part(0, 0, 0, 4), part(1, 0, 0, 4))
"""Requests 0 and 1: staged 4, depths [4, 0, 0, 0]."""
RING_FULL = [pick(part(0, 0, start, 4), loops=0) for start in (0, 4, 8, 12)]
DECODING = [START, pick(part(2, 0, 0, 4), loops=None)]
"""Request 2 has run its prompt and waits for CODA at position 3."""
LOOPING = [*DECODING, pick(token(2, 0, 3), loops=0), pick(token(2, 0, 4), loops=0)]
"""Request 2 loops at position 4, depth 0."""

WRONG: dict[str, tuple[list[Selection], Selection, str]] = {
    "nothing in it": ([START], pick(), "a batch without ranges"),
    "a recurrent batch that does not loop": (
        [START],
        pick(part(0, 1, 0, 4), loops=0),
        "staging names depth 0",
    ),
    "more loops than depths": ([START], pick(part(0, 0, 4, 4), loops=5), "loop_count 5"),
    "a prompt that stops midway because a decode row beside it is through": (
        [*LOOPING, pick(token(2, 0, 4), loops=1), pick(token(2, 1, 4), loops=1)],
        pick(token(2, 2, 4), part(0, 1, 0, 4), loops=2),
        "loop_count 2, neither one depth nor all 3 remaining ones",
    ),
    "negative loops": ([START], pick(part(0, 1, 0, 4), loops=-1), "loop_count -1"),
    "a request nobody knows": ([START], pick(part(9, 0, 0, 4)), "names request 9, which is not running"),
    "a prompt range in a coda": (
        DECODING,
        pick(token(2, 0, 3), part(0, 0, 4, 4), loops=0),
        r"request 0 \(prompt: .* in a CODA batch",
    ),
    "tokens run twice": (
        [START],
        pick(part(0, 0, 0, 4)),
        r"request 0.*\[0, 4\) at depth 0.*frontier of depth 0 is 4.*depths \[4",
    ),
    "tokens skipped": (
        [START],
        pick(part(0, 0, 8, 4)),
        r"request 0.*\[8, 12\) at depth 0: it starts at 8.*depth 0 is 4",
    ),
    "a depth skipped": (
        [START],
        pick(part(0, 2, 0, 4)),
        r"request 0.*at depth 2: it ends at 4, depth 1 is done up to 0",
    ),
    "a depth ahead of the tokens": (
        [START, pick(part(0, 0, 4, 2), part(0, 1, 0, 4))],
        pick(part(0, 1, 4, 4)),
        "it ends at 8, depth 0 is done up to 6",
    ),
    "two chunks at once": (
        [START],
        pick(part(0, 0, 4, 8)),
        r"request 0.*\[4, 12\) crosses the chunk end 8",
    ),
    "tokens beyond the prompt": (
        [START],
        pick(part(1, 0, 4, 4)),
        r"request 1.*\[4, 8\) crosses the chunk end 6",
    ),
    "no tokens": ([START], pick(part(0, 1, 0, 0)), r"request 0.*\[0, 0\) at depth 1: it is empty"),
    "fewer than no tokens": ([START], pick(part(0, 1, 4, -4)), "it is empty"),
    "a negative depth": ([START], pick(part(0, -1, 0, 4)), r"request 0.*at depth -1"),
    "a depth the model lacks": ([START], pick(part(0, 4, 0, 4)), r"request 0.*at depth 4"),
    "depths the model lacks": (
        [START],
        pick(part(0, 3, 0, 4), loops=2),
        "depths 3 to 4 asked of a model with 4",
    ),
    "tokens of which half are staged": (
        [pick(part(0, 0, 0, 2), loops=0)],
        pick(part(0, 0, 0, 4)),
        "it begins staged and ends at 4, staged are 2 tokens",
    ),
    "staging twice": ([RING_FULL[0]], RING_FULL[0], "staging starts at 0, the staged frontier is 4"),
    "staging at a later depth": ([START], pick(part(0, 1, 4, 4), loops=0), "staging names depth 0"),
    "staging nothing": ([START], pick(part(0, 0, 4, 0), loops=0), "it is empty"),
    "staging a prompt twice in a batch": (
        [START],
        pick(part(0, 0, 4, 2), part(0, 0, 6, 2), loops=0),
        "request 0 stands twice in one PREFILLING_PRELUDE batch",
    ),
    "staging across a chunk": ([START], pick(part(0, 0, 4, 5), loops=0), "crosses the chunk end 8"),
    "a chunk in a slot that is taken": (
        RING_FULL,
        pick(part(0, 0, 16, 4), loops=0),
        r"request 0.*\[16, 20\).*ends at 20, the hidden ring has room up to 16",
    ),
    "a chunk of which half is staged in a slot that is taken": (
        [
            *RING_FULL,
            *(pick(part(0, depth, 0, 4)) for depth in range(3)),
            pick(part(0, 3, 0, 3)),
        ],
        pick(part(0, 0, 16, 4), loops=0),
        "the hidden ring has room up to 16",
    ),
    "all remaining depths of ranges at two of them": (
        [START],
        pick(part(0, 1, 0, 4), part(2, 0, 0, 4), loops=None),
        "loop_count 3, neither one depth nor all 4 remaining ones",
    ),
    "all remaining depths of ranges of which one has a single depth left": (
        [START, *(pick(part(0, depth, 0, 4)) for depth in (1, 2))],
        pick(part(0, 3, 0, 4), part(1, 1, 0, 4), loops=None),
        "through all remaining depths beside one at depth 3",
    ),
    "one depth twice in a batch": (
        [START],
        pick(part(0, 1, 0, 4), part(0, 1, 0, 4)),
        "request 0.*runs twice in one batch",
    ),
    "one depth in halves in a batch": (
        [START],
        pick(part(0, 1, 0, 2), part(0, 1, 2, 2)),
        r"request 0.*\[2, 4\) at depth 1: it starts at 2, the frontier of depth 1 is 0",
    ),
    "one chunk at two depths in a batch": (
        [START],
        pick(part(0, 1, 0, 4), part(0, 2, 0, 4)),
        "depth 1 is done up to 0",
    ),
    "a prompt that is done": (
        DECODING,
        pick(part(2, 0, 0, 4)),
        r"request 2.*it is request 2 \(coda: .*; frontiers: staged 4",
    ),
    "a decode row before the prompt is done": (
        LOOPING,
        pick(token(2, 0, 4), token(0, 0, 23)),
        r"request 0, .* range \[23, 24\) at depth 0: it starts at 23, the frontier of depth 0 is 4",
    ),
    "a false position": (
        DECODING,
        pick(token(2, 0, 4), loops=0),
        r"request 2 \(coda: position 3, depth 0\)",
    ),
    "a stage too early": (LOOPING[:-1], pick(token(2, 0, 4)), r"request 2 \(prelude: position 4"),
    "a false depth": (
        LOOPING,
        pick(token(2, 1, 4)),
        r"depth=1.*does not follow from request 2 \(recurrent: position 4, depth 0\)",
    ),
    "two tokens in a decode row": (
        LOOPING,
        pick(token(2, 0, 4, 2)),
        r"end=6.*does not follow from request 2",
    ),
    "a looping token that is to be sampled": (
        LOOPING,
        pick(token(2, 0, 4), loops=0),
        r"request 2 \(recurrent: .* has nothing to embed or to sample",
    ),
    "a token twice in a batch": (
        LOOPING,
        pick(token(2, 0, 4), token(2, 0, 4)),
        "request 2 stands twice in one RECURRENT batch",
    ),
    "a token sampled twice in a batch": (
        DECODING,
        pick(token(2, 0, 3), token(2, 0, 3), loops=0),
        "request 2 stands twice in one CODA batch",
    ),
    "a token past the last depth": (
        [*LOOPING, pick(token(2, 0, 4))],
        pick(token(2, 1, 4), loops=4),
        "loop_count 4 runs past the last depth, 3",
    ),
    "more rows than the budget": (
        LOOPING,
        pick(token(2, 0, 4), part(0, 1, 0, 4), part(0, 0, 4, 4), part(1, 1, 0, 4)),
        "invariant 5: 13 rows in a batch, max_num_batched_tokens is 12",
    ),
    "prompt depths between one and all": ([START], pick(part(0, 1, 0, 4), loops=2), "loop_count 2"),
    "decode depths between one and all": (LOOPING, pick(token(2, 0, 4), loops=2), "loop_count 2"),
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
    policy.proposal = pick(part(0, 1, 0, 4), part(1, 1, 0, 4), part(2, 1, 0, 4))
    with pytest.raises(
        SelectionError, match=re.escape("request 2, PREFILLING_RECURRENT range [0, 4) at depth 1")
    ):
        scheduler.form_batch(1)
    assert snapshot(scheduler) == before
    policy.proposal = pick(part(0, 1, 0, 4), part(1, 1, 0, 4))
    batch = scheduler.form_batch(2)
    assert batch is not None and (batch.seq, batch.rows) == (1, 8)


def test_a_batch_may_not_hold_more_requests_than_may_run() -> None:
    scheduler, _ = scheduler_at(START)
    selection = pick(part(0, 1, 0, 4), part(1, 1, 0, 4))
    roomy = derive(
        selection, scheduler.running, SchedulerSettings(max_num_seqs=2), 4, scheduler.exits, has_planes=True
    )
    assert (roomy.rows, roomy.num_requests) == (8, 2)
    with pytest.raises(SelectionError, match="invariant 5: 2 requests in a batch, max_num_seqs is 1"):
        derive(
            selection,
            scheduler.running,
            SchedulerSettings(max_num_seqs=1),
            4,
            scheduler.exits,
            has_planes=True,
        )


def test_stage_chunk_and_hidden_row_follow_from_where_a_request_stands() -> None:
    """Chunks of 4 in a ring of 4 slots: token 4 is the first of chunk 1, row 4."""
    scheduler, policy = scheduler_at(*LOOPING)
    policy.proposal = pick(token(2, 0, 4), part(0, 1, 0, 4), part(0, 0, 4, 3))
    batch = scheduler.form_batch(0)
    assert batch is not None
    assert batch.work == Work(
        Stage.RECURRENT,
        1,
        (
            ScheduledRange(2, Stage.RECURRENT, 0, 4, 1),
            ScheduledRange(0, Stage.PREFILLING_RECURRENT, 1, 0, 4, 0, 0, embeds=False),
            ScheduledRange(0, Stage.PREFILLING_RECURRENT, 0, 4, 3, 4, 4, embeds=True),
        ),
        8,
        2,
    )


def test_nothing_that_a_policy_sees_can_be_written() -> None:
    class Vandal(Policy):
        name = "vandal"

        def select(self, view: View) -> Selection | None:
            request, prompt = view.running[0], view.running[0].prompt
            for target in (view, request, prompt):
                for member in dir(target):
                    if not member.startswith("_") and not callable(getattr(target, member)):
                        with pytest.raises((AttributeError, TypeError)):
                            setattr(target, member, getattr(target, member))
            for sequence in (view.running, view.prompts, view.preludes, view.codas, view.looping):
                assert isinstance(sequence, tuple)
            return None

    scheduler = Scheduler(Vandal(), model_with(), SchedulerSettings(), CacheSettings(num_blocks=400))
    scheduler.enqueue(Request(0, 0, 24, 3))
    with pytest.raises(StuckError):
        scheduler.form_batch(0)


def test_halves_of_a_chunk_may_run_at_two_depths_in_one_batch() -> None:
    scheduler, policy = scheduler_at(pick(part(0, 0, 0, 2)))
    policy.proposal = pick(part(0, 1, 0, 2), part(0, 0, 2, 2))
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
        policy.proposal = pick(part(0, depth, start, count))
        scheduler.form_batch(0)
        used.append(scheduler.rings.used_slots)
    assert used == [4, 4, 4, 4, 4, 3]
    assert scheduler.rings.used_slots + scheduler.rings.free_slots == scheduler.rings.total_slots == 3 * 4
    assert scheduler.running[0].prompt.prefill_reclaimable_tokens == 4
