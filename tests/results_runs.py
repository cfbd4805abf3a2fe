"""Runs for the tests of `results`: hand-made logs, and small real ones driven by the toy world into run
directories."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toy_backend import World, drive

from policies.core.engine.engine import Engine
from policies.core.engine.runlog import RequestRecord, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.models.shape import OURO_TINY
from policies.core.seam.batch import ExecutionBatch, ScheduledRange, Stage, Work
from policies.core.seam.clients import Clients
from policies.core.seam.events import Completion
from policies.core.seam.request import Request, Status
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from results.finish import write_outputs
from results.identity import RunIdentity
from results.load import Run, load_run
from results.rundir import RunDirectory

REQUESTS = (Request(0, 0, 20, 3), Request(1, 2_000_000, 9, 4), Request(2, 3_000_000, 33, 1))


def config_of(
    policy: str = "wcpb", chunk: int = 4, workload: str = "toy", **options: object
) -> dict[str, Any]:
    return {
        "model": "ouro-tiny",
        "device": "h200",
        "policy": {"name": policy, **options},
        "scheduler": {"prefill_chunk_size": chunk, "max_num_batched_tokens": 64},
        "workload": {"kind": "synthetic", "name": workload},
        "seed": 0,
    }


def identity_of(config: Mapping[str, Any] | None = None) -> RunIdentity:
    return RunIdentity.from_config(config or config_of(), "sim", OURO_TINY.num_loops)


def duration_ns(batch: ExecutionBatch) -> int:
    """A millisecond and a thousandth of it per row, for each loop; a tenth without one."""
    return max(batch.loop_count, 1) * (1_000_000 + 1_001 * batch.rows) if batch.loop_count else 100_000


def write_run(
    out: Path,
    policy: str = "wcpb",
    chunk: int = 4,
    requests: Iterable[Request] = REQUESTS,
    workload: str = "toy",
    options: Mapping[str, Any] | None = None,
    **finish: Any,
) -> Run:
    """Drive a real engine to its end and write a whole run directory to `out`."""
    config = config_of(policy, chunk, workload, **(options or {}))
    identity = identity_of(config)
    settings = SchedulerSettings(prefill_chunk_size=chunk, max_num_batched_tokens=64)
    scheduler = Scheduler(
        POLICIES[policy](**(options or {})), OURO_TINY, settings, CacheSettings(num_blocks=400)
    )
    with RunDirectory.create(config, identity, out) as directory:
        log = RunLog(directory.batches, directory.requests.write)
        drive(Engine(scheduler, Clients(requests), log), World(duration_ns))
        write_outputs(directory, log, scheduler, identity, config=config, **({"plots": False} | finish))
    return load_run(out)


def records_with_tokens(
    tokens_ns: Mapping[int, tuple[int, ...]], arrivals_ns: Mapping[int, int] | None = None
) -> dict[int, RequestRecord]:
    """Records of finished requests whose tokens were delivered at the given times; prompts have 10 tokens."""
    records = {}
    for request_id, times in tokens_ns.items():
        request = Request(request_id, (arrivals_ns or {}).get(request_id, 0), 10, max(len(times), 1))
        record = records[request_id] = RequestRecord(
            request, len(records), first_scheduled_ns=request.arrival_ns
        )
        record.token_ns.extend(times)
        if times:
            record.status = Status.FINISHED
            record.finished_ns = times[-1]
    return records


def complete_batch(
    log: RunLog, seq: int, loops: int, rows: int, started_ns: int, finished_ns: int, **timing: int
) -> None:
    """Log one prompt batch of `rows` rows."""
    ranges = (ScheduledRange(0, Stage.PREFILL, 0, seq * rows, rows),)
    batch = ExecutionBatch(seq, Work.of(Stage.PREFILL, loops, ranges), started_ns, seq - 1)
    log.completed(batch, Completion(seq, finished_ns, started_ns, finished_ns, **timing))  # type: ignore[arg-type]
