"""The engine on worked examples: exact batches, the seed's figures, token delivery, early stops, and the
generator's protocol."""

import io
from collections.abc import Callable, Generator

import pytest
from toy_backend import Run, World, run

from policies.atomic import Atomic
from policies.core.engine.engine import Engine
from policies.core.engine.runlog import RequestRecord, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import InvariantError, StuckError
from policies.core.models.shape import OURO_1_4B, OURO_TINY
from policies.core.seam.batch import Selection
from policies.core.seam.clients import Clients
from policies.core.seam.events import Command, Completion, Event, Submit, Tick, Wait
from policies.core.seam.exits import ExitSettings
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request, Status
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.core.seam.view import View
from policies.mixed import Mixed
from policies.split import Split
from policies.wcpb import Wavefront

EVERY_POLICY = [
    Atomic(),
    Split(),
    Mixed(),
    Wavefront(),
    Wavefront(mix_decode=False),
    Wavefront(fuse_prelude=False),
]


def ranges_of(result: Run) -> list[str]:
    """The `stage loop_count ranges` part of every batch line."""
    lines = [line.split(",") for line in result.batches_csv.splitlines()[1:]]
    return [f"{line[1]} {line[2]} {line[9]}" for line in lines]


def start(
    requests: list[Request],
    settings: SchedulerSettings | None = None,
    concurrency: int | None = None,
    policy: Policy | None = None,
    on_ended: Callable[[RequestRecord], object] = lambda record: None,
) -> tuple[Engine, Generator[Command, Event, None]]:
    """An engine and its loop, for tests that answer each command by hand."""
    limits = settings or SchedulerSettings(prefill_chunk_size=4, inflight=2)
    scheduler = Scheduler(policy or Atomic(), OURO_TINY, limits, CacheSettings(num_blocks=400))
    engine = Engine(scheduler, Clients(requests, concurrency), RunLog(io.StringIO(), on_ended))
    return engine, engine.run()


def done(seq: int, now_ns: int, *stops: int) -> Completion:
    return Completion(seq, now_ns, now_ns, now_ns, frozenset(stops))


# Worked examples


def test_the_designs_wavefront_of_three_staged_chunks_runs_as_written_there() -> None:
    result = run(
        Wavefront(fuse_prelude=False), [Request(0, 0, 12, 1)], SchedulerSettings(prefill_chunk_size=4)
    )
    staging, recurrent = (
        "PREFILLING_PRELUDE 0 0:PREFILLING_PRELUDE",
        "PREFILLING_RECURRENT 1 0:PREFILLING_RECURRENT",
    )
    assert ranges_of(result) == [
        f"{staging}:0:0:4",
        f"{staging}:0:4:4",
        f"{staging}:0:8:4",
        f"{recurrent}:0:0:4",
        f"{recurrent}:1:0:4 0:PREFILLING_RECURRENT:0:4:4",
        f"{recurrent}:2:0:4 0:PREFILLING_RECURRENT:1:4:4 0:PREFILLING_RECURRENT:0:8:4",
        f"{recurrent}:3:0:4 0:PREFILLING_RECURRENT:2:4:4 0:PREFILLING_RECURRENT:1:8:4",
        f"{recurrent}:3:4:4 0:PREFILLING_RECURRENT:2:8:4",
        "PREFILL 1 0:PREFILL:3:8:4",
        "CODA 0 0:CODA:0:11:1",
    ]
    assert [item.embeds for batch in result.batches for item in batch.ranges] == [True] * 3 + [False] * 13


def test_a_folded_prelude_saves_the_staging_batches_and_changes_no_recurrent_one() -> None:
    settings = SchedulerSettings(prefill_chunk_size=4)
    folded = run(Wavefront(), [Request(0, 0, 12, 1)], settings)
    staged = run(Wavefront(fuse_prelude=False), [Request(0, 0, 12, 1)], settings)
    assert ranges_of(folded) == ranges_of(staged)[3:]
    assert [(i.token_start, i.depth) for b in folded.batches for i in b.ranges if i.embeds] == [
        (0, 0),
        (4, 0),
        (8, 0),
    ]


def test_a_fifth_chunk_goes_to_the_ring_slot_of_the_first() -> None:
    result = run(Wavefront(), [Request(0, 0, 18, 1)], SchedulerSettings(prefill_chunk_size=4))
    rows = {
        i.token_start: i.prefill_hidden_row_offset
        for b in result.batches
        for i in b.ranges
        if i.stage != "CODA"
    }
    assert rows == {0: 0, 4: 4, 8: 8, 12: 12, 16: 0}
    first_of_fifth = min(b.seq for b in result.batches for i in b.ranges if i.token_start == 16)
    last_of_first = max(b.seq for b in result.batches for i in b.ranges if i.token_start == 0)
    assert first_of_fifth == last_of_first + 1


