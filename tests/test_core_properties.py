"""Properties of every policy on random small worlds: the nine invariants by an outside checker, and nothing
left at the end."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hash_seeds import outputs_under_two_hash_seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_checker import check_log, parse_batches
from toy_backend import Run
from worlds import VARIANTS, RandomWorld

from policies.atomic import Atomic
from policies.core.engine.validation import derive
from policies.core.errors import SelectionError
from policies.core.models.shape import ModelShape
from policies.core.seam.batch import NO_TRANSFERS, ExecutionBatch, Proposal, Selection, Stage
from policies.core.seam.exits import ExitSettings
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.core.seam.view import View
from policies.mixed import Mixed
from policies.registry import POLICIES
from policies.split import Split
from policies.wcpb import Wavefront

PROFILE = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def schedulers(draw: st.DrawFn) -> SchedulerSettings:
    """Limits from the smallest that work to some that never bind; chunks up to the budget, and None; more in
    flight than we use."""
    budget = draw(st.one_of(st.integers(1, 12), st.integers(1, 64)))
    return SchedulerSettings(
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=budget,
        prefill_chunk_size=draw(st.one_of(st.none(), st.integers(1, min(budget, 6)), st.integers(1, budget))),
        decode=draw(st.sampled_from(["refill", "no_refill"])),
        inflight=draw(st.sampled_from([1, 2, 2, 5])),
        admission=draw(st.sampled_from(["fcfs", "priority"])),
        admission_scan_limit=draw(st.integers(1, 4)),
        max_admission_bypasses=draw(st.integers(0, 3)),
        max_prefill_batches_before_decode=draw(st.integers(1, 3)),
        min_coda_batch_size=draw(st.integers(1, 3)),
    )


@st.composite
def cases(draw: st.DrawFn) -> RandomWorld:
    """Up to nine requests, some of which never fit; a pool from one group in each plane up; a device with any
    durations, 0 too."""
    num_loops = draw(st.sampled_from([4, 4, 4, 1, 2, 3, 5]))
    block_size = draw(st.integers(1, 8))
    requests, outputs, now_ns = [], {}, 0
    for request_id in draw(st.permutations(range(draw(st.integers(1, 9))))):
        now_ns += draw(st.sampled_from([0, 0, 1, 7, 40, 300]))
        max_tokens = draw(st.integers(1, 6))
        prompt_tokens = draw(st.one_of(st.integers(1, 12), st.integers(1, 48)))
        requests.append(Request(request_id, now_ns, prompt_tokens, max_tokens, draw(st.integers(0, 2))))
        outputs[request_id] = draw(st.integers(1, max_tokens))
    scheduler = draw(schedulers())
    groups = draw(st.one_of(st.integers(1, 12), st.integers(8, 80)))
    return RandomWorld(
        requests=tuple(sorted(requests, key=lambda request: (request.arrival_ns, request.request_id))),
        outputs=outputs,
        patience_ns={},
        scheduler=scheduler,
        cache=CacheSettings(block_size, groups * num_loops + draw(st.integers(0, num_loops - 1))),
        num_loops=num_loops,
        concurrency=draw(st.sampled_from([None, None, 1, 2, 4])),
        durations_ns=tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=7))),
        host_ns=draw(st.sampled_from([0, 0, 5, 50])),
        collect_delay_ns=draw(st.sampled_from([0, 0, 3])),
        max_context_tokens=draw(st.sampled_from([65536, 65536, 40])),
        exits=draw(exit_settings(num_loops)),
        exit_seed=draw(st.integers(0, 9)),
    )


def exit_settings(num_loops: int) -> st.SearchStrategy[ExitSettings]:
    """Fixed depth as often as early exit with any limits."""
    limits = st.tuples(st.integers(1, num_loops), st.integers(1, num_loops)).map(sorted)
    early = limits.map(lambda pair: ExitSettings("trace", pair[0], pair[1]))
    return st.one_of(st.just(ExitSettings()), early)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_policy_keeps_all_invariants_on_random_worlds_and_leaves_nothing_allocated(name: str) -> None:
    @PROFILE
    @given(cases())
    def holds(case: RandomWorld) -> None:
        case.check(VARIANTS[name])

    holds()


def test_every_policy_of_the_registry_is_driven_here() -> None:
    assert {type(policy) for policy in VARIANTS.values()} == set(POLICIES.values())


@PROFILE
@given(cases())
def test_every_decoded_token_is_counted_by_the_loops_after_which_it_left(case: RandomWorld) -> None:
    for policy in VARIANTS.values():
        result = case.run(policy)
        expected = [0] * (case.num_loops + 1)
        for key, record in result.records.items():
            prompt = record.request.prompt_tokens
            for position in range(prompt, prompt + record.output_tokens - 1):
                expected[case.loops_of(key, position)] += 1
        assert result.engine.scheduler.tokens_by_loops == expected


@PROFILE
@given(cases())
def test_split_and_atomic_never_put_prompt_and_decode_rows_in_one_batch(case: RandomWorld) -> None:
    for policy in (Atomic(), Split(), Wavefront(mix_decode=False)):
        for batch in parse_batches(case.run(policy).batches_csv):
            assert len({item.is_prompt for item in batch.ranges}) == 1


@PROFILE
@given(cases())
def test_an_atomic_prompt_chunk_always_runs_all_depths_in_one_submission(case: RandomWorld) -> None:
    for batch in case.run(Atomic()).batches:
        if any(item.stage.startswith("PREFILL") for item in batch.ranges):
            assert (batch.stage, batch.loop_count) == ("PREFILL", case.num_loops)


@PROFILE
@given(cases())
def test_a_held_cohort_takes_no_new_tokens_until_it_has_drained(case: RandomWorld) -> None:
    full = replace(case, scheduler=replace(case.scheduler, decode="no_refill"), outputs={})
    for policy in VARIANTS.values():
        left: dict[int, int] = {}
        for batch in parse_batches(full.run(policy).batches_csv):
            if batch.stage in ("PRELUDE", "CODA"):
                assert all(loops <= 0 for loops in left.values()), f"loops {left} are left at {batch}"
                for item in batch.ranges:
                    if item.stage == "PRELUDE":
                        left[item.request_id] = full.loops_of(item.request_id, item.start)
            left.update(
                {
                    item.request_id: left[item.request_id] - batch.loops
                    for item in batch.ranges
                    if item.stage == "RECURRENT"
                }
            )


class Perturbed(Policy):
    """Takes another policy's choice, spoils it by chance, and proposes what the engine's own validation lets
    pass."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.name = f"perturbed {policy.name}"
        self.is_wavefront = policy.is_wavefront
        self.chance = random.Random(seed)

    def admission_rank(self, request: Request) -> int:
        return self.policy.admission_rank(request)

    def chooser(self, model: ModelShape) -> Callable[[View], Selection | None]:
        self.choose = self.policy.chooser(model)
        return self.select

    def select(self, view: View) -> Selection | None:
        chosen = self.choose(view)
        if chosen is None:
            return None
        running = {request.request_id: request for request in view.running}
        for _ in range(6):
            spoilt = self.spoil(chosen, view)
            try:
                derive(spoilt, running, view.limits, view.num_loops, view.exits, has_planes=True)
            except SelectionError:
                continue
            return spoilt
        return chosen

    def spoil(self, chosen: Selection, view: View) -> Selection:
        chance, ranges = self.chance, list(chosen.ranges)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(ranges)) if ranges else 0
            match chance.choice(["drop", "double", "swap", "change", "change", "change", "other"]):
                case "drop":
                    del ranges[at : at + 1]
                case "double":
                    ranges[at:at] = ranges[at : at + 1]
                case "swap":
                    chance.shuffle(ranges)
                case "change" if ranges:
                    item = ranges[at]
                    ranges[at] = item._replace(
                        depth=item.depth + chance.choice([0, 0, 0, 1, -1]),
                        start=max(0, item.start + chance.choice([0, 0, 0, 1, -1])),
                        end=item.end + chance.choice([0, 0, 1, -1, -2]),
                    )
                case "other":
                    request = chance.choice(view.running)
                    depth = chance.randrange(view.num_loops)
                    start, end = request.prompt.ready(depth, chance.random() < 0.5)
                    ranges.append(Proposal(request.request_id, depth, start, end))
        loops = chance.choice([chosen.loop_count, chosen.loop_count, None, *range(view.num_loops + 1)])
        return Selection(tuple(ranges), loops)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "sjf"])  # whose batches are wcpb's
