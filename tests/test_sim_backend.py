"""The SimPy device by hand: exact times of a constant cost, ties, token delivery, and runs in which nothing
happens."""

import csv
import io
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import simpy
from log_checker import Rules, check_log, parse_batches
from toy_backend import by_id, requests_text
from worlds import plain

from policies.core.engine.engine import Engine
from policies.core.engine.runlog import RequestRecord, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.models.shape import OURO_TINY
from policies.core.seam.batch import ExecutionBatch, ScheduledRange, Stage, Work
from policies.core.seam.clients import Clients
from policies.core.seam.oracle import NOBODY, Foresight
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.costs.devices import device_facts
from policies.costs.latency import HostLoop, LatencyModel, Prediction
from policies.registry import POLICIES
from sim.backend import SimBackend
from sim.cli import main
from sim.pipeline import HostSpread, Pipeline


class ConstantCost(LatencyModel):
    """Every batch takes `device_ns`, whatever is in it."""

    def __init__(
        self,
        device_ns: int,
        select_ns: int,
        host_ns: int,
        loop: HostLoop,
        launch_ns: int = 0,
        idle_ns: int = 0,
    ) -> None:
        super().__init__("constant", OURO_TINY, device_facts("cpu"), "by hand", loop)
        self._prediction = Prediction(
            (0, device_ns, 0, 0, 0, 0), 0, select_ns, host_ns - launch_ns, launch_ns, idle_ns
        )

    def predict(self, batch: ExecutionBatch) -> Prediction:
        return self._prediction


@dataclass
class AsAsked:
    """Every request produces its max_tokens, but for those named."""

    shorter: dict[int, int]

    def output_tokens(self, request_id: int) -> int:
        return self.shorter.get(request_id, 1 << 30)


@dataclass
class Simulated:
    engine: Engine
    batches_csv: str
    records: dict[int, RequestRecord]

    @property
    def spans(self) -> list[tuple[str, int, int, int, int]]:
        """(stage, formed, started, finished, collected) of every batch."""
        batches = parse_batches(self.batches_csv)
        return [
            (item.stage, item.submitted_ns, item.started_ns, item.finished_ns, item.collected_ns)
            for item in batches
        ]


def simulate(
    *requests: Request,
    policy: str = "atomic",
    inflight: int = 1,
    device_ns: int = 100,
    select_ns: int = 0,
    host_ns: int = 0,
    collect_ns: int = 0,
    launch_ns: int = 0,
    idle_ns: int = 0,
    loop: HostLoop | None = None,
    seed: int = 0,
    shorter: dict[int, int] | None = None,
) -> Simulated:
    settings = SchedulerSettings(prefill_chunk_size=4, max_num_batched_tokens=16, inflight=inflight)
    text = io.StringIO()
    scheduler = Scheduler(plain(policy), OURO_TINY, settings, CacheSettings(num_blocks=400))
    ended: list[RequestRecord] = []
    engine = Engine(scheduler, Clients(requests), RunLog(text, ended.append))
    cost = ConstantCost(
        device_ns, select_ns, host_ns, loop or HostLoop(collect_ns=collect_ns), launch_ns, idle_ns
    )
    foresight = Foresight(AsAsked(shorter or {}), None, scheduler.exits)
    SimBackend(simpy.Environment(), engine, cost, foresight, seed=seed).run()
    return Simulated(engine, text.getvalue(), by_id(ended))


def test_one_batch_in_flight_takes_selection_launch_device_and_collection_in_turn() -> None:
    run = simulate(Request(0, 0, 4, 2), select_ns=3, host_ns=7, collect_ns=5)
    assert run.spans == [
        ("PREFILL", 0, 10, 110, 115),
        ("CODA", 115, 125, 225, 230),
        ("PRELUDE", 230, 240, 340, 345),
        ("RECURRENT", 345, 355, 455, 460),
        ("CODA", 460, 470, 570, 575),
    ]
    assert list(run.records[0].token_ns) == [225, 570]


def test_two_batches_in_flight_hide_the_host_behind_the_device() -> None:
    run = simulate(Request(0, 0, 4, 2), inflight=2, select_ns=3, host_ns=7, collect_ns=5)
    assert run.spans == [
        ("PREFILL", 0, 10, 110, 115),
        ("CODA", 10, 110, 210, 215),
        ("PRELUDE", 115, 210, 310, 315),
        ("RECURRENT", 215, 310, 410, 415),
        ("CODA", 315, 410, 510, 515),
    ]
    assert list(run.records[0].token_ns) == [210, 510]


