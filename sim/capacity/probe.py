"""One probe: whether the objectives of a config hold, by a simulation that ends as soon as they cannot hold
any more. What was found is kept under a hash of all that it follows from, and not asked again."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.config.runconfig import RunConfig
from policies.core.engine.engine import Engine
from policies.core.engine.runlog import RequestRecord
from policies.core.errors import InputError
from policies.core.seam.objectives import EVERYTHING, Objectives, Window
from policies.core.seam.request import Request, Status
from policies.process.interrupt import CtrlC
from results.goodput import Goodput
from results.identity import config_hash
from results.window import Span
from sim.capacity.kept import keep, kept, place
from sim.fleet import FleetSimulation
from sim.run import Simulation, inputs_sha256
from workloads.workload import Workload


class _CannotHold(Exception):
    """Too many are late already, whatever comes."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What became of the requests that were judged; `is_whole` when the run went to its end, else it stopped
    when the rest could no longer help."""

    holds: bool
    is_whole: bool
    share: float
    num_requests: int
    met: int
    missed: int
    left_out: int
    missed_by: Mapping[str, int]
    output_tokens: int
    duration_s: float
    gpu_busy_fraction: float

    @property
    def share_met(self) -> float | None:
        """Of those that were judged; of a run that stopped, more than the whole would have had."""
        judged = self.met + self.missed
        return self.met / judged if judged else None

    @property
    def strain(self) -> float:
        """Late requests for every one that may be late, if the rest is like those that were judged."""
        judged = max(self.met + self.missed, 1)
        may_be_late = max((1 - self.share) * self.num_requests, 0.5)
        return self.missed / judged * self.num_requests / may_be_late


class Judge:
    """Judges requests as they end, and says when it is decided: a request that has waited past its time for
    its first token is late, whenever that comes."""

    def __init__(self, objectives: Objectives, measured: frozenset[int]) -> None:
        self.goodput = Goodput(objectives)
        self.measured = measured
        self.output_tokens = 0
        self._share = objectives.share
        limits = (objectives.ttft_ms, objectives.e2e_ms)
        self._patience_ns = min([1e6 * limit for limit in limits if limit is not None], default=None)

    def heard(self, record: RequestRecord) -> None:
        """`record` has ended."""
        self.goodput.add(record, record.request.request_id in self.measured, True)
        self.output_tokens += record.output_tokens

    def check(self, now_ns: int, alive: Mapping[int, RequestRecord]) -> None:
        """Raise `_CannotHold` when it is decided by now; `alive` have not ended, in order of arrival."""
        late = self.goodput.missed + self._overdue(now_ns, alive)
        total = len(self.measured)
        if late and (total - late) / total < self._share:
            raise _CannotHold

    def _overdue(self, now_ns: int, alive: Mapping[int, RequestRecord]) -> int:
        found = 0
        if self._patience_ns is not None:
            for record in alive.values():
                if record.request.arrival_ns + self._patience_ns >= now_ns:
                    break
                is_late = not record.token_ns and record.status is not Status.REFUSED
                found += is_late and record.request.request_id in self.measured
        return found


def probe(config: RunConfig, cache: Path | None, *, to_the_end: bool = False) -> Probe:
    """Simulate `config` against its `slo`, or read from the folder `cache` what came of it before.

    Raises `KeyboardInterrupt` after Ctrl-C, with nothing kept of this one, and `InputError` for a config that
    cannot run.
    """
    if cache is None:
        return _simulate(config, to_the_end)
    path = place(cache, config_hash(config.resolved), inputs_sha256(config), to_the_end)
    found = kept(path)
    if found is not None:
        return Probe(**found)
    result = _simulate(config, to_the_end)
    keep(path, dataclasses.asdict(result))
    return result


def _simulate(config: RunConfig, to_the_end: bool) -> Probe:
    assert config.slo is not None
    world = FleetSimulation.prepare(config) if config.fleet is not None else Simulation.prepare(config)
    judge = Judge(config.slo, measured_requests(world.workload, config.measure))
    engines: list[Engine] = []

    def listener(at: int) -> Callable[[RequestRecord], None]:
        def ended(record: RequestRecord) -> None:
            judge.heard(record)
            if not to_the_end and record.finished_ns is not None:
                judge.check(record.finished_ns, engines[at].log.records)

        return ended

    is_whole = True
    with CtrlC() as ctrl_c:
        try:
            if isinstance(world, FleetSimulation):
                parts = range(len(world.parts))
                engines += world.engines([None] * len(parts), [listener(at) for at in parts])
                world.run(engines, lambda: ctrl_c.is_pressed)
            else:
                engines.append(world.engine(None, listener(0)))
                world.backend(engines[0], is_stopped=lambda: ctrl_c.is_pressed).run()
        except _CannotHold:
            is_whole = False
    return _outcome(judge, engines, is_whole)


def _outcome(judge: Judge, engines: Sequence[Engine], is_whole: bool) -> Probe:
    goodput = judge.goodput
    judged = goodput.met + goodput.missed
    totals = [engine.log.totals for engine in engines]
    end_ns = max(item.last_finished_ns for item in totals)
    starts = [item.first_started_ns for item in totals if item.first_started_ns is not None]
    busy_ns = sum(item.device_ns for item in totals)
    return Probe(
        holds=is_whole and judged > 0 and goodput.met / judged >= goodput.objectives.share,
        is_whole=is_whole,
        share=goodput.objectives.share,
        num_requests=len(judge.measured),
        met=goodput.met,
        missed=goodput.missed,
        left_out=goodput.left_out,
        missed_by=dict(sorted(goodput.missed_by.items())),
        output_tokens=judge.output_tokens,
        duration_s=end_ns / 1e9,
        gpu_busy_fraction=busy_ns / max(1, len(engines) * (end_ns - min(starts, default=0))),
    )


def measured_requests(workload: Workload, window: Window) -> frozenset[int]:
    """Ids of the requests that count. Raises `InputError` where that hangs on how a run goes."""
    requests: Sequence[Request] = workload.requests
    if window == EVERYTHING:
        return frozenset(request.request_id for request in requests)
    in_order = workload.concurrency == 1 and not window.skip_s and window.until_s is None
    if workload.concurrency is not None and not in_order:
        raise InputError(
            "measure: with a concurrency it is not known beforehand who arrives in the span, expected none"
        )
    records = [RequestRecord(request, number) for number, request in enumerate(requests)]
    span = Span.of(records, window)
    found = frozenset(record.request.request_id for record in records if span.has_request(record))
    if not found:
        raise InputError(f"measure: leaves none of the {len(records)} requests, expected some to judge")
    return found