def test_whatever_validation_lets_pass_keeps_all_invariants(name: str) -> None:
    @PROFILE
    @given(cases(), st.integers(0, 1_000_000))
    def holds(case: RandomWorld, seed: int) -> None:
        policy = Perturbed(VARIANTS[name], seed)
        result = case.run(policy)
        result.engine.scheduler.check_drained()
        check_log(result.batches_csv, result.requests_csv, case.rules(policy.policy))

    holds()


@PROFILE
@given(cases())
def test_all_policies_run_the_same_tokens_and_differ_only_in_when(case: RandomWorld) -> None:
    def work(policy: Policy) -> set[tuple[int, str, int, int]]:
        done = set()
        ends = {
            key: record.request.prompt_tokens + record.output_tokens - 1
            for key, record in logs[policy.name].items()
        }
        for batch in runs[policy.name].batches:
            for item in batch.ranges:
                for depth in range(item.depth, item.depth + batch.loop_count):
                    kind = "prompt" if item.stage.startswith("PREFILL") else "decode"
                    done.update(
                        (item.request_id, kind, token, depth)
                        for token in range(item.token_start, item.token_end)
                        if token < ends[item.request_id]
                        and (kind == "prompt" or depth < case.loops_of(item.request_id, token))
                    )
        return done

    policies = (Atomic(), Split(), Mixed(), Wavefront())
    runs = {policy.name: case.run(policy) for policy in policies}
    logs = {name: result.records for name, result in runs.items()}
    assert len({frozenset(work(policy)) for policy in policies}) == 1


