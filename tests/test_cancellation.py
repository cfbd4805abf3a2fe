"""Clients that hang up: what they were given counts, what they held returns when the device is done with
it."""

from pathlib import Path

import pytest
from toy_backend import World, run
from worlds import spelled

from policies.atomic import Atomic
from policies.config.runconfig import parse_config
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import InputError
from policies.core.models.shape import OURO_TINY
from policies.core.seam.events import Completion
from policies.core.seam.request import Request, Status
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from results.identity import RunIdentity
from results.metrics import Peaks, summarize
from sim.replay import replay
from sim.run import simulate
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

ONE = SchedulerSettings(max_num_seqs=1, inflight=1)


def test_a_request_that_waits_when_its_client_hangs_up_never_runs() -> None:
    requests = [Request(0, 0, 16, 4), Request(1, 10, 16, 4)]
    result = run(Atomic(), requests, ONE, patience_ns={1: 1500})
    record = result.records[1]
    assert (record.status, record.finished_ns, record.first_scheduled_ns) == (Status.CANCELLED, 1510, None)
    assert {item.request_id for batch in result.batches for item in batch.ranges} == {0}


def test_what_a_running_request_holds_returns_when_its_last_submitted_batch_is_collected() -> None:
    scheduler = Scheduler(
        Atomic(),
        OURO_TINY,
        SchedulerSettings(inflight=2, prefill_chunk_size=16),
        CacheSettings(num_blocks=400),
    )
    scheduler.enqueue(Request(7, 0, 40, 4))
    first = scheduler.form_batch(0)
    second = scheduler.form_batch(0)
    assert first is not None and second is not None
    held = scheduler.blocks.used_blocks
    scheduler.cancel(7)
    assert scheduler.form_batch(5) is None
    scheduler.collect(Completion(0, 10, 0, 10))
    assert scheduler.blocks.used_blocks == held > 0
    scheduler.collect(Completion(1, 20, 10, 20))
    assert scheduler.surplus_rows == first.rows + second.rows
    scheduler.check_drained()


def test_an_idle_request_returns_what_it_holds_at_once() -> None:
    scheduler = Scheduler(Atomic(), OURO_TINY, SchedulerSettings(), CacheSettings(num_blocks=400))
    scheduler.enqueue(Request(7, 0, 40, 4))
    assert scheduler.form_batch(0) is not None
    scheduler.collect(Completion(0, 10, 0, 10))
    scheduler.cancel(7)
    scheduler.check_drained()


@pytest.mark.parametrize(
    ("patience_ns", "tokens", "status"),
    [(1999, 0, "cancelled"), (2001, 1, "cancelled"), (8001, 3, "finished")],
)
def test_a_token_counts_when_the_engine_learnt_of_it_before_the_client_hung_up(
    patience_ns: int, tokens: int, status: str
) -> None:
    """One prompt batch and then CODA, PRELUDE, RECURRENT in turn, 1000 ns each: tokens at 2000, 5000 and 8000
    ns."""
    result = run(Atomic(), [Request(0, 0, 16, 3)], ONE, patience_ns={0: patience_ns})
    record = result.records[0]
    assert (record.output_tokens, record.status) == (tokens, status)
    assert record.finished_ns == (patience_ns if status == "cancelled" else 8000)


def test_a_token_that_is_collected_after_the_hang_up_is_surplus_and_never_delivered() -> None:
    result = run(
        Atomic(), [Request(0, 0, 16, 3)], ONE, world=World(collect_delay_ns=50), patience_ns={0: 2060}
    )
    assert result.records[0].output_tokens == 0
    assert result.engine.scheduler.surplus_rows == 1


def test_under_a_closed_loop_the_next_client_comes_when_the_last_one_hangs_up() -> None:
    result = run(
        Atomic(), [Request(0, 0, 16, 3), Request(1, 0, 16, 1)], ONE, concurrency=1, patience_ns={0: 1234}
    )
    assert result.records[1].request.arrival_ns == 1234