def test_a_chunk_cut_by_the_row_budget_goes_on_inside_its_chunk_and_keeps_its_slot() -> None:
    result = run(
        Wavefront(), [Request(0, 0, 8, 1)], SchedulerSettings(max_num_batched_tokens=5, prefill_chunk_size=4)
    )
    first = [i for b in result.batches for i in b.ranges if i.depth == 0 and i.stage != "CODA"]
    assert [(i.token_start, i.token_count, i.chunk_start, i.prefill_hidden_row_offset) for i in first] == [
        (0, 4, 0, 0),
        (4, 1, 4, 4),
        (5, 3, 4, 5),
    ]


def test_atomic_runs_a_chunk_through_all_depths_and_a_lone_token_too() -> None:
    result = run(Atomic(), [Request(0, 0, 5, 3)], SchedulerSettings(prefill_chunk_size=4))
    assert ranges_of(result) == [
        "PREFILL 4 0:PREFILL:0:0:4",
        "PREFILL 4 0:PREFILL:0:4:1",
        "CODA 0 0:CODA:0:4:1",
        "PRELUDE 0 0:PRELUDE:0:5:1",
        "RECURRENT 4 0:RECURRENT:0:5:1",
        "CODA 0 0:CODA:0:5:1",
        "PRELUDE 0 0:PRELUDE:0:6:1",
        "RECURRENT 4 0:RECURRENT:0:6:1",
        "CODA 0 0:CODA:0:6:1",
    ]
    record = result.records[0]
    assert (list(record.token_ns), record.finished_ns) == ([3000, 6000, 9000], 9000)


def test_split_comes_back_at_a_depth_only_where_decode_work_may_go_next() -> None:
    result = run(
        Split(),
        [Request(0, 0, 4, 2), Request(1, 1, 8, 1)],
        SchedulerSettings(prefill_chunk_size=4, inflight=1),
    )
    assert ranges_of(result) == [
        "PREFILL 4 0:PREFILL:0:0:4",
        "CODA 0 0:CODA:0:3:1",
        "PRELUDE 0 0:PRELUDE:0:4:1",
        "RECURRENT 4 0:RECURRENT:0:4:1",
        "CODA 0 0:CODA:0:4:1",
        "PREFILL 4 1:PREFILL:0:0:4",
        "PREFILL 4 1:PREFILL:0:4:4",
        "CODA 0 1:CODA:0:7:1",
    ]
    limits = SchedulerSettings(prefill_chunk_size=4, inflight=1, max_prefill_batches_before_decode=3)
    patient = ranges_of(run(Split(), [Request(0, 0, 4, 2), Request(1, 1, 8, 1)], limits))
    assert patient[3:8] == [
        "PREFILL 4 1:PREFILL:0:0:4",
        "PREFILLING_RECURRENT 1 1:PREFILLING_RECURRENT:0:4:4",
        "RECURRENT 4 0:RECURRENT:0:4:1",
        "CODA 0 0:CODA:0:4:1",
        "PREFILL 3 1:PREFILL:1:4:4",
    ]


def test_mixed_puts_decode_rows_first_and_prompt_ranges_after_them_in_one_recurrent_batch() -> None:
    result = run(
        Mixed(),
        [Request(0, 0, 4, 2), Request(1, 1, 8, 1)],
        SchedulerSettings(prefill_chunk_size=4, inflight=1),
    )
    assert ranges_of(result)[3:6] == [
        "RECURRENT 4 0:RECURRENT:0:4:1 1:PREFILLING_RECURRENT:0:0:4",
        "CODA 0 0:CODA:0:4:1",
        "PREFILL 4 1:PREFILL:0:4:4",
    ]


def test_a_mixed_batch_runs_on_to_the_depth_at_which_a_token_may_leave_and_its_prompt_with_it() -> None:
    result = run(
        Mixed(),
        [Request(0, 0, 4, 2), Request(1, 1, 8, 1)],
        SchedulerSettings(prefill_chunk_size=4, inflight=1),
        exits=ExitSettings("trace", min_loops=2, max_loops=3),
        world=World(exit_loops=lambda request_id, position: 3),
    )
    assert ranges_of(result)[3:7] == [
        "RECURRENT 2 0:RECURRENT:0:4:1 1:PREFILLING_RECURRENT:0:0:4",
        "RECURRENT 1 0:RECURRENT:2:4:1 1:PREFILLING_RECURRENT:2:0:4",
        "CODA 0 0:CODA:3:4:1",
        "PREFILL 1 1:PREFILL:3:0:4",
    ]


