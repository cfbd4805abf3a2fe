"""The end of a run, the same for both worlds: requests, trace, pictures, and the summary last."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from policies.core.engine.runlog import RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import WriteError
from policies.core.seam.policy import Policy
from results.batchlog import read_batches
from results.files import drafted
from results.identity import RunIdentity
from results.metrics import Peaks, RunStatus, summarize
from results.perfetto import MAX_BATCHES, write_trace
from results.rundir import BATCHES, PLOTS, SUMMARY, TRACE, RunDirectory


def write_outputs(
    directory: RunDirectory,
    log: RunLog,
    scheduler: Scheduler,
    identity: RunIdentity,
    *,
    config: Mapping[str, Any],
    status: RunStatus = "complete",
    plots: bool = True,
    trace: bool = True,
    trace_max_batches: int | None = MAX_BATCHES,
    skipped_rows: int = 0,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    write_more: Callable[[], None] = lambda: None,
    broken: WriteError | None = None,
) -> dict[str, Any]:
    """Finish `directory` and return the summary; its `status` is `failed` when no request finished.

    `config` is the resolved mapping that `directory` was created with. Call this once, after the engine's
    generator ended, or with `status="interrupted"` after a `KeyboardInterrupt`: a run that did not complete
    keeps its requests and batches and gets its summary at once, without trace and pictures. A sweep passes
    `plots=False, trace=False` for its cells. `write_more` writes what one world leaves beside. Everything
    else is on disk before the summary appears.

    Raises `WriteError` when the disk did not take everything, now or, as `broken`, during the run. Whatever
    can be written is, the summary says `failed` and why, and no file is there by half.
    """
    faults = [] if broken is None else [broken]

    def attempt(write: Callable[[], None]) -> None:
        try:
            write()
        except WriteError as error:
            faults.append(error)

    attempt(directory.batches.close)
    attempt(lambda: directory.requests.finish(log.records.values()))
    attempt(write_more)
    is_whole = status == "complete" and not faults
    notes = list(notes)
    if is_whole and trace:
        attempt(lambda: notes.extend(_write_trace(directory, log, scheduler, identity, trace_max_batches)))
    summary = summarize(
        directory.requests.records(),
        log.totals,
        Peaks.of(scheduler),
        replace(identity, policy_options=changed_options(scheduler.policy)),
        status=status,
        skipped_rows=skipped_rows,
        notes=notes,
        extra=extra,
    )
    if is_whole and plots and log.totals.num_batches:
        attempt(lambda: _plot(directory, config, summary))
    if not faults:
        directory.write_summary(summary)
        return summary
    try:
        directory.write_summary({"error": str(faults[0]), **summary, "status": "failed"})
    except WriteError:
        raise WriteError(
            f"{faults[0]}; {directory.path} has no {SUMMARY}, so nothing takes it for a run"
        ) from faults[0]
    raise WriteError(f"{faults[0]}; what could be written is in {directory.path}, marked failed") from faults[
        0
    ]


def _write_trace(
    directory: RunDirectory, log: RunLog, scheduler: Scheduler, identity: RunIdentity, max_batches: int | None
) -> list[str]:
    """Write the Perfetto trace; return a note when it was cut."""
    with drafted(directory.path / TRACE) as draft:
        cut = write_trace(
            draft,
            read_batches(directory.path / BATCHES),
            directory.requests.records(),
            num_loops=scheduler.num_loops,
            chunk_tokens=scheduler.settings.chunk_tokens,
            label=identity.directory_name,
            max_batches=max_batches,
        )
    return [] if cut is None else [f"{TRACE} holds the first {cut} of {log.totals.num_batches} batches"]


def _plot(directory: RunDirectory, config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    # Imported here so that a sweep's cells and a plain run start without matplotlib and pandas.
    from results.load import Run
    from results.plots import plot_run

    folder = directory.path / PLOTS
    try:
        plot_run(Run(directory.path, config, summary), folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise WriteError(f"{folder}: {error.strerror or error}") from error


def changed_options(policy: Policy) -> dict[str, Any]:
    """Options of `policy` that differ from its defaults: what tells two runs of one policy apart. wcpb as
    shipped has none."""
    options = fields(policy)  # type: ignore[arg-type]
    return {item.name: value for item in options if (value := getattr(policy, item.name)) != item.default}