def test_cancelled_requests_count_for_what_they_got_and_not_among_the_finished() -> None:
    result = run(Atomic(), [Request(0, 0, 16, 3), Request(1, 0, 16, 3)], patience_ns={0: 2001})
    identity = RunIdentity("sim", "m", "d", "atomic", "w", 16, 4, "0")
    summary = summarize(
        result.records.values(), result.engine.log.totals, Peaks.of(result.engine.scheduler), identity
    )
    assert (summary["num_finished"], summary["num_cancelled"], summary["output_tokens"]) == (1, 1, 3)
    assert summary["ttft_ms"]["mean"] == summary["ttft_ms"]["max"] == 0.002
    assert summary["e2e_ms"]["p50"] == result.records[1].token_ns[-1] / 1e6


def workload(folder: Path, text: str, **keys: object) -> Workload:
    (folder / "t.csv").write_text(text)
    return load_workload(parse_workload({"kind": "trace", "path": "t.csv", **keys}, "test"), 0, folder)


def test_recorded_hang_ups_are_rebased_and_scaled_like_arrivals(tmp_path: Path) -> None:
    text = "arrival_ms,prompt_tokens,output_tokens,cancel_ns\n5,8,9,\n6,8,9,7500000\n7,8,9,7000000\n"
    assert workload(tmp_path, text).patience_ns == {1: 1_500_000, 2: 0}
    assert workload(tmp_path, text, time_scale=2.0).patience_ns == {1: 3_000_000, 2: 0}
    assert workload(tmp_path, text, patience_ms=[1, 4]).patience_ns == {
        0: 1_000_000,
        1: 4_000_000,
        2: 1_000_000,
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "arrival_ms,prompt_tokens,output_tokens,cancel_ns\n5,8,9,4999999\n",
            "'4999999', expected nothing or at least the arrival",
        ),
        (
            "arrival_ms,prompt_tokens,output_tokens,cancel_ns\n5,8,9,soon\n",
            "'soon', expected a number of nanoseconds",
        ),
        (
            "prompt_tokens,output_tokens,cancel_ns\n8,9,7\n",
            "'7', expected nothing in a file without arrival times",
        ),
    ],
)
def test_a_hang_up_that_cannot_be_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=f"line 2: cancel_ns: {complaint}"):
        workload(tmp_path, text, arrival={"process": "burst"})


def test_patience_is_drawn_from_a_stream_of_its_own() -> None:
    keys = {
        "kind": "synthetic",
        "num_requests": 50,
        "prompt_tokens": {"distribution": "uniform", "min": 1, "max": 90},
        "output_tokens": 3,
    }
    drawn = {"distribution": "lognormal", "median": 800, "sigma": 0.5}
    calm, hasty = (
        load_workload(parse_workload(item, "test"), 3) for item in (keys, {**keys, "patience_ms": drawn})
    )
    assert calm.patience_ns is None and calm.requests == hasty.requests
    assert hasty.patience_ns is not None and len(set(hasty.patience_ns.values())) > 40


@pytest.mark.parametrize(
    "arrival", [{"process": "poisson", "rate": 400}, {"process": "closed", "concurrency": 4}]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_with_hang_ups_in_every_state_is_replayed_exactly(
    tmp_path: Path, policy: str, arrival: dict[str, object]
) -> None:
    raw = {
        "model": "ouro-1.4b", "policy": spelled(policy), "scheduler": {"max_num_seqs": 3,
        "max_num_batched_tokens": 64},
        "workload": {"kind": "synthetic", "num_requests": 60, "prompt_tokens": [37, 200, 5, 400],
        "output_tokens": [9, 1, 30],
                     "arrival": arrival, "patience_ms": [1000, 20, 100, 55, 140, 2000, 1]},
    }  # fmt: skip
    path, summary = simulate(parse_config(raw, tmp_path, "test"), tmp_path / "run", plots=True)
    assert summary["num_cancelled"] > 10 and summary["num_finished"] > 10
    assert summary["num_cancelled"] + summary["num_finished"] == 60
    outcome = replay(path)
    assert outcome.difference is None, str(outcome)
