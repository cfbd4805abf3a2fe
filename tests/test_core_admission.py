"""Who is let in when: arrivals in open and closed loops, the waiting queue's order and limits, refusals, and
the block ledger."""

import io

import pytest
from toy_backend import World, model_with, run

from policies.atomic import Atomic
from policies.core.engine.batchlines import compress
from policies.core.engine.engine import Engine
from policies.core.engine.runlog import RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import InputError, InvariantError
from policies.core.memory.admission import AdmissionQueue, ranking
from policies.core.memory.kv import BlockLedger
from policies.core.memory.ring import RingLedger
from policies.core.models.shape import OURO_TINY
from policies.core.seam.clients import Clients
from policies.core.seam.request import Request, Status
from policies.core.seam.settings import CacheSettings, SchedulerSettings


def queue_of(
    *requests: Request, order: str = "fcfs", scan_limit: int = 16, max_bypasses: int = 8
) -> AdmissionQueue:
    rank_of = ranking(order == "priority", lambda request: 0)
    queue = AdmissionQueue(rank_of, scan_limit, max_bypasses)
    for request in requests:
        queue.push(request)
    return queue


def popped(queue: AdmissionQueue, most_prompt_tokens: int) -> int | None:
    """Id of the request let in when only prompts up to `most_prompt_tokens` fit."""
    request = queue.pop_admissible(lambda candidate: candidate.prompt_tokens <= most_prompt_tokens)
    return None if request is None else request.request_id


# The waiting queue


def test_fcfs_lets_in_by_arrival_then_id_whatever_the_order_of_pushing_and_the_priority() -> None:
    queue = queue_of(Request(7, 5, 1, 1, -9), Request(3, 9, 1, 1), Request(9, 5, 1, 1), Request(1, 7, 1, 1))
    assert [popped(queue, 1) for _ in range(5)] == [7, 9, 1, 3, None]


def test_priority_lets_in_the_lowest_number_first_then_by_arrival_then_id() -> None:
    queue = queue_of(
        Request(0, 0, 1, 1, 2),
        Request(1, 5, 1, 1, 1),
        Request(2, 3, 1, 1, 1),
        Request(4, 3, 1, 1, 1),
        order="priority",
    )
    assert [popped(queue, 1) for _ in range(4)] == [2, 4, 1, 0]


@pytest.mark.parametrize("max_bypasses", [0, 1, 2, 5])
def test_a_blocked_request_is_overtaken_exactly_as_often_as_allowed_and_then_blocks_the_rest(
    max_bypasses: int,
) -> None:
    queue = queue_of(
        Request(0, 0, 99, 1),
        *(Request(number, number, 1, 1) for number in range(1, 9)),
        max_bypasses=max_bypasses,
    )
    let_in = [popped(queue, 1) for _ in range(8)]
    assert let_in == [*range(1, max_bypasses + 1), *[None] * (8 - max_bypasses)]
    assert [popped(queue, 99) for _ in range(2)] == [0, max_bypasses + 1]


def test_bypasses_are_counted_for_every_request_that_is_overtaken_and_only_for_those() -> None:
    queue = queue_of(
        Request(0, 0, 50, 1), Request(1, 1, 1, 1), Request(2, 2, 99, 1), Request(3, 3, 1, 1), max_bypasses=2
    )
    assert [popped(queue, 1), popped(queue, 1)] == [1, 3]
    queue.push(Request(4, 4, 1, 1))
    queue.push(Request(5, 5, 1, 1))
    assert popped(queue, 1) is None
    assert [popped(queue, 50), popped(queue, 50), popped(queue, 50)] == [0, 4, None]


def test_a_scan_that_finds_nothing_counts_no_bypass() -> None:
    queue = queue_of(Request(0, 0, 99, 1), Request(1, 1, 99, 1), max_bypasses=1)
    assert [popped(queue, 1) for _ in range(5)] == [None] * 5
    queue.push(Request(2, 2, 1, 1))
    assert popped(queue, 1) == 2


