"""The end of a run, the same for both worlds: requests, trace, pictures, and the summary last."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from policies.core.policy import Policy
from policies.core.runlog import RunLog
from policies.core.scheduler import Scheduler
from results.batchlog import read_batches
from results.identity import RunIdentity
from results.metrics import Peaks, RunStatus, summarize
from results.perfetto import MAX_BATCHES, write_trace
from results.rundir import BATCHES, PLOTS, TRACE, RunDirectory


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
) -> dict[str, Any]:
    """Finish `directory` and return the summary; its `status` is `failed` when no request finished.

    `config` is the resolved mapping that `directory` was created with. Call this once, after the engine's generator ended, or with
    `status="interrupted"` after a `KeyboardInterrupt`: a run that did not complete keeps its requests and batches and gets its
    summary at once, without trace and pictures. A sweep passes `plots=False, trace=False` for its cells. Everything else is on disk
    before the summary appears.
    """
    directory.batches.close()
    directory.write_requests(log.records.values())
    is_whole = status == "complete"
    notes = list(notes)
    if is_whole and trace:
        cut = write_trace(
            directory.path / TRACE,
            read_batches(directory.path / BATCHES),
            log.records.values(),
            num_loops=scheduler.num_loops,
            chunk_tokens=scheduler.settings.chunk_tokens,
            label=identity.directory_name,
            max_batches=trace_max_batches,
        )
        if cut is not None:
            notes.append(f"{TRACE} holds the first {cut} of {log.totals.num_batches} batches")
    summary = summarize(
        log,
        Peaks.of(scheduler),
        replace(identity, policy_options=changed_options(scheduler.policy)),
        status=status,
        skipped_rows=skipped_rows,
        notes=notes,
        extra=extra,
    )
    if is_whole and plots and log.totals.num_batches:
        # Imported here so that a sweep's cells and a plain run start without matplotlib and pandas.
        from results.load import Run
        from results.plots import plot_run

        plot_run(Run(directory.path, config, summary), directory.path / PLOTS)
    directory.write_summary(summary)
    return summary


def changed_options(policy: Policy) -> dict[str, Any]:
    """Options of `policy` that differ from its defaults: what tells two runs of one policy apart. wcpb as shipped has none."""
    return {item.name: value for item in fields(policy) if (value := getattr(policy, item.name)) != item.default}  # type: ignore[arg-type]
