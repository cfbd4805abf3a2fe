"""What limited a run is counted from its log: by hand in small worlds, and against a slow count in random
ones."""

import random
from pathlib import Path

import pytest
from results_runs import config_of, duration_ns, identity_of, write_run
from toy_backend import World, drive
from worlds import plain

from policies.core.engine.engine import Engine
from policies.core.engine.runlog import BatchTotals, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.models.shape import OURO_TINY
from policies.core.seam.clients import Clients
from policies.core.seam.request import Request, Status
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from results.finish import write_outputs
from results.limits import Offered, limits_of
from results.load import Run, load_run
from results.requestlog import read_requests
from results.rundir import RunDirectory


def world(
    out: Path, requests: list[Request], places: int, blocks: int, policy: str = "wcpb", inflight: int = 1
) -> Run:
    settings = SchedulerSettings(
        prefill_chunk_size=4, max_num_batched_tokens=64, max_num_seqs=places, inflight=inflight
    )
    config, identity = config_of(policy), identity_of()
    scheduler = Scheduler(plain(policy), OURO_TINY, settings, CacheSettings(num_blocks=blocks))
    with RunDirectory.create(config, identity, out) as directory:
        log = RunLog(directory.batches, directory.requests.write)
        drive(Engine(scheduler, Clients(requests), log), World(duration_ns))
        write_outputs(directory, log, scheduler, identity, config=config, plots=False, trace=False)
    return load_run(out)


def burst(count: int) -> list[Request]:
    return [Request(at, 0, 16, 3) for at in range(count)]


def test_with_places_and_blocks_for_all_nobody_waits_and_the_device_is_the_limit(tmp_path: Path) -> None:
    summary = world(tmp_path / "run", burst(4), 4, 400).summary
    assert (summary["waited_for_places_s"], summary["waited_for_kv_s"]) == (0, 0)
    assert summary["limited_by"] == "device" and summary["offered_request_rate"] is None


def test_one_place_short_the_last_waits_until_the_first_of_the_others_ends(tmp_path: Path) -> None:
    run = world(tmp_path / "run", burst(4), 3, 400)
    first_end_ns = min(item.record.finished_ns or 0 for item in read_requests(run.path / "requests.csv"))
    assert run.summary["waited_for_places_s"] == first_end_ns / 1e9 > 0
    assert run.summary["waited_for_kv_s"] == 0 and run.summary["limited_by"] == "places"


def test_one_request_short_of_blocks_it_is_the_kv_pool_that_is_waited_for(tmp_path: Path) -> None:
    """A request of 18 positions needs two blocks of 16 in each of four planes."""
    run = world(tmp_path / "run", burst(4), 4, 3 * 8)
    first_end_ns = min(item.record.finished_ns or 0 for item in read_requests(run.path / "requests.csv"))
    assert run.summary["waited_for_kv_s"] == first_end_ns / 1e9 > 0
    assert run.summary["waited_for_places_s"] == 0 and run.summary["limited_by"] == "kv"


def test_the_offered_rate_is_that_of_the_gaps_and_idle_time_is_for_want_of_arrivals(tmp_path: Path) -> None:
    requests = [Request(at, 500_000_000 * at, 16, 3) for at in range(5)]
    summary = world(tmp_path / "run", requests, 4, 400).summary
    assert summary["offered_request_rate"] == 2.0 and summary["limited_by"] == "arrivals"


def slow_count(run: Run, places: int) -> tuple[int, int]:
    """The same, from scratch at every batch."""
    batches = list(run.batches())
    items = [item.record for item in read_requests(run.path / "requests.csv")]
    waited = {"places": 0, "kv": 0}
    for at, batch in enumerate(batches[:-1]):
        horizon = batches[batch.after_seq].finished_ns if batch.after_seq >= 0 else -1
        let_in = {
            int(item.split(":")[0]) for one in batches[: at + 1] for item in one.fields["allocated"].split()
        }
        touched = {
            item.request_id for one in batches[batch.after_seq + 1 : at] for item in one.ranges()
        }  # by batches that are in flight: their places come free with them
        over = {
            item.request.request_id
            for item in items
            if item.status is Status.REFUSED or (item.finished_ns is not None and item.finished_ns <= horizon)
        }
        come = {item.request.request_id for item in items if item.request.arrival_ns <= batch.submitted_ns}
        if come - over - let_in:
            reason = "places" if len(let_in - (over - touched)) >= places else "kv"
            waited[reason] += batches[at + 1].submitted_ns - batch.submitted_ns
    return waited["places"], waited["kv"]


@pytest.mark.parametrize("seed", range(24))
def test_the_count_is_that_of_a_slow_one_in_random_worlds(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    places = draw.randint(1, 5)
    arrivals = sorted(draw.randrange(0, 80_000_000, 500_000) for _ in range(draw.randint(1, 14)))
    requests = [
        Request(at, ns, draw.choice([4, 16, 40, 70, 2000]), draw.randint(1, 9))
        for at, ns in enumerate(arrivals)
    ]
    policy, inflight = draw.choice(list(POLICIES)), draw.choice([1, 2, 4])
    run = world(tmp_path / "run", requests, places, draw.choice([24, 40, 400]), policy, inflight)
    places_ns, kv_ns = slow_count(run, places)
    assert run.summary["waited_for_places_s"] == places_ns / 1e9
    assert run.summary["waited_for_kv_s"] == kv_ns / 1e9


@pytest.mark.parametrize(
    ("places_s", "kv_s", "busy", "host_s", "limit"),
    [
        (1.0, 0.9, 1.0, 0.0, "places"),
        (0.5, 2.0, 1.0, 0.0, "kv"),
        (0.5, 0.6, 0.95, 0.0, "device"),
        (0.5, 0.6, 0.94, 0.6, "host"),
        (0.5, 0.6, 0.94, 0.5, "arrivals"),
    ],
)
def test_the_longer_wait_counts_when_it_is_a_tenth_of_the_time(
    places_s: float, kv_s: float, busy: float, host_s: float, limit: str
) -> None:
    summary = {
        "duration_s": 10.0, "num_batches": 5, "gpu_busy_fraction": busy, "device_idle_s": 1.0,
        "device_idle_host_s": host_s, "device_idle_launch_s": 0.0,
    }  # fmt: skip
    totals = BatchTotals(waited_for_places_ns=round(places_s * 1e9), waited_for_kv_ns=round(kv_s * 1e9))
    assert limits_of(summary, Offered(), totals)["limited_by"] == limit
    assert limits_of({**summary, "num_batches": 0}, Offered(), totals)["limited_by"] is None


def test_a_summary_from_before_this_was_counted_is_shown_without_it(tmp_path: Path) -> None:
    import io

    from results.table import print_table

    run = write_run(tmp_path / "run", trace=False)
    old = {
        key: value
        for key, value in run.summary.items()
        if key not in ("limited_by", "offered_request_rate", "waited_for_places_s", "queue_ms")
    }
    file = io.StringIO()
    print_table([old], file)
    assert "wcpb" in file.getvalue()