@pytest.mark.parametrize("policy", [Split(), Mixed(), Wavefront()], ids=str)
def test_a_hidden_state_that_waits_for_company_at_the_lm_head_is_no_reason_to_split_a_prompt(
    policy: Policy,
) -> None:
    limits = SchedulerSettings(prefill_chunk_size=4, inflight=1, min_coda_batch_size=2)
    assert ranges_of(run(policy, [Request(0, 0, 4, 1), Request(1, 1, 4, 1)], limits)) == [
        "PREFILL 4 0:PREFILL:0:0:4",
        "PREFILL 4 1:PREFILL:0:0:4",
        "CODA 0 0:CODA:0:3:1 1:CODA:0:3:1",
    ]


def test_a_looping_token_runs_on_while_a_state_waits_for_its_company_at_the_lm_head() -> None:
    limits = SchedulerSettings(
        prefill_chunk_size=4, inflight=1, min_coda_batch_size=2, max_prefill_batches_before_decode=2
    )
    assert ranges_of(run(Atomic(), [Request(0, 0, 4, 2), Request(1, 1500, 4, 1)], limits))[2:] == [
        "PRELUDE 0 0:PRELUDE:0:4:1",
        "PREFILL 4 1:PREFILL:0:0:4",
        "RECURRENT 4 0:RECURRENT:0:4:1",
        "CODA 0 0:CODA:0:4:1 1:CODA:0:3:1",
    ]


def test_staging_is_not_counted_as_prompt_work_that_decode_rows_must_wait_for() -> None:
    policy = Wavefront(mix_decode=False, fuse_prelude=False)
    limits = SchedulerSettings(prefill_chunk_size=4, inflight=1)
    result = run(policy, [Request(0, 0, 4, 3), Request(1, 4500, 4, 1)], limits)
    assert ranges_of(result)[4:8] == [
        "RECURRENT 4 0:RECURRENT:0:4:1",
        "CODA 0 0:CODA:0:4:1",
        "PRELUDE 0 0:PRELUDE:0:5:1",
        "PREFILLING_PRELUDE 0 1:PREFILLING_PRELUDE:0:0:4",
    ]
    assert ranges_of(result)[8] == "PREFILLING_RECURRENT 1 1:PREFILLING_RECURRENT:0:0:4"


def test_looping_tokens_that_do_not_all_fit_take_turns_longest_waiting_then_oldest_first() -> None:
    limits = SchedulerSettings(
        max_num_batched_tokens=2, prefill_chunk_size=1, max_prefill_batches_before_decode=99
    )
    batches = run(Atomic(), [Request(number, 0, 1, 2) for number in range(3)], limits).batches
    turns = [
        [(item.request_id, item.depth) for item in batch.ranges]
        for batch in batches
        if batch.stage == "RECURRENT"
    ]
    assert turns[:4] == [[(0, 0), (1, 0)], [(2, 0), (0, 1)], [(1, 1), (0, 2)], [(2, 1), (0, 3)]]


# The seed's figures (facts.md section 2)


def seed(policy: Policy, chunk: int) -> Run:
    requests = [Request(number, 0, 8064, 1) for number in range(4)]
    return run(policy, requests, SchedulerSettings(prefill_chunk_size=chunk), model=OURO_1_4B)


@pytest.mark.parametrize("policy", [Atomic(), Split(), Mixed()], ids=["atomic", "split", "mixed"])
def test_four_prompts_of_8064_in_chunks_of_16_give_64_rows_per_recurrent_invocation(policy: Policy) -> None:
    result = seed(policy, 16)
    assert result.engine.log.totals.recurrent_invocations == 504 * 4
    assert result.rows_per_invocation == 64.0


@pytest.mark.parametrize(
    "policy", [Wavefront(), Wavefront(mix_decode=False), Wavefront(fuse_prelude=False)], ids=str
)
def test_the_wavefront_gives_254_49_rows_in_507_recurrent_invocations(policy: Policy) -> None:
    result = seed(policy, 16)
    assert result.engine.log.totals.recurrent_invocations == 507
    assert round(result.rows_per_invocation, 2) == 254.49


def test_a_wavefront_of_128_token_chunks_stays_within_1024_rows_and_runs_129024_in_all() -> None:
    result = seed(Wavefront(), 128)
    assert max(batch.rows for batch in result.batches) <= 1024
    assert result.engine.log.totals.recurrent_rows == 129_024


