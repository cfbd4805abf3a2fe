"""Several engines in one SimPy environment behind a router: a run directory for each, and one for the whole.

Every engine is that of a plain run, and its directory can be replayed by itself. What goes on between them is
the door's (`policies.routing.door`); here it gets a clock.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import simpy

from policies.assembly import assemble
from policies.config.ignored import ignored_apart
from policies.config.runconfig import RunConfig
from policies.core.engine.engine import Engine
from policies.core.engine.runlog import Lines, RequestRecord
from policies.core.errors import StuckError
from policies.core.seam.objectives import EVERYTHING
from policies.core.seam.request import Role
from policies.routing.apart import DoorApart
from policies.routing.door import Door
from results.files import GrowingFile
from results.fleet import Replica, write_fleet
from results.identity import RunIdentity
from results.rundir import REPLICAS, RunDirectory
from sim.link import Transfers
from sim.run import NOT_KEPT, Logs, Simulation, inputs_sha256, run_to_end
from workloads.workload import Workload

Ended = Callable[[RequestRecord], object]


@dataclass(frozen=True, slots=True)
class FleetSimulation:
    """All parts of a simulated fleet, ready to run once: those of each engine, and the door between them."""

    config: RunConfig
    parts: tuple[Simulation, ...]
    door: Door | DoorApart
    env: simpy.Environment
    transfers: Transfers | None = None

    @classmethod
    def prepare(cls, config: RunConfig, workload: Workload | None = None) -> "FleetSimulation":
        """As `Simulation.prepare`, for every engine of `config.fleet`; the workload is loaded once."""
        assert config.fleet is not None
        parts: list[Simulation] = []
        for part in config.parts():
            parts.append(Simulation.prepare(part, workload))
            workload = parts[0].workload
        assert workload is not None
        env, fleet, clients = simpy.Environment(), config.fleet, workload.clients()
        pools = [part.engine().scheduler.blocks for part in parts]
        sizes = [pool.num_groups * pool.block_size for pool in pools]
        if fleet.link is None:
            choose = fleet.router.chooser(len(parts), config.seed)
            return cls(config, tuple(parts), Door(clients, sizes, choose, lambda: int(env.now)), env)
        both = (
            fleet.router.chooser(fleet.prefill, config.seed),
            fleet.router.chooser(fleet.decode, config.seed),
        )
        door = DoorApart(clients, sizes, fleet.prefill, both, lambda: int(env.now))
        planes = config.cache.planes(parts[0].model.num_loops)
        return cls(
            config, tuple(parts), door, env, Transfers(env, fleet, fleet.link, door, parts[0].model, planes)
        )

    @property
    def workload(self) -> Workload:
        return self.parts[0].workload

    @property
    def notes(self) -> tuple[str, ...]:
        """What the engines' summaries say, each sentence once."""
        own = [note for part in self.parts for note in part.notes]
        return tuple(dict.fromkeys([*own, *ignored_apart(self.config, "sim")]))

    def engines(
        self,
        batches: Sequence[Lines | None],
        on_ended: Sequence[Ended],
        handovers: Sequence[Lines | None] | None = None,
    ) -> list[Engine]:
        """The engines at the door's mailboxes."""
        handovers = handovers or [None] * len(self.parts)
        parts = zip(self.parts, self.door.boxes, batches, on_ended, handovers, strict=True)
        return [
            assemble(part.config, part.model, box, lines, ended, news)
            for part, box, lines, ended, news in parts
        ]

    def run(
        self, engines: Sequence[Engine], is_stopped: Callable[[], bool] = lambda: False, skips: bool = True
    ) -> None:
        """Run all to the end. Raises what an engine raises."""
        env = self.env
        env.process(self._open_door())
        handed = self.transfers.heard if self.transfers is not None else lambda command: None
        backends = [
            part.backend(engine, env, is_stopped, skips, at, handed)
            for at, (part, engine) in enumerate(zip(self.parts, engines, strict=True))
        ]
        processes = [backend.start() for backend in backends]
        try:
            env.run(env.all_of(processes))
        except RuntimeError as error:  # SimPy's word for processes that wait for nobody
            if any(process.is_alive for process in processes):
                raise StuckError(f"engines wait and nothing will happen any more: {error}") from None
            raise

    def _open_door(self) -> Generator[simpy.Event, None, None]:
        """Post what is due when it is, before any engine acts at that time."""
        env, door, alarm = self.env, self.door, (-1, simpy.Event(self.env))
        while door.post_due(int(env.now)):
            changed = env.event()
            door.on_change = lambda event=changed: event.triggered or event.succeed()  # type: ignore[misc]
            next_ns = door.next_ns()
            if next_ns is not None and next_ns != alarm[0]:
                alarm = (next_ns, env.timeout(max(0, next_ns - int(env.now))))
            yield changed if next_ns is None else changed | alarm[1]