def test_a_host_slower_than_the_device_sets_the_pace_even_with_two_batches_in_flight() -> None:
    spans = simulate(Request(0, 0, 24, 1), inflight=2, device_ns=10, host_ns=100).spans
    assert [started for _, _, started, _, _ in spans] == [100, 200, 300, 400, 500, 600, 700]


@pytest.mark.parametrize(("idle_ns", "wakes"), [(999_999, False), (1_000_001, True)])
def test_a_host_with_nothing_to_do_for_a_millisecond_wakes_before_it_chooses(
    idle_ns: int, wakes: bool
) -> None:
    pipeline = Pipeline(HostLoop(wake_ns=7), HostSpread(0, 0.0))
    work = Work.of(Stage.CODA, 0, [ScheduledRange(0, Stage.CODA, 0, 0, 1)])
    pipeline.launch(0, work, Prediction((0, 0, 0, 100, 0, 0), 0, 10, 10), 0)
    pipeline.collect(pipeline.flights[0].finished_ns, NOBODY, NOBODY)
    at_ns = pipeline.free_ns + idle_ns
    pipeline.launch(1, work, Prediction((0, 0, 0, 100, 0, 0), 0, 10, 10), at_ns)
    assert pipeline.flights[0].started_ns == at_ns + 20 + 7 * wakes


WHOLE_LOOP = HostLoop(device_gap_ns=1, mark_ns=2, collect_ns=5, after_collect_ns=4, after_submit_ns=3)


def test_an_idle_device_waits_for_the_mark_and_for_the_rest_of_the_launch() -> None:
    """The first batch is packed at 10 and launched at 16; the device marks its start at 12 and needs 8 ns
    more than 100."""
    run = simulate(Request(0, 0, 4, 2), select_ns=3, host_ns=13, launch_ns=6, idle_ns=8, loop=WHOLE_LOOP)
    assert run.spans == [
        ("PREFILL", 0, 12, 120, 125),
        ("CODA", 125, 141, 249, 254),
        ("PRELUDE", 254, 270, 378, 383),
        ("RECURRENT", 383, 399, 507, 512),
        ("CODA", 512, 528, 636, 641),
    ]


def test_a_queued_batch_follows_the_one_before_it_after_the_gap_and_waits_for_no_launch() -> None:
    run = simulate(
        Request(0, 0, 4, 2), inflight=2, select_ns=3, host_ns=13, launch_ns=6, idle_ns=8, loop=WHOLE_LOOP
    )
    assert run.spans == [
        ("PREFILL", 0, 12, 120, 125),
        ("CODA", 16, 121, 221, 226),
        ("PRELUDE", 125, 222, 322, 327),
        ("RECURRENT", 226, 323, 423, 428),
        ("CODA", 327, 424, 524, 529),
    ]


def test_a_batch_whose_predecessor_ends_during_its_launch_still_waits_for_the_rest_of_it() -> None:
    """The first ends at 60. The second is packed at 53 and handed over at 83, and cannot end before 53 + 2 +
    20 + 28."""
    run = simulate(
        Request(0, 0, 8, 1),
        inflight=2,
        device_ns=20,
        select_ns=3,
        host_ns=37,
        launch_ns=30,
        idle_ns=28,
        loop=WHOLE_LOOP,
    )
    assert [span[2:4] for span in run.spans[:2]] == [(12, 60), (61, 103)]


def test_waiting_for_a_launch_is_logged_as_launch() -> None:
    rows = list(csv.DictReader(io.StringIO(simulate(Request(0, 0, 4, 1), idle_ns=8).batches_csv)))
    assert [(row["linear_ns"], row["launch_ns"]) for row in rows] == [("100", "8"), ("100", "8")]
    assert all(int(row["finished_ns"]) - int(row["started_ns"]) == 108 for row in rows)


@pytest.mark.parametrize("inflight", [1, 2, 5])
def test_the_device_runs_batches_in_the_order_of_submission_and_one_at_a_time(inflight: int) -> None:
    spans = simulate(
        *(Request(at, 37 * at, 9, 3) for at in range(5)), inflight=inflight, host_ns=11, collect_ns=2
    ).spans
    assert all(first[3] <= second[2] and first[1] < second[1] for first, second in pairwise(spans))
    assert all(finished - started == 100 for _, _, started, finished, _ in spans)