@pytest.mark.parametrize("scan_limit", [1, 2, 3, 4])
def test_a_scan_looks_at_no_more_requests_than_its_limit(scan_limit: int) -> None:
    queue = queue_of(
        *(Request(number, number, 99, 1) for number in range(3)), Request(3, 3, 1, 1), scan_limit=scan_limit
    )
    looked_at: list[int] = []

    def fits(request: Request) -> bool:
        looked_at.append(request.request_id)
        return request.prompt_tokens == 1

    chosen = queue.pop_admissible(fits)
    assert (chosen is not None) == (scan_limit == 4)
    assert set(looked_at) == set(range(scan_limit))
    assert len(queue) == (3 if chosen else 4)


def test_the_running_order_of_a_batch_is_by_priority_only_under_priority_admission() -> None:
    requests = [Request(0, 0, 4, 1, 5), Request(1, 0, 4, 1, 0)]
    for admission, order in (("fcfs", [0, 1]), ("priority", [1, 0])):
        result = run(Atomic(), requests, SchedulerSettings(admission=admission))  # type: ignore[arg-type]
        assert [item.request_id for item in result.batches[0].ranges] == order


# Refusals


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers_and_the_rest_go_on() -> None:
    result = run(Atomic(), [Request(0, 0, 30, 4), Request(1, 0, 15, 2), Request(2, 9, 33, 1)], num_blocks=11)
    records = result.records
    assert [records[number].status for number in range(3)] == [
        Status.REFUSED,
        Status.FINISHED,
        Status.REFUSED,
    ]
    assert records[0].reason == "it needs 12 KV blocks (33 positions), the pool has 8"
    assert records[2].reason == "it needs 12 KV blocks (33 positions), the pool has 8"
    assert records[2].finished_ns is not None and records[0].first_scheduled_ns is None
    fits = run(Atomic(), [Request(0, 0, 30, 3)], num_blocks=8)
    assert fits.records[0].status is Status.FINISHED


def test_a_request_longer_than_the_context_is_refused_with_the_numbers() -> None:
    result = run(
        Atomic(), [Request(0, 0, 30, 11), Request(1, 0, 30, 10)], model=model_with(max_context_tokens=40)
    )
    assert result.records[0].reason == "prompt 30 + max_tokens 11 = 41 tokens, the context holds 40"
    assert result.records[1].status is Status.FINISHED


def test_a_run_in_which_every_request_is_refused_ends_and_forms_no_batch() -> None:
    result = run(Atomic(), [Request(0, 0, 99, 4), Request(1, 50, 99, 4)], num_blocks=4, concurrency=1)
    assert result.batches == []
    assert {record.status for record in result.records.values()} == {Status.REFUSED}


# Arrivals


def first_step(requests: list[Request]) -> None:
    scheduler = Scheduler(Atomic(), OURO_TINY, SchedulerSettings(), CacheSettings(num_blocks=400))
    loop = Engine(scheduler, Clients(requests), RunLog(io.StringIO())).run()
    next(loop)


@pytest.mark.parametrize(
    "requests",
    [
        [Request(0, -1, 4, 1)],
        [Request(0, 0, 4, 1), Request(1, -5, 4, 1)],
        [Request(0, 0, 4, 1), Request(0, 0, 4, 1)],
        [Request(1, 0, 4, 1), Request(0, 0, 4, 1)],
    ],
    ids=["negative", "negative later", "twice the same", "ids out of order at one time"],
)
def test_arrivals_that_are_negative_or_out_of_order_are_refused_by_name(requests: list[Request]) -> None:
    with pytest.raises(
        InputError,
        match=f"request {requests[-1].request_id} arrives at {requests[-1].arrival_ns} ns, expected",
    ):
        first_step(requests)


def test_arrivals_that_go_back_in_time_are_refused_when_they_are_due() -> None:
    with pytest.raises(InputError, match=r"request 1 arrives at 50 ns, expected order after \(100, 0\)"):
        run(Atomic(), [Request(0, 100, 4, 1), Request(1, 50, 4, 1)])