DETERMINISM = """
import sys
from toy_backend import World, run
from worlds import VARIANTS
from policies.core.seam.request import Request
from policies.core.seam.settings import SchedulerSettings
from policies.core.engine.validation import derive
requests = [Request(i, i * 700, 17 + i * 31 % 90, 1 + i % 9, i % 3) for i in range(40)]
stops = {i: 1 + i % 4 for i in range(0, 40, 3)}
world = World(lambda batch: 500 + batch.rows * 3 * max(batch.loop_count, 1), stops, 20, 5)
for name, policy in VARIANTS.items():
    for decode in ("refill", "no_refill"):
        for concurrency in (None, 6):
            limits = SchedulerSettings(5, 48, 16, decode, admission="priority", max_admission_bypasses=2)
            result = run(policy, requests, limits, 160, 8, concurrency, world=world)
            sys.stdout.write(result.batches_csv + result.requests_csv)
"""


def test_the_log_is_the_same_byte_for_byte_whatever_the_hash_seed() -> None:
    first, second = outputs_under_two_hash_seeds(DETERMINISM)
    assert len(first) > 100_000
    assert first == second


def returns_for_nothing(result: Run) -> list[tuple[ExecutionBatch, ExecutionBatch]]:
    """Batches at one depth that came back early and were followed at once by the same ranges at the next one,
    although nobody had arrived, ended or been let in meanwhile."""
    found = []
    arrivals_ns = [record.request.arrival_ns for record in result.records.values()]
    for batch, after in pairwise(result.batches):
        went_on = [(item.request_id, item.depth + batch.loop_count, item.token_start, item.token_count)
                   for item in batch.ranges]  # fmt: skip
        is_level = len({item.depth for item in batch.ranges}) == 1
        if (
            batch.loop_count
            and is_level
            and went_on
            == [(item.request_id, item.depth, item.token_start, item.token_count) for item in after.ranges]
        ):
            came = any(batch.formed_ns < at_ns <= after.formed_ns for at_ns in arrivals_ns)
            collected = result.batches[batch.after_seq + 1 : after.after_seq + 1]
            is_quiet = not came and all(item.stage is not Stage.CODA for item in collected)
            if is_quiet and after.transfers == NO_TRANSFERS:
                found.append((batch, after))
    return found


@pytest.mark.parametrize("name", ["atomic", "split", "mixed"])
def test_a_batch_comes_back_early_only_where_somebody_needs_it(name: str) -> None:
    @PROFILE
    @given(cases())
    def holds(case: RandomWorld) -> None:
        case = replace(case, exits=ExitSettings(), patience_ns={})
        if case.allows(VARIANTS[name]):
            assert returns_for_nothing(case.run(VARIANTS[name])) == []

    holds()