@pytest.mark.parametrize(
    ("arrival_ns", "formed_ns", "after_seq", "started_ns"),
    [(199, 199, 0, 200), (200, 200, 0, 200), (201, 201, 1, 201)],
)
def test_an_arrival_at_the_very_end_of_a_batch_comes_before_that_end(
    arrival_ns: int, formed_ns: int, after_seq: int, started_ns: int
) -> None:
    run = simulate(Request(0, 0, 4, 1), Request(1, arrival_ns, 4, 1), inflight=2)
    batch = parse_batches(run.batches_csv)[2]
    assert (batch.submitted_ns, batch.after_seq, batch.started_ns) == (formed_ns, after_seq, started_ns)


def test_an_arrival_at_the_end_of_a_batch_joins_the_next_one_when_one_is_in_flight() -> None:
    run = simulate(Request(0, 0, 8, 1), Request(1, 100, 4, 1), Request(2, 101, 4, 1))
    assert [
        sorted({item.request_id for item in batch.ranges}) for batch in parse_batches(run.batches_csv)[:3]
    ] == [
        [0],
        [0, 1],
        [0, 1],
    ]


def test_an_idle_device_waits_for_the_next_arrival() -> None:
    spans = simulate(Request(0, 0, 4, 1), Request(1, 5_000, 4, 1)).spans
    assert [formed for _, formed, _, _, _ in spans] == [0, 100, 5_000, 5_100]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("inflight", [1, 2, 5])
def test_every_token_is_delivered_at_the_end_of_the_coda_batch_that_made_it_and_times_add_up(
    policy: str, inflight: int
) -> None:
    requests = [Request(at, 130 * at, 3 + 5 * at, 1 + at % 4) for at in range(9)]
    run = simulate(
        *requests,
        policy=policy,
        inflight=inflight,
        select_ns=2,
        host_ns=9,
        collect_ns=4,
        shorter={3: 2, 7: 1},
    )
    outputs = {request.request_id: request.max_tokens for request in requests} | {3: 2, 7: 1}
    made: dict[int, list[int]] = {request_id: [] for request_id in outputs}
    for batch in parse_batches(run.batches_csv):
        for item in batch.ranges:
            if item.stage == "CODA" and len(made[item.request_id]) < outputs[item.request_id]:
                made[item.request_id].append(batch.finished_ns)
    assert {request_id: list(record.token_ns) for request_id, record in run.records.items()} == made
    for record in run.records.values():
        arrival_ns, times = record.request.arrival_ns, record.token_ns
        ttft_ns, itl_ns = times[0] - arrival_ns, [later - earlier for earlier, later in pairwise(times)]
        assert record.finished_ns is not None
        assert record.finished_ns - arrival_ns == ttft_ns + sum(itl_ns)
        assert len(itl_ns) == record.output_tokens - 1
    rules = Rules(
        4,
        8,
        16,
        4,
        inflight,
        run.engine.scheduler.rings.slots_per_ring,
        run.engine.scheduler.blocks.num_groups,
        16,
        outputs=outputs,
    )
    check_log(run.batches_csv, requests_text(run.records.values()), rules)


def test_an_empty_workload_ends_at_time_0_with_an_empty_log() -> None:
    run = simulate()
    assert run.batches_csv.count("\n") == 1
    assert (run.engine.now_ns, run.records) == (0, {})


def test_a_run_in_which_every_request_is_refused_has_failed_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        "workload: {kind: synthetic, num_requests: 3, prompt_tokens: 50, output_tokens: 4, max_context: 53}\n"
    )
    assert main(["run", str(config), "--out", str(tmp_path / "run")]) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["num_refused"], summary["num_finished"], summary["num_batches"]) == (
        "failed",
        3,
        0,
        0,
    )
    assert summary["refusal_reasons"] == {"prompt 50 + max_tokens 4 = 54 tokens, the context holds 53": 3}
    with open(tmp_path / "run" / "requests.csv", newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["refused"] * 3
    assert capsys.readouterr().err.splitlines()[-1] == (
        "sim: the run failed: no request finished, of 3; 3 refused: prompt 50 + max_tokens 4 = 54 tokens, "
        "the context holds 53"
    )
