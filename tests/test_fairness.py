"""Nobody waits without bound: overtaking at admission, decode rows beside prompts, prompts beside decode
rows, short and long."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from toy_backend import Run, World, run
from worlds import VARIANTS

from policies.core.seam.batch import PROMPT_STAGES, ExecutionBatch, Stage
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request, Status
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.sjf import ShortestFirst
from policies.slo import Slo
from policies.wcpb import Wavefront

LOOPS = 4
every_policy = pytest.mark.parametrize("policy", VARIANTS.values(), ids=VARIANTS)


def batches_of(result: Run, request_id: int, stages: Sequence[Stage]) -> list[int]:
    """Sequence numbers of the batches with a range of the request in one of `stages`."""
    return [
        batch.seq
        for batch in result.batches
        if any(item.request_id == request_id and item.stage in stages for item in batch.ranges)
    ]


def longest_gap(seqs: Sequence[int]) -> int:
    return max(after - before for before, after in pairwise(seqs))


def seqs_until_prompt_done(result: Run, request_id: int) -> list[int]:
    return batches_of(result, request_id, tuple(PROMPT_STAGES))


@every_policy
@pytest.mark.parametrize("max_bypasses", [0, 2, 5])
def test_a_request_that_waits_for_blocks_is_overtaken_no_more_often_than_allowed(
    policy: Policy, max_bypasses: int
) -> None:
    """One holds half of the pool for long, the next needs more than the other half, and small ones keep
    coming."""
    small = [Request(10 + at, 2_000 + at, 16, 4) for at in range(30)]
    limits = SchedulerSettings(4, 64, 16, max_admission_bypasses=max_bypasses)
    result = run(policy, [Request(0, 0, 160, 60), Request(1, 1, 240, 2), *small], limits, num_blocks=4 * 24)
    admitted = [item.request_id for batch in result.batches for item in batch.transfers.allocations]
    assert admitted.index(1) == 1 + max_bypasses


@every_policy
@pytest.mark.parametrize("turns", [1, 3])
def test_decode_rows_are_never_starved_by_prompts(policy: Policy, turns: int) -> None:
    """A token is decoded while long prompts never end. Between two of its depths so many prompt batches pass
    as allowed, the LM head's, its own prelude, and, where prompts are staged in batches of their own, one of
    those for each slot of a ring."""
    prompts = [Request(at, 1, 900, 1) for at in range(1, 12)]
    limits = SchedulerSettings(4, 64, 16, max_prefill_batches_before_decode=turns)
    result = run(policy, [Request(0, 0, 5, 12), *prompts], limits)
    assert result.records[0].finished_ns < min(result.records[at].finished_ns for at in range(1, 12))
    loops = batches_of(result, 0, (Stage.RECURRENT,))
    is_staged = isinstance(policy, Wavefront) and not policy.fuse_prelude
    assert longest_gap(loops) <= turns + 3 + is_staged * LOOPS


@every_policy
def test_the_first_token_after_a_prompt_is_not_held_back_by_other_prompts(policy: Policy) -> None:
    """The LM head waits for company, there is none while a long prompt runs, and it goes on alone after as
    many batches as loops."""
    limits = SchedulerSettings(4, 64, 16, min_coda_batch_size=3)
    result = run(policy, [Request(0, 0, 16, 1), Request(1, 0, 4000, 1)], limits)
    done = seqs_until_prompt_done(result, 0)[-1]
    assert batches_of(result, 0, (Stage.CODA,))[0] - done <= LOOPS + 1


@every_policy
@pytest.mark.parametrize("budget", [4, 6, 7])
def test_prompts_are_never_starved_by_decode_rows(policy: Policy, budget: int) -> None:
    """Six tokens are decoded for long, as many as a batch holds or nearly; a prompt that comes later is done
    long before them."""
    decoding = [Request(at, 0, 2, 400) for at in range(6)]
    limits = SchedulerSettings(7, budget, min(4, budget))
    result = run(policy, [*decoding, Request(6, 60_000, 40, 1)], limits)
    records = result.records
    prompt = seqs_until_prompt_done(result, 6)
    assert longest_gap(prompt) <= 6 * LOOPS
    assert len(prompt) >= 40 / min(4, budget)
    assert records[6].finished_ns < min(records[at].finished_ns for at in range(6))


@every_policy
def test_short_requests_beside_a_long_prompt_do_not_wait_for_its_end(policy: Policy) -> None:
    """Under `slo` nobody waits longer than was promised: deadlines decide, and the long prompt's is first."""
    short = [Request(at, 10_000 * at, 20, 3) for at in range(1, 9)]
    result = run(policy, [Request(0, 0, 6000, 1), *short], SchedulerSettings(4, 64, 16))
    records = result.records
    long_end = records[0].finished_ns
    assert long_end is not None
    for request in short:
        finished_ns = records[request.request_id].finished_ns
        assert finished_ns is not None
        if isinstance(policy, Slo):
            assert policy.ttft_ms is not None and finished_ns - request.arrival_ns < policy.ttft_ms * 1e6
            continue
        assert finished_ns < long_end
        assert finished_ns - request.arrival_ns <= 150_000  # batches take 1,000 ns each