# Tokens: how many, when, and the smallest settings


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
@pytest.mark.parametrize(
    "limits",
    [
        SchedulerSettings(max_num_seqs=1),
        SchedulerSettings(max_num_batched_tokens=1, prefill_chunk_size=None),
        SchedulerSettings(prefill_chunk_size=1),
        SchedulerSettings(
            max_num_seqs=1, max_num_batched_tokens=1, prefill_chunk_size=1, inflight=1, decode="no_refill"
        ),
        SchedulerSettings(min_coda_batch_size=99, max_prefill_batches_before_decode=99),
    ],
    ids=[
        "one request at a time",
        "one row",
        "one token a chunk",
        "one of everything",
        "never enough to sample",
    ],
)
def test_every_token_comes_at_the_end_of_the_batch_that_made_it(
    policy: Policy, limits: SchedulerSettings
) -> None:
    requests = [Request(0, 0, 7, 3), Request(1, 0, 1, 1), Request(2, 500, 9, 2)]
    result = run(policy, requests, limits)
    ends: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for line in result.batches_csv.splitlines()[1:]:
        fields = line.split(",")
        for item in fields[9].split(" "):
            if ":CODA:" in item:
                ends[int(item.split(":")[0])].append(int(fields[7]))
    for request in requests:
        record = result.records[request.request_id]
        assert list(record.token_ns) == ends[request.request_id]
        assert record.output_tokens == request.max_tokens
        assert record.status is Status.FINISHED and record.finished_ns == record.token_ns[-1]
    result.engine.scheduler.check_drained()


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
def test_a_request_with_one_output_token_ends_with_its_prompt_and_is_never_fed_back(policy: Policy) -> None:
    result = run(policy, [Request(0, 0, 10, 1)])
    assert {batch.stage for batch in result.batches}.isdisjoint({"PRELUDE", "RECURRENT"})
    assert result.records[0].output_tokens == 1


def test_a_stop_learned_late_makes_surplus_rows_that_are_counted_and_never_delivered() -> None:
    result = run(Atomic(), [Request(0, 0, 4, 9)], SchedulerSettings(inflight=2), world=World(outputs={0: 2}))
    assert result.records[0].output_tokens == 2
    assert [batch.stage for batch in result.batches][-2:] == ["CODA", "PRELUDE"]
    assert result.engine.scheduler.surplus_rows == 1
    synchronous = run(
        Atomic(), [Request(0, 0, 4, 9)], SchedulerSettings(inflight=1), world=World(outputs={0: 2})
    )
    assert synchronous.engine.scheduler.surplus_rows == 0
    assert synchronous.batches[-1].stage == "CODA"


def test_blocks_return_only_when_the_last_batch_that_touches_them_has_been_collected() -> None:
    requests = [Request(0, 0, 4, 9), Request(1, 0, 4, 9)]
    result = run(Atomic(), requests, num_blocks=4, world=World(outputs={0: 2}))
    surplus = max(batch.seq for batch in result.batches for item in batch.ranges if item.request_id == 0)
    admitted = next(
        batch for batch in result.batches if any(item.request_id == 1 for item in batch.transfers.allocations)
    )
    assert admitted.after_seq == surplus
    assert admitted.seq == surplus + 1


def test_blocks_are_sized_for_prompt_and_outputs_less_the_token_that_is_never_fed_back() -> None:
    result = run(Atomic(), [Request(0, 0, 30, 3), Request(1, 0, 30, 4)])
    groups = [allocation.block_groups for allocation in result.batches[0].transfers.allocations]
    assert groups == [(0, 1), (2, 3, 4)]
    assert result.engine.scheduler.blocks.peak_used_blocks == 5 * 4


# The generator's protocol


def test_the_engine_waits_for_a_completion_alone_while_all_places_in_flight_are_taken() -> None:
    _, loop = start([Request(0, 0, 12, 1), Request(1, 500, 4, 1)])
    assert [type(next(loop)), type(loop.send(Tick(0)))] == [Submit, Submit]
    assert loop.send(Tick(0)) == Wait(None)
    assert isinstance(loop.send(done(0, 10)), Submit)


def test_the_engine_waits_until_the_next_arrival_while_nothing_is_ready() -> None:
    _, loop = start([Request(0, 70, 4, 1), Request(1, 500, 4, 1)])
    assert next(loop) == Wait(70)
    assert loop.send(Tick(69)) == Wait(70)
    command = loop.send(Tick(70))
    assert isinstance(command, Submit) and command.batch.formed_ns == 70


