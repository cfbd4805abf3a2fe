"""One run on a session: the shared engine over the real device, and a run directory like the simulator's."""

import csv
import gc
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.answers import ANSWERS, Answers
from executor.apart.side import Side
from executor.backend import DeviceBackend, Observer
from executor.checks.audit import AddressAudit
from executor.checks.fingerprint import Fingerprints
from executor.clientele import Clientele, WorkloadClients
from executor.errors import RunError
from executor.outputs import Outputs
from executor.progress import RunProgress
from executor.runner import Runner
from executor.session import PlannedRun, Session, tokens_sha256
from executor.source import inputs_sha256
from executor.timeline import make_timeline
from policies.assembly import assemble
from policies.config.ignored import ignored_keys
from policies.core.engine.runlog import RequestRecord
from policies.core.errors import WriteError
from policies.core.seam.oracle import Foresight
from policies.costs.limit import Roofline
from results.csvlog import Columns, read_rows
from results.files import drafted
from results.finish import write_outputs
from results.identity import RunIdentity
from results.metrics import RunStatus
from results.rundir import RunDirectory

TOKENS = "tokens.csv"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended; `error` is what stopped one that failed."""

    status: RunStatus
    error: Exception | None = None

    def as_summary(self) -> dict[str, Any]:
        """The keys that a failed run adds to its summary."""
        if self.error is None:
            return {}
        return {"error": one_line(self.error), "traceback": traceback.format_exception(self.error)}


def execute(
    session: Session,
    run: PlannedRun,
    out: Path | None,
    *,
    label: str | None = None,
    plots: bool = True,
    audit: bool = False,
    observers: tuple[Observer, ...] = (),
    fingerprints: Fingerprints | None = None,
    clients: Clientele | None = None,
    side: Side | None = None,
) -> tuple[Path, dict[str, Any], dict[int, list[int]]]:
    """Run, write the run directory, return where it is, its summary and the output token ids by request.

    Ctrl-C ends the run as `interrupted`. Anything that goes wrong ends it as `failed` and raises `RunError`:
    a kernel, a broken invariant, a wrong address under `audit`. Either way the device finishes what it was
    given, and what was collected until then is in the directory. A disk that does not take it all raises
    `WriteError`. Raises `InputError` before there is a directory when policy, model and cache do not go
    together.
    `clients` send the requests where the workload does not know them; `side` is what an engine that does one
    part of its requests says and hears.
    """
    config, workload, shape = run.config, run.workload, run.shape(session.shape)
    rule = config.rule(shape)
    identity = RunIdentity.from_config(config.resolved, "executor", shape.num_loops, label, session.card)
    config.policy.check_card(shape, session.card)
    address_audit = make_audit(session, run) if audit else None
    inputs = {"input_sha256": inputs_sha256(config, session.uses_graphs)}
    clients = clients or WorkloadClients(run, session, side)
    with RunDirectory.create(config.resolved, identity, out, clients.columns) as directory:
        for name in (TOKENS, ANSWERS):
            (directory.path / name).unlink(missing_ok=True)
        outputs = Outputs()
        clients.write_to(directory.requests.write)

        def ended(record: RequestRecord) -> None:
            outputs.ended(record)
            clients.ended(record)

        news = None if side is None else directory.handovers()
        engine = assemble(config, shape, clients.inbox, directory.batches, ended, news)
        longest = min(config.scheduler.chunk_tokens, config.scheduler.max_num_batched_tokens)
        session.warm_up(longest, config, clients.is_random)
        before = session.programs.counters()
        with (
            RunProgress(len(workload.requests), identity.directory_name) as progress,
            few_collections(),
            clients.open(timeline := make_timeline(session.device)) as is_stopped,
        ):
            runner = Runner(
                session.model,
                session.pools,
                session.programs,
                timeline,
                config.seed,
                address_audit,
                session.gate(config.exit),
                session.swap,
                clients.asking.sampling,
            )
            if fingerprints is not None:
                fingerprints.attach(runner)
                observers = (*observers, fingerprints)
            backend = DeviceBackend(
                engine,
                runner,
                timeline,
                Foresight(clients.oracle, run.exit_oracle(rule), rule, run.acceptance()),
                clients.asking,
                Roofline(session.shape, session.facts) if session.facts else None,
                (progress, *observers),
                is_stopped,
                outputs,
                clients.tell,
                side,
            )
            ending = run_to_end(backend.run, session.synchronize)
            fault = clients.fault()
            if fault is not None and ending.error is None:
                ending = Ending("failed", fault)
            at_end = session.sensors.read()
        for record in engine.log.records.values():
            outputs.ended(record)
        tokens = outputs.by_request
        answers = Answers(workload.prompts, tokens) if workload.prompts is not None else None
        summary = write_outputs(
            directory,
            engine.log,
            engine.scheduler,
            identity,
            config=config.resolved,
            objectives=config.slo,
            window=config.measure,
            status=ending.status,
            plots=plots,
            trace=plots,
            skipped_rows=workload.skipped_rows,
            notes=(
                *session.notes,
                *config.policy.notes(shape),
                *ignored_keys(config, "executor", any(request.content_ids for request in workload.requests)),
                *session.programs.notes(),
                *forced_notes(run),
                *clients.notes,
            ),
            extra={
                **inputs,
                "output_token_sha256": tokens_sha256(tokens),
                **(answers.as_summary() if answers is not None else {}),
                **session.facts_for_summary(),
                "versions": versions(),
                **{name: value - before[name] for name, value in session.programs.counters().items()},
                "swap_s": runner.swap_ns / 1e9,
                **at_end._asdict(),
                **(side.figures() if side is not None else {}),
                "padded_row_fraction": runner.padded_row_fraction(),
                "audited_rows": address_audit.rows_checked if address_audit else None,
                **ending.as_summary(),
            },
            write_more=lambda: write_more(directory.path, tokens, answers),
            broken=ending.error if isinstance(ending.error, WriteError) else None,
        )
    if ending.error is not None:
        where = (
            f"after {engine.log.totals.num_batches} batches; what had finished is in {directory.path}, "
            "marked failed"
        )
        raise RunError(f"the run failed {where}: {one_line(ending.error)}") from ending.error
    return directory.path, summary, tokens


def forced_notes(run: PlannedRun) -> Iterator[str]:
    """What a summary says of a run whose guesses are not held against the model's tokens."""
    if run.acceptance() is not None:
        yield (
            "speculation.acceptance is forced, for timing: guesses count as right whatever the model makes, "
            "so output tokens are not the model's"
        )


