"""What a fleet leaves: a run directory for every engine, and above them one for the whole, whose figures are
over all requests and all devices.

A fleet's `gpu_busy_fraction` and its waits are means over its devices, its idle times, peaks and counts sums.
`fleet.imbalance` holds the most that one replica had over the mean of all: 1 is even, 4 of 4 replicas is all
on one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import add
from typing import Any, Protocol

from policies.core.engine.runlog import BatchTotals, RequestRecord, RunLog, StageTotals
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import WriteError
from policies.core.seam.objectives import Objectives, Window
from policies.core.seam.request import Role
from results.batchlog import read_batches
from results.finish import changed_options, finish_failed, write_outputs
from results.identity import RunIdentity
from results.limits import Offered, limits_of
from results.metrics import LATENCIES, Peaks, RunStatus, ratio, summarize
from results.rundir import BATCHES, PLOTS, RunDirectory
from results.window import Span, run_s, totals_within

OWN_FIGURES = (
    "device", "num_requests", "num_finished", "num_cancelled", "num_refused", "prompt_tokens",
    "output_tokens", "request_throughput", "output_token_throughput", "gpu_busy_fraction", "peak_kv_blocks",
    "prefix_hit_rate", "preemptions", "limited_by",
)  # fmt: skip
"""Of each replica's summary, what the whole one repeats beside p50 and p99 of its latencies."""


class FleetConfig(Protocol):
    """What is needed of a fleet's checked config."""

    @property
    def resolved(self) -> Mapping[str, Any]: ...
    @property
    def slo(self) -> Objectives | None: ...
    @property
    def measure(self) -> Window: ...


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine's directory, identity, resolved config and notes."""

    directory: RunDirectory
    identity: RunIdentity
    config: Mapping[str, Any]
    notes: tuple[str, ...]


def write_fleet(
    whole: RunDirectory,
    replicas: Sequence[Replica],
    engines: Sequence[tuple[RunLog, Scheduler]],
    identity: RunIdentity,
    places: Sequence[tuple[int, ...]],
    of_whole: Callable[[Role, RequestRecord], RequestRecord | None],
    transfers: Callable[[float], dict[str, Any]] | None,
    *,
    config: FleetConfig,
    status: RunStatus,
    plots: bool,
    skipped_rows: int = 0,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    broken: WriteError | None = None,
) -> dict[str, Any]:
    """Finish every replica's directory and then `whole`; return the summary of the whole.

    `places` says which engines each request went to, in order of arrival; `of_whole` makes the record of the
    whole of that of an engine with a role, None of one that does not end it; `transfers` has the figures of a
    run of so many nanoseconds, where engines send each other something. What `results.finish.write_outputs`
    says of Ctrl-C and full disks is true here too.
    """
    faults = [] if broken is None else [broken]

    def attempt(write: Callable[[], object]) -> None:
        try:
            write()
        except WriteError as error:
            faults.append(error)

    attempt(whole.batches.close)
    (whole.path / BATCHES).unlink(missing_ok=True)
    left = [
        of_whole(scheduler.handover.role, record)
        for log, scheduler in engines
        for record in log.records.values()
    ]
    attempt(lambda: whole.requests.finish([record for record in left if record is not None]))
    span, own = Span.of(whole.requests.records(), config.measure), list[dict[str, Any]]()
    for at, (replica, (log, scheduler)) in enumerate(zip(replicas, engines, strict=True)):
        finish = partial(
            write_outputs,
            replica.directory,
            log,
            scheduler,
            replica.identity,
            config=replica.config,
            objectives=config.slo,
            span=replace(span, skip_requests=_count(places[: span.skip_requests], at)),
            status=status,
            plots=False,
            trace=False,
            notes=replica.notes,
        )
        attempt(lambda finish=finish: own.append(finish()))  # type: ignore[misc]
    logs = [log.totals for log, _ in engines]
    totals = measured = merged(logs)
    if not span.is_whole and not faults:
        paths = [replica.directory.path / BATCHES for replica in replicas]
        measured = merged([totals_within(read_batches(path), span) for path in paths])
    offered, schedulers = Offered(), [scheduler for _, scheduler in engines]
    summary = summarize(
        offered.of(whole.requests.records(), span),
        totals,
        Peaks.of(*schedulers),
        replace(identity, policy_options=changed_options(schedulers[0].policy)),
        status=status,
        objectives=config.slo,
        span=span,
        measured=measured,
        num_devices=len(replicas),
        skipped_rows=skipped_rows,
        notes=notes,
    )
    roles = [scheduler.handover.role for scheduler in schedulers]
    account = fleet_account(config.resolved["fleet"], roles, own, logs, places)
    if transfers is not None:
        account |= transfers(1e9 * run_s(summary))
    extra = {**(extra or {}), "fleet": account}
    if faults:
        finish_failed(whole, {**summary, **extra}, faults[0])
    summary |= {**limits_of(summary, offered, totals, len(replicas)), **extra}
    whole.write_summary(summary)
    found = _plot(whole, config.resolved, summary) if status == "complete" and plots else []
    if found:
        summary["notes"] += found
        whole.write_summary(summary)
    return summary