def test_one_id_for_two_requests_is_refused() -> None:
    with pytest.raises(InvariantError, match="invariant 7: request 0 arrives twice"):
        run(Atomic(), [Request(0, 0, 4, 1), Request(0, 90_000, 4, 1)])


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(0, 1), (-3, 1), (4, 0), (4, -1)])
def test_a_request_without_prompt_or_output_tokens_is_refused_by_name(
    prompt_tokens: int, max_tokens: int
) -> None:
    with pytest.raises(InputError, match="request 5"):
        first_step([Request(5, 0, prompt_tokens, max_tokens)])


def test_a_closed_loop_of_no_clients_is_refused() -> None:
    with pytest.raises(InputError, match="workload concurrency: 0, expected at least 1"):
        Clients([], 0)


def test_a_serial_client_sends_its_next_request_when_the_last_one_has_ended() -> None:
    result = run(Atomic(), [Request(number, 0, 4, 1) for number in range(3)], concurrency=1)
    records = result.records
    assert [records[number].request.arrival_ns for number in range(3)] == [0, 2000, 4000]
    assert [records[number].finished_ns for number in range(3)] == [2000, 4000, 6000]


def test_a_client_waits_for_its_own_time_when_that_is_later_than_the_end_of_its_last_request() -> None:
    result = run(Atomic(), [Request(0, 0, 4, 1), Request(1, 9000, 4, 1)], concurrency=1)
    assert result.records[1].request.arrival_ns == 9000


def test_a_request_that_finds_a_free_place_arrives_at_its_own_time_whatever_ends_before() -> None:
    world = World(lambda batch: 1000)
    requests = [Request(0, 0, 4, 1), Request(1, 1500, 4, 1)]
    result = run(Atomic(), requests, SchedulerSettings(inflight=1), concurrency=2, world=world)
    assert result.records[0].finished_ns == 2000
    assert result.records[1].request.arrival_ns == 1500


def test_a_refused_request_frees_its_client_at_once() -> None:
    result = run(Atomic(), [Request(0, 0, 99, 9), Request(1, 0, 4, 1)], num_blocks=4, concurrency=1)
    assert result.records[1].request.arrival_ns == 0


# Ledgers


def test_the_block_ledger_gives_the_lowest_groups_first_and_the_last_returned_again_first() -> None:
    ledger = BlockLedger(27, 16, 4)
    assert (ledger.num_groups, ledger.total_blocks, ledger.free_blocks) == (6, 24, 24)
    assert ledger.allocate(0, 33) == (0, 1, 2)
    assert ledger.allocate(1, 16) == (3,)
    ledger.release(0)
    assert ledger.allocate(2, 17) == (0, 1)
    assert (ledger.free_blocks, ledger.used_blocks, ledger.peak_used_blocks) == (12, 12, 16)
    ledger.check_integrity()


def test_a_pool_smaller_than_one_block_in_each_plane_is_refused() -> None:
    with pytest.raises(
        InputError, match="num_blocks: 3 is less than one block in each of the 4 depth planes"
    ):
        BlockLedger(3, 16, 4)


def test_a_ring_refuses_more_chunks_than_it_has_slots() -> None:
    rings = RingLedger(2, 4)
    ring = rings.allocate()
    rings.set_used(ring, 4)
    assert (rings.used_slots, rings.free_slots) == (4, 4)
    with pytest.raises(
        InvariantError, match=f"invariant 3: 5 chunks resident in ring {ring}, it has 4 slots"
    ):
        rings.set_used(ring, 5)


def test_runs_of_block_groups_are_written_short_and_in_token_order() -> None:
    assert [compress(groups) for groups in ((4, 5, 6, 2), (0,), (3, 2, 1), (7, 8))] == [
        "4-6+2",
        "0",
        "3+2+1",
        "7-8",
    ]
