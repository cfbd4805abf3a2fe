"""One run on a session: the shared engine over the real device, and a run directory like the simulator's."""

import csv
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from executor.audit import AddressAudit
from executor.backend import DeviceBackend, Observer
from executor.fingerprint import Fingerprints
from executor.progress import RunProgress
from executor.prompts import prompt_ids
from executor.runner import Runner
from executor.session import PlannedRun, Session, tokens_sha256
from executor.timeline import make_timeline
from policies.core.arrivals import Arrivals
from policies.core.engine import Engine
from policies.core.limit import Roofline
from policies.core.runlog import RunLog
from policies.core.scheduler import Scheduler
from results.finish import write_outputs
from results.identity import RunIdentity
from results.metrics import RunStatus
from results.rundir import RunDirectory

TOKENS = "tokens.csv"


def execute(
    session: Session,
    run: PlannedRun,
    out: Path | None,
    *,
    plots: bool = True,
    audit: bool = False,
    observers: tuple[Observer, ...] = (),
    fingerprints: Fingerprints | None = None,
) -> tuple[Path, dict[str, Any], dict[int, list[int]]]:
    """Run, write the run directory, return where it is, its summary and the output token ids by request.

    Ctrl-C ends the run as `interrupted` after the device has finished what it was given. Raises what the engine raises when an
    invariant breaks and `AuditError` when `audit` finds a wrong address.
    """
    config, workload, shape = run.config, run.workload, session.model.shape
    identity = RunIdentity.from_config(config.resolved, "executor", shape.num_loops, device=session.card)
    address_audit = (
        AddressAudit(
            shape.num_loops,
            config.cache.block_size,
            config.scheduler.chunk_tokens,
            config.policy.resident_chunks(shape.num_loops),
            session.pools.ring_rows,
        )
        if audit
        else None
    )
    with RunDirectory.create(config.resolved, identity, out) as directory:
        scheduler = Scheduler(config.policy, run.shape(shape), config.scheduler, config.cache)
        log = RunLog(directory.batches)
        engine = Engine(scheduler, Arrivals(workload.requests, workload.concurrency), log)
        session.warm_up(min(config.scheduler.chunk_tokens, config.scheduler.max_num_batched_tokens))
        before = session.programs.counters()
        timeline = make_timeline(session.device)
        runner = Runner(session.model, session.pools, session.programs, timeline, config.seed, address_audit)
        if fingerprints is not None:
            fingerprints.attach(runner)
            observers = (*observers, fingerprints)
        with RunProgress(len(workload.requests), identity.directory_name) as progress:
            backend = DeviceBackend(
                engine,
                runner,
                timeline,
                workload.oracle,
                lambda request_id, count: prompt_ids(config.seed, request_id, count, shape.vocab_size),
                Roofline(shape, session.facts),
                (progress, *observers),
            )
            status = run_to_end(backend)
        session.synchronize()
        write_tokens(directory.path / TOKENS, backend.tokens)
        counters = {name: value - before[name] for name, value in session.programs.counters().items()}
        summary = write_outputs(
            directory,
            log,
            scheduler,
            identity,
            config=config.resolved,
            status=status,
            plots=plots,
            trace=plots,
            skipped_rows=workload.skipped_rows,
            notes=(*session.notes, *workload.notes),
            extra={
                "output_token_sha256": tokens_sha256(backend.tokens),
                "card": session.card,
                "limit_ceilings": session.facts.source,
                "versions": versions(),
                "dtype": str(session.dtype).removeprefix("torch."),
                "cuda_graphs": session.uses_graphs,
                **counters,
                "padded_row_fraction": runner.padded_row_fraction(),
                "audited_rows": address_audit.rows_checked if address_audit else None,
            },
        )
    return directory.path, summary, backend.tokens


def run_to_end(backend: DeviceBackend) -> RunStatus:
    """`complete`, or `interrupted` when Ctrl-C came first."""
    try:
        backend.run()
    except KeyboardInterrupt:
        print("interrupted: writing what was run until now", file=sys.stderr)
        return "interrupted"
    return "complete"


def write_tokens(path: Path, tokens: dict[int, list[int]]) -> None:
    """`request_id,token_ids`: the output of every request, ids joined by spaces."""
    with open(path, "w", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("request_id", "token_ids"))
        writer.writerows((request_id, " ".join(map(str, tokens[request_id]))) for request_id in sorted(tokens))


def versions() -> dict[str, str]:
    """Versions that measured times depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        import triton

        found.update(cuda=torch.version.cuda, triton=triton.__version__)
    return found