def fleet_account(
    fleet: Mapping[str, Any],
    roles: Sequence[Role],
    own: Sequence[Mapping[str, Any]],
    logs: Sequence[BatchTotals],
    places: Sequence[tuple[int, ...]],
) -> dict[str, Any]:
    """The summary's `fleet`: who routed, how even it was, and the figures of each replica."""
    sent = [_count(places, at) for at in range(len(logs))]
    figures = [
        {
            "role": role,
            "num_sent": item.get("num_sent", 0),
            **{key: item[key] for key in OWN_FIGURES},
            **{name: {key: item[name][key] for key in ("p50", "p99")} for name in LATENCIES},
        }
        for role, item in zip(roles, own, strict=False)  # a full disk may have kept some from being written
    ]
    uneven = {}
    for role in dict.fromkeys(roles):
        members = [at for at, other in enumerate(roles) if other == role]
        uneven[role] = {
            "requests": imbalance([sent[at] for at in members]),
            "output_tokens": imbalance([own[at]["output_tokens"] for at in members if at < len(own)]),
            "device_s": imbalance([logs[at].device_ns for at in members]),
        }
    return {
        "replicas": len(logs),
        "router": fleet["router"]["name"],
        "router_options": {key: value for key, value in fleet["router"].items() if key != "name"},
        "imbalance": uneven.get("whole", uneven),
        "by_replica": figures,
    }


def _count(places: Sequence[tuple[int, ...]], at: int) -> int:
    """How many requests went to engine `at`."""
    return sum([at in place for place in places])


def imbalance(amounts: Sequence[int]) -> float | None:
    """The largest of `amounts` over their mean; None where there is nothing."""
    return ratio(max(amounts, default=0) * len(amounts), sum(amounts))


def merged(parts: Iterable[BatchTotals]) -> BatchTotals:
    """Sums over the batches of all engines; from the first start on any device to the last end."""
    whole = BatchTotals()
    for part in parts:
        for item in fields(BatchTotals):
            if item.name not in ("by_stage", "first_started_ns", "last_finished_ns"):
                setattr(whole, item.name, getattr(whole, item.name) + getattr(part, item.name))
        starts = [at for at in (whole.first_started_ns, part.first_started_ns) if at is not None]
        whole.first_started_ns = min(starts, default=None)
        whole.last_finished_ns = max(whole.last_finished_ns, part.last_finished_ns)
        for stage, own in part.by_stage.items():
            total = whole.by_stage.setdefault(stage, StageTotals())
            for name in ("num_batches", "device_ns", "limit_ns", "host_ns"):
                setattr(total, name, getattr(total, name) + getattr(own, name))
            total.components_ns = list(map(add, total.components_ns, own.components_ns))
    return whole


def replica_rows(summary: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a table: the whole fleet, then each replica's summary, called after its number."""
    names = [f"{summary['workload']} · replica {at}" for at in range(len(own))]
    return [dict(summary), *[{**item, "workload": name} for name, item in zip(names, own, strict=True)]]


def _plot(directory: RunDirectory, config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """Draw the fleet's pictures; return a note for each that could not be drawn."""
    from results.load import Run
    from results.plots import draw_pictures
    from results.plots.gallery import pictures_of_fleet

    return draw_pictures(pictures_of_fleet(Run(directory.path, config, summary)), directory.path / PLOTS)[1]