@every_policy
def test_a_long_prompt_moves_on_while_short_requests_keep_coming(policy: Policy) -> None:
    short = [Request(at, 4_000 * at, 24, 4) for at in range(1, 150)]
    result = run(policy, [Request(0, 0, 1600, 1), *short], SchedulerSettings(3, 32, 16))
    prompt = seqs_until_prompt_done(result, 0)
    assert longest_gap(prompt) <= 3 * LOOPS
    assert result.records[0].finished_ns < result.records[149].finished_ns


@pytest.mark.parametrize("mix_decode", [True, False])
def test_a_wavefront_too_wide_for_the_budget_goes_round_among_requests(mix_decode: bool) -> None:
    """Six prompts, room for two chunks a batch: a late one is served every third batch, and all end nearly
    together."""
    result = run(
        Wavefront(mix_decode=mix_decode),
        [Request(at, 0, 320, 1) for at in range(6)],
        SchedulerSettings(6, 32, 16),
    )
    gaps = [longest_gap(seqs_until_prompt_done(result, at)) for at in range(6)]
    assert max(gaps) <= 6
    served = [rows_until(result.batches, at, 60) for at in range(6)]
    assert max(served) - min(served) <= 2 * 16


def rows_until(batches: Sequence[ExecutionBatch], request_id: int, seq: int) -> int:
    return sum(
        item.token_count for batch in batches[:seq] for item in batch.ranges if item.request_id == request_id
    )


@every_policy
def test_looping_tokens_beyond_the_budget_take_turns(policy: Policy) -> None:
    result = run(
        policy, [Request(at, 0, 2, 30) for at in range(6)], SchedulerSettings(6, 4, 4), world=World()
    )
    for at in range(6):
        assert longest_gap(batches_of(result, at, (Stage.RECURRENT,))) <= 8


@pytest.mark.parametrize("ns_per_token", [0, 20, 80, 1000])
def test_shortest_first_lets_a_long_prompt_be_overtaken_within_its_bound_and_not_beyond(
    ns_per_token: int,
) -> None:
    """One place, which is taken until all have come. Before the long prompt go those short ones that came
    less than the difference of the prompts times `ms_per_token` after it, in order, and no later one."""
    long, short = Request(1, 1, 400, 1), [Request(at, 500 * at, 20, 1) for at in range(2, 80)]
    policy = ShortestFirst(ms_per_token=ns_per_token / 1e6)
    result = run(policy, [Request(0, 0, 16, 64), long, *short], SchedulerSettings(1, 64, 16))
    admitted = [item.request_id for batch in result.batches for item in batch.transfers.allocations]
    bound_ns = long.arrival_ns + (400 - 20) * ns_per_token
    assert admitted[1 : admitted.index(1)] == [at for at in range(2, 80) if 500 * at < bound_ns]
    assert admitted[admitted.index(1) + 1 :] == [at for at in range(2, 80) if 500 * at >= bound_ns]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_prompt_that_shorter_ones_preempt_comes_to_its_end_while_they_keep_coming(preemption: str) -> None:
    """A pool for one long and two short requests, and short ones for ever: they take what the long one holds
    five times at most."""
    short = [Request(at, 9_000 * at, 24, 12) for at in range(1, 120)]
    cache = CacheSettings(8, 4 * 34, allocation="incremental", preemption=preemption)  # type: ignore[arg-type]
    policy = ShortestFirst(ms_per_token=1.0)  # the whole run lies within its bound
    result = run(policy, [Request(0, 0, 180, 60), *short], SchedulerSettings(8, 64, 16), cache=cache)
    records = result.records
    assert 0 < records[0].preemptions <= 5
    assert records[0].output_tokens == 60
    assert all(records[at].status is Status.FINISHED for at in range(120))