def test_the_engine_waits_for_completion_or_arrival_while_what_runs_leaves_nothing_to_schedule() -> None:
    ended: list[RequestRecord] = []
    engine, loop = start([Request(0, 0, 4, 1), Request(1, 500, 4, 1)], on_ended=ended.append)
    assert [type(next(loop)), type(loop.send(Tick(0)))] == [Submit, Submit]
    assert loop.send(Tick(0)) == Wait(None)
    assert loop.send(done(0, 10)) == Wait(500)
    assert engine.log.records[0].status is Status.WAITING and ended == []
    assert loop.send(done(1, 20)) == Wait(500)
    assert engine.log.records == {} and [record.status for record in ended] == [Status.FINISHED]


def test_a_request_that_arrives_with_a_completion_is_in_the_batch_formed_then() -> None:
    _, loop = start(
        [Request(0, 0, 12, 1), Request(1, 10, 4, 1)], SchedulerSettings(prefill_chunk_size=4, inflight=1)
    )
    next(loop)
    assert loop.send(Tick(0)) == Wait(None)
    command = loop.send(done(0, 10))
    assert isinstance(command, Submit)
    assert [item.request_id for item in command.batch.ranges] == [0, 1]


def test_handing_a_batch_over_takes_the_time_that_the_backend_says() -> None:
    engine, loop = start([Request(0, 0, 12, 1)])
    next(loop)
    command = loop.send(Tick(33))
    assert isinstance(command, Submit) and command.batch.formed_ns == engine.now_ns == 33


def test_a_batch_names_the_last_one_collected_before_it_was_formed() -> None:
    result = run(Atomic(), [Request(0, 0, 12, 1)], SchedulerSettings(prefill_chunk_size=4, inflight=2))
    assert [batch.after_seq for batch in result.batches] == [-1, -1, 0, 1]


def test_an_empty_workload_ends_at_once() -> None:
    assert run(Atomic(), []).commands == []


def test_the_engine_refuses_a_time_that_goes_back() -> None:
    _, loop = start([Request(0, 70, 4, 1)])
    next(loop)
    loop.send(Tick(60))
    with pytest.raises(InvariantError, match="invariant 6: time went back from 60 to 59 ns"):
        loop.send(Tick(59))


def test_the_engine_refuses_a_completion_out_of_order() -> None:
    _, loop = start([Request(0, 0, 12, 1)])
    next(loop)
    loop.send(Tick(0))
    with pytest.raises(InvariantError, match="batch 1 completed, the oldest submitted one is 0"):
        loop.send(done(1, 10))


def test_the_engine_refuses_a_completion_when_nothing_is_in_flight() -> None:
    _, loop = start([Request(0, 70, 4, 1)])
    next(loop)
    with pytest.raises(InvariantError, match="batch 0 completed"):
        loop.send(done(0, 10))


@pytest.mark.parametrize(
    "completion",
    [Completion(0, 40, 4, 30), Completion(0, 40, 30, 20), Completion(0, 40, 20, 41)],
    ids=["started before it was formed", "finished before it started", "collected before it finished"],
)
def test_the_engine_refuses_a_batch_whose_times_are_out_of_order(completion: Completion) -> None:
    _, loop = start([Request(0, 5, 12, 1)])
    next(loop)
    loop.send(Tick(5))
    with pytest.raises(InvariantError, match="invariant 6: batch 0 formed at 5"):
        loop.send(completion)


def test_the_engine_refuses_a_device_that_runs_two_batches_at_once() -> None:
    _, loop = start([Request(0, 0, 12, 1)])
    next(loop)
    loop.send(Tick(0))
    loop.send(Completion(0, 20, 0, 20))
    with pytest.raises(InvariantError, match=r"invariant 6: batch 1 .*19.*20"):
        loop.send(Completion(1, 30, 19, 30))


class Idle(Policy):
    """Passes over everything."""

    name = "idle"

    def select(self, view: View) -> Selection | None:
        return None


def test_a_policy_that_passes_over_ready_work_is_stopped_with_the_names_of_the_stuck_requests() -> None:
    _, loop = start([Request(3, 0, 4, 1), Request(8, 0, 6, 1)], policy=Idle())
    with pytest.raises(
        StuckError, match=r"invariant 9: policy idle .* 2 requests: request 3 .* of 4\); request 8 "
    ):
        next(loop)


def test_a_run_that_ends_with_a_batch_unaccounted_for_is_not_drained() -> None:
    engine, loop = start([Request(0, 0, 4, 1)])
    next(loop)
    with pytest.raises(
        InvariantError, match=r"invariant 7: .* 1 requests running, .* 1 batches in flight, 4 blocks held"
    ):
        engine.scheduler.check_drained()
