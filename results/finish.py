"""The end of a run, the same for both worlds: requests and summary, then what is made from them, trace and
pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

from policies.core.engine.runlog import RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import WriteError
from policies.core.seam.objectives import EVERYTHING, Objectives, Window
from policies.core.seam.policy import Policy
from policies.process.interrupt import CtrlC
from policies.process.sentences import one_line
from results.batchlog import read_batches
from results.files import drafted
from results.identity import RunIdentity
from results.limits import Offered, limits_of
from results.metrics import Peaks, RunStatus, summarize
from results.perfetto import MAX_BATCHES, write_trace
from results.rundir import BATCHES, PLOTS, SUMMARY, TRACE, RunDirectory
from results.window import Span, totals_within


def write_outputs(
    directory: RunDirectory,
    log: RunLog,
    scheduler: Scheduler,
    identity: RunIdentity,
    *,
    config: Mapping[str, Any],
    objectives: Objectives | None = None,
    window: Window = EVERYTHING,
    span: Span | None = None,
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

    `config` is the resolved mapping that `directory` was created with; `objectives` judge the run and
    `window` says which part of it counts, or `span` where that is known already. Call this once, after the
    engine's generator ended, or with `status="interrupted"` after a `KeyboardInterrupt`: a run that did not
    complete keeps its requests and batches and gets its summary at once, without trace and pictures. A sweep
    passes `plots=False, trace=False` for its cells. `write_more` writes what one world leaves beside.

    Ctrl-C waits until the summary is there. Trace and pictures come after it and are extras: one that cannot
    be made, whatever the reason, is a note in the summary, and the run is as complete as it was. Raises
    `WriteError` when the disk did not take the rest, now or, as `broken`, during the run: whatever can be
    written is, the summary says `failed` and why, and no file is there by half.
    """
    faults = [] if broken is None else [broken]

    def attempt(write: Callable[[], None]) -> None:
        try:
            write()
        except WriteError as error:
            faults.append(error)

    with CtrlC() as ctrl_c:
        attempt(directory.batches.close)
        attempt(lambda: directory.requests.finish(log.records.values()))
        attempt(write_more)
        offered, span = Offered(), span or Span.of(directory.requests.records(), window)
        measured = log.totals
        if not span.is_whole and not faults:
            measured = totals_within(read_batches(directory.path / BATCHES), span)
        summary = summarize(
            offered.of(directory.requests.records(), span),
            log.totals,
            Peaks.of(scheduler),
            replace(identity, policy_options=changed_options(scheduler.policy)),
            status=status,
            objectives=objectives,
            span=span,
            measured=measured,
            skipped_rows=skipped_rows,
            notes=notes,
        )
        extra = extra or {}
        if faults:
            finish_failed(directory, {**summary, **extra}, faults[0])
        summary |= {**limits_of(summary, offered, log.totals), **extra}
        directory.write_summary(summary)
    if ctrl_c.is_pressed:
        raise KeyboardInterrupt
    found: list[str] = []
    if status == "complete" and trace:
        found += _write_trace(directory, log, scheduler, identity, trace_max_batches)
    if status == "complete" and plots and log.totals.num_batches:
        found += _plot(directory, config, summary)
    if found:
        summary["notes"] += found
        directory.write_summary(summary)
    return summary


def finish_failed(directory: RunDirectory, summary: Mapping[str, Any], fault: WriteError) -> NoReturn:
    """Write the summary of a run whose disk was full, and raise what says so."""
    try:
        directory.write_summary({"error": str(fault), **summary, "status": "failed"})
    except WriteError:
        raise WriteError(
            f"{fault}; {directory.path} has no {SUMMARY}, so nothing takes it for a run"
        ) from fault
    raise WriteError(f"{fault}; what could be written is in {directory.path}, marked failed") from fault


def _write_trace(
    directory: RunDirectory, log: RunLog, scheduler: Scheduler, identity: RunIdentity, max_batches: int | None
) -> list[str]:
    """Write the Perfetto trace; return a note when it was cut, or could not be written, whatever the
    reason."""
    try:
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
    except Exception as error:
        reason = str(error).replace(f"{directory.path}/", "") or type(error).__name__
        return [one_line(f"{TRACE} could not be written: {reason}")]
    return [] if cut is None else [f"{TRACE} holds the first {cut} of {log.totals.num_batches} batches"]


def _plot(directory: RunDirectory, config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Draw the run's pictures; return a note for each that could not be drawn."""
    # Imported here so that a sweep's cells and a plain run start without matplotlib and pandas.
    try:
        from results.load import Run
        from results.plots import draw_pictures, pictures_of_run
    except Exception as error:  # a matplotlib that is not whole, or was told what it does not know
        return [one_line(f"{PLOTS} could not be drawn: {error}")]

    pictures = pictures_of_run(Run(directory.path, config, summary))
    return draw_pictures(pictures, directory.path / PLOTS)[1]


def changed_options(policy: Policy) -> dict[str, Any]:
    """Options of `policy` that differ from its defaults: what tells two runs of one policy apart. wcpb as
    shipped has none."""
    options = fields(policy)  # type: ignore[arg-type]
    return {item.name: value for item in options if (value := getattr(policy, item.name)) != item.default}
