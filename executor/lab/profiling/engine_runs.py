"""Host times as a run has them: short real runs of the engine on the device, and what their batch logs say.

Choosing, packing and launching a batch is timed by the backend for every run; here its medians are kept by
stage, loops and number of ranges, together with the gaps around batches that decide when the device idles.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from executor.asking import AsConfigured
from executor.backend import DeviceBackend
from executor.lab.profiling.cases import Case, Scale
from executor.lab.profiling.measure import median, percentile, spread
from executor.lab.profiling.serving import INFLIGHT, mix
from executor.programs import Programs
from executor.run import few_collections
from executor.runner import Launched, Runner
from executor.session import PlannedRun, Session
from executor.timeline import Timeline, make_timeline
from policies.assembly import assemble
from policies.config.runconfig import RunConfig
from policies.core.seam.batch import ExecutionBatch, Stage
from policies.core.seam.oracle import Foresight
from policies.costs.latency import SLEPT_NS
from results.profile import GAPS, ProfileRow

LEAST_BATCHES = 3
"""Fewer batches with the same stage, loops and number of ranges make no line."""


def run_mixes(model: str, seed: int, scale: Scale) -> list[tuple[str, RunConfig]]:
    """The runs, by name: all policies, small and large chunks, few and many requests at once, few and more
    batches in flight."""
    small, large = scale.chunks[len(scale.chunks) // 4], scale.chunks[-2]
    chosen = (
        ("atomic", "serving", large, 12, INFLIGHT),
        ("split", "serving", small, 10, INFLIGHT),
        ("mixed", "serving", large, 12, 2),
        ("wcpb", "serving", small, 12, INFLIGHT),
        ("atomic", "chat", large, 40, INFLIGHT),
        ("mixed", "chat", small, 24, INFLIGHT),
        ("wcpb", "chat", large, 24, 2),
        ("wcpb", "long", scale.chunks[0], 2, INFLIGHT),
        ("mixed", "light", large, 24, INFLIGHT),
        ("wcpb", "crowd", small, 2 * scale.max_requests, INFLIGHT),
        ("atomic", "crowd", large, 2 * scale.max_requests, INFLIGHT),
        ("wcpb", "light", small, 24, INFLIGHT),
    )
    return [
        (
            f"{policy}, chunk {chunk}, {workload}, {inflight} in flight",
            mix(model, seed, scale, policy, workload, chunk, count, inflight),
        )
        for policy, workload, chunk, count, inflight in chosen
    ]


@dataclass(frozen=True, slots=True)
class Observed:
    """One batch of a run: its log line, when the host began and ended preparing it, and whether a graph was
    captured for it."""

    batch: ExecutionBatch
    formed_ns: int
    after_seq: int
    started_ns: int
    finished_ns: int
    collected_ns: int
    select_ns: int
    host_ns: int
    launching_ns: int
    made_ns: int
    is_disturbed: bool

    @property
    def launched_ns(self) -> int:
        return self.launching_ns + self.host_ns


class HostWatch:
    """An observer that notes when each batch's preparation began and ended, and which captured a graph: they
    took long, and so did what waited for them."""

    def __init__(self, timeline: Timeline, programs: Programs) -> None:
        self._timeline = timeline
        self._programs = programs
        self.launching_ns: dict[int, int] = {}
        self.made_ns: dict[int, int] = {}
        self.batches: dict[int, ExecutionBatch] = {}
        self.captures: list[int] = []

    def launching(self, batch: ExecutionBatch) -> None:
        self.captures.append(self._programs.graph_captures)
        self.batches[batch.seq] = batch
        self.launching_ns[batch.seq] = self._timeline.now_ns()

    def collected(self, batch: ExecutionBatch, launched: Launched, stops: frozenset[int]) -> None:
        self.made_ns[batch.seq] = launched.start.made_ns

    def is_disturbed(self, seq: int) -> bool:
        """Whether batch `seq` or one beside it had a graph captured."""
        captures = [*self.captures, self._programs.graph_captures]
        return captures[max(seq - 2, 0)] != captures[min(seq + 2, len(captures) - 1)]


def time_run(
    session: Session, run: PlannedRun, name: str, is_stopped: Callable[[], bool]
) -> list[ProfileRow]:
    """The lines of kinds `host`, `served` and `gap` that `run` gives."""
    observed = _observe(session, run, is_stopped)
    return [*_host_rows(name, observed), *_served_rows(name, observed), *_gap_rows(name, observed)]


def _observe(session: Session, run: PlannedRun, is_stopped: Callable[[], bool]) -> list[Observed]:
    config, workload, shape = run.config, run.workload, run.shape(session.shape)
    text = io.StringIO()
    engine = assemble(config, shape, workload.clients(), text)
    rule = config.rule(shape)
    timeline = make_timeline(session.device)
    watch = HostWatch(timeline, session.programs)
    with few_collections():
        DeviceBackend(
            engine,
            Runner(session.model, session.pools, session.programs, timeline, config.seed),
            timeline,
            Foresight(workload.oracle, None, rule),
            AsConfigured(config.seed, shape.vocab_size, config.sampling),
            None,
            (watch,),
            is_stopped,
        ).run()
    text.seek(0)
    return [_observed(fields, watch) for fields in csv.DictReader(text)]


def _observed(fields: Mapping[str, str], watch: HostWatch) -> Observed:
    seq = int(fields["seq"])
    logged = (
        "submitted_ns",
        "after_seq",
        "started_ns",
        "finished_ns",
        "collected_ns",
        "select_ns",
        "host_ns",
    )
    times = (int(fields[name]) for name in logged)
    return Observed(
        watch.batches[seq], *times, watch.launching_ns[seq], watch.made_ns[seq], watch.is_disturbed(seq)
    )


def _host_rows(name: str, observed: Iterable[Observed]) -> Iterator[ProfileRow]:
    """Medians by stage, loops and number of ranges. The line shows the batch with the median number of
    rows."""
    alike: dict[tuple[Stage, int, int], list[Observed]] = {}
    for item in observed:
        if item.is_disturbed:
            continue
        batch = item.batch
        alike.setdefault((batch.stage, batch.loop_count, len(batch.ranges)), []).append(item)
    for (_, _, num_ranges), items in sorted(alike.items()):
        if len(items) < LEAST_BATCHES:
            continue
        shown = sorted(items, key=lambda item: item.batch.rows)[len(items) // 2].batch
        row = Case.of("host", f"{name}: {num_ranges} ranges", shown.work).row()
        yield ProfileRow(
            row.kind,
            row.case,
            row.stage,
            row.loop_count,
            row.rows,
            row.ranges,
            n=len(items),
            select_ns=median([item.select_ns for item in items]),
            prepare_ns=median([item.made_ns - item.launching_ns for item in items]),
            launch_ns=median([item.host_ns - (item.made_ns - item.launching_ns) for item in items]),
            host_p90_ns=percentile([item.host_ns for item in items], 90),
        )


def _served_rows(name: str, observed: list[Observed]) -> Iterator[ProfileRow]:
    """Medians of queued batches without a recurrent loop, by stage and rows (of all where no batch was ever
    queued, as on a CPU). What ran before them, which they find in the caches and wait for, is what serving
    puts there."""
    pairs = [(before, after) for before, after in pairwise(observed) if not after.is_disturbed]
    queued = [after for before, after in pairs if after.launched_ns <= before.finished_ns]
    alike: dict[tuple[Stage, int], list[Observed]] = {}
    for item in queued or [after for _, after in pairs]:
        if not item.batch.loop_count:
            alike.setdefault((item.batch.stage, item.batch.rows), []).append(item)
    for (_, num_rows), items in sorted(alike.items()):
        if len(items) < LEAST_BATCHES:
            continue
        row = Case.of("served", f"{name}: {num_rows} rows", items[0].batch.work).row()
        times = [item.finished_ns - item.started_ns for item in items]
        yield replace(row, n=len(items), **spread(times))


def _gap_rows(name: str, observed: list[Observed]) -> Iterator[ProfileRow]:
    """The stretches between batches that belong to none of them."""
    pairs = [(before, after) for before, after in pairwise(observed) if not after.is_disturbed]
    calm = [item for item in observed if not item.is_disturbed]
    by_seq = {item.batch.seq: item for item in observed}
    admit, wake = _extra_host_ns(calm, by_seq)
    gaps = {
        "admit": admit,
        "wake": wake,
        "device_gap": [
            after.started_ns - before.finished_ns
            for before, after in pairs
            if after.launched_ns <= before.finished_ns
        ],
        "collect": [item.collected_ns - item.finished_ns for item in calm if _host_was_waiting(item, by_seq)],
        "after_collect": [
            item.launching_ns - item.formed_ns - item.select_ns
            for item in calm
            if item.after_seq >= 0 and item.formed_ns == by_seq[item.after_seq].collected_ns
        ],
        "after_submit": [
            item.launching_ns - item.formed_ns - item.select_ns
            for item in calm
            if item.after_seq < 0 or item.formed_ns != by_seq[item.after_seq].collected_ns
        ],
        "mark": [
            after.started_ns - after.made_ns for before, after in pairs if before.finished_ns < after.made_ns
        ],
    }
    for gap, values in gaps.items():
        if len(values) >= LEAST_BATCHES:
            yield ProfileRow(
                "gap",
                f"{name}: {GAPS[gap]}",
                n=len(values),
                **spread(values),
            )


def _extra_host_ns(calm: Iterable[Observed], by_seq: Mapping[int, Observed]) -> tuple[list[int], list[int]]:
    """How much longer than others of their stage and loops the host is busy with batches that let requests
    in, for each of those, and with the first batch after an idle SLEPT_NS, beside that."""
    plain: dict[tuple[Stage, int], list[int]] = {}
    admitting: list[tuple[Observed, int, bool]] = []
    for item in calm:
        before = by_seq.get(item.batch.seq - 1)
        has_slept = (
            before is not None
            and item.after_seq == before.batch.seq
            and item.formed_ns - before.collected_ns > SLEPT_NS
        )
        count = len(item.batch.transfers.allocations)
        if count or has_slept:
            admitting.append((item, count, has_slept))
        else:
            plain.setdefault((item.batch.stage, item.batch.loop_count), []).append(
                item.select_ns + item.host_ns
            )
    typical = {key: median(times) for key, times in plain.items()}
    extra = [
        (item.select_ns + item.host_ns - typical[key], count, has_slept)
        for item, count, has_slept in admitting
        if (key := (item.batch.stage, item.batch.loop_count)) in typical
    ]
    admit = [max(0, ns // count) for ns, count, has_slept in extra if not has_slept]
    each_ns = median(admit) if admit else 0
    return admit, [max(0, ns - count * each_ns) for ns, count, has_slept in extra if has_slept]


def _host_was_waiting(item: Observed, by_seq: Mapping[int, Observed]) -> bool:
    """Whether everything submitted before `item` was collected had been launched by the time it ended."""
    after = item.batch.seq
    while (later := by_seq.get(after + 1)) is not None and later.after_seq < item.batch.seq:
        after += 1
    return by_seq[after].launched_ns <= item.finished_ns