def simulate_fleet(
    config: RunConfig,
    out: Path | None,
    *,
    workload: Workload | None = None,
    label: str | None = None,
    plots: bool = True,
    log: Logs = "batches",
    on_ended: Callable[[int], None] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """`sim.run.simulate` for a config with a fleet: the summary is that of the whole, each engine's is below
    in `replicas`."""
    inputs = {} if workload else {"input_sha256": inputs_sha256(config)}
    fleet = FleetSimulation.prepare(config, workload)
    num_loops, asked = fleet.parts[0].model.num_loops, fleet.workload
    identity = RunIdentity.from_config(config.resolved, "sim", num_loops, label)
    if config.fleet is not None and config.fleet.devices:
        names = [RunIdentity.from_config(part.config.resolved, "sim", 0).device for part in fleet.parts]
        identity = replace(identity, device="+".join(dict.fromkeys(names)))
    is_needed = log == "batches" or config.measure != EVERYTHING
    with ExitStack() as stack:
        whole = stack.enter_context(RunDirectory.create(config.resolved, identity, out))
        replicas: list[Replica] = []
        listeners: list[Ended] = []
        news: list[GrowingFile | None] = []
        for at, (plain, part) in enumerate(zip(config.parts(), fleet.parts, strict=True)):
            own = RunIdentity.from_config(plain.resolved, "sim", num_loops, workload=label)
            directory = stack.enter_context(
                RunDirectory.create(part.config.resolved, own, whole.path / REPLICAS / str(at))
            )
            replicas.append(Replica(directory, own, part.config.resolved, part.notes))

            news.append(None)
            if part.config.role != "whole":
                news[-1] = directory.handovers()

            def ended(
                record: RequestRecord, role: Role = part.config.role, directory: RunDirectory = directory
            ) -> None:
                directory.requests.write(record)
                whole_record = of_whole(role, record)
                if whole_record is not None:
                    whole.requests.write(whole_record)
                    if on_ended is not None:
                        on_ended(len(asked.requests))

            listeners.append(ended)

        began_ns: dict[int, int] = {}

        def of_whole(role: Role, record: RequestRecord) -> RequestRecord | None:
            """The record of a request as its client sees it; None of the part before: when that began is
            kept."""
            request_id, first_ns = record.request.request_id, record.first_scheduled_ns
            if role == "prefill":
                if first_ns is not None:
                    began_ns[request_id] = first_ns
                return None
            if role == "decode" and request_id in began_ns:
                first_ns = began_ns[request_id]
            return replace(record, number=fleet.door.numbers[request_id], first_scheduled_ns=first_ns)

        lines = [item.directory.batches if is_needed else None for item in replicas]
        engines = fleet.engines(lines, listeners, news)
        status, broken = run_to_end(lambda is_stopped: fleet.run(engines, is_stopped))
        summary = write_fleet(
            whole,
            replicas,
            [(engine.log, engine.scheduler) for engine in engines],
            identity,
            list(fleet.door.places.values()),
            of_whole,
            fleet.transfers.account if fleet.transfers is not None else None,
            config=config,
            status=status,
            plots=plots and log == "batches",
            skipped_rows=asked.skipped_rows,
            notes=fleet.notes,
            extra=inputs,
            broken=broken,
        )
    for name in NOT_KEPT[log]:
        for item in (whole, *[item.directory for item in replicas]):
            (item.path / name).unlink(missing_ok=True)
    return whole.path, summary