def make_audit(session: Session, run: PlannedRun) -> AddressAudit:
    """The audit of one run: it knows the run's chunks and the session's rings and pool."""
    config, num_loops = run.config, session.shape.num_loops
    return AddressAudit(
        num_loops,
        session.pools.kv.planes,
        config.cache.block_size,
        config.scheduler.chunk_tokens,
        config.policy.resident_chunks(num_loops),
        session.pools.ring_rows,
        session.pools.kv,
        session.gate(config.exit) is not None,
        session.pools.decode_rows,
    )


def run_to_end(run: Callable[[], None], synchronize: Callable[[], None]) -> Ending:
    """Call `run`, then wait for the device: `complete`, `interrupted` when Ctrl-C came first, or `failed`
    with the first error.

    A kernel or the driver may raise anything, at once or when the device is waited for; whatever it is, what
    had finished is kept.
    """
    ending = Ending("complete")
    try:
        run()
    except KeyboardInterrupt:
        print("interrupted: writing what was run until now", file=sys.stderr)
        ending = Ending("interrupted")
    except Exception as error:
        ending = Ending("failed", error)
    try:
        synchronize()
    except Exception as error:
        ending = Ending("failed", ending.error or error)
    return ending


@contextmanager
def few_collections() -> Iterator[None]:
    """Keep the garbage collector from walking what exists already: torch's half a million objects take it 0.1
    s in mid-run. What a caller has frozen stays so."""
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def one_line(error: BaseException) -> str:
    """`TypeOfError: first line of its message`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def write_more(path: Path, tokens: dict[int, list[int]], answers: Answers | None) -> None:
    """What only the executor leaves in a run directory."""
    write_tokens(path / TOKENS, tokens)
    if answers is not None:
        answers.write(path / ANSWERS)


def write_tokens(path: Path, tokens: dict[int, list[int]]) -> None:
    """`request_id,token_ids`: the output of every request, ids joined by spaces."""
    with drafted(path) as draft, open(draft, "w", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("request_id", "token_ids"))
        writer.writerows(
            (request_id, " ".join(map(str, tokens[request_id]))) for request_id in sorted(tokens)
        )


def read_tokens(path: Path) -> dict[int, list[int]]:
    """What `write_tokens` wrote."""
    columns = Columns(("request_id", "token_ids"), ())
    return {row.whole("request_id"): row.wholes("token_ids") for row in read_rows(path, columns)}


def versions() -> dict[str, str]:
    """Versions that measured times depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        import triton

        found.update(cuda=torch.version.cuda, triton=triton.__version__)
    return found
