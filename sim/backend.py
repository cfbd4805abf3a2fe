"""The SimPy world of one engine: a host process that drives it, and a device that runs batches one after
another.

It does what `executor/backend.py` does. The host chooses a batch, packs it, launches it. The device, a FIFO,
begins a batch when it is packed and the one before it has ended; how soon after packing it can end depends on
the launch, which an idle device waits for. So a batch's times are known as soon as it is launched. With
several batches in flight the host's time hides behind the device's. A host that waits learns of an end a
little later.

Any number of engines share the environment that they are given. Simulated time is integer nanoseconds
throughout. While the host works its own time runs ahead of SimPy's, and what it does takes effect at the
times it names; SimPy catches up when the host waits, and, where others may post to the engine's inbox, after
every step of the host: what they post until then is there. The host's time for a batch varies, as the real
host's does, by a factor from a log-normal stream of the run's seed; batches of one shape take the device the
same time.
"""

import gc
from collections.abc import Callable, Generator
from typing import Any

import simpy
from simpy.events import EventPriority

from policies.core.engine.engine import Engine, advance
from policies.core.errors import StuckError
from policies.core.seam.batch import HEADS, ExecutionBatch, Stage
from policies.core.seam.events import (
    Completion,
    Event,
    Foresee,
    Foreseen,
    Handed,
    Repeat,
    Stretch,
    Submit,
    Tick,
    Wait,
)  # fmt: skip
from policies.core.seam.guesses import Refusals
from policies.core.seam.inbox import Mailbox
from policies.core.seam.oracle import Foresight
from policies.costs.latency import LatencyModel
from sim.pipeline import NOTHING, HostSpread, Pipeline

SimProcess = Generator[simpy.Event, Any, None]
YOUNG_OBJECTS = 100_000
"""After how many new objects Python looks for cycles during a run: it makes millions of tuples and hardly a
cycle, and looking took a fifth of the time."""
LAST_OF_ITS_TIME = EventPriority(2)
"""A SimPy priority below NORMAL: the host looks into its inbox when everything else of an instant has
happened."""


class SimBackend:
    """Runs `engine` in `env`. Of the future it knows what `foresight` says; only this class asks it.

    `seed` is that of the run, `replica` the number of the engine in a fleet; `is_stopped` is asked between
    two steps; when it answers True the run ends with `KeyboardInterrupt`. `on_collected` hears of
    the requests that each CODA batch collected by itself makes a token for. `on_handed` hears what the engine
    says to others.
    """

    def __init__(
        self,
        env: simpy.Environment,
        engine: Engine,
        latency: LatencyModel,
        foresight: Foresight,
        is_stopped: Callable[[], bool] = lambda: False,
        seed: int = 0,
        skips: bool = True,
        replica: int = 0,
        on_handed: Callable[[Handed], object] = lambda command: None,
        on_collected: Callable[[list[int]], None] = lambda request_ids: None,
    ) -> None:
        self._env = env
        self._engine = engine
        self._inbox = engine.inbox
        self._latency = latency
        self._foresight = foresight
        self._is_stopped = is_stopped
        self._on_handed = on_handed
        self._on_collected = on_collected
        self._refusals = Refusals()
        self._after_seqs: dict[int, int] = {}
        self._pipeline = Pipeline(latency.loop, HostSpread(seed, latency.loop.host_spread, replica))
        self._skips = skips and self._inbox.is_foreseen
        self._host_waits: simpy.Event | None = None
        self._alarm: tuple[int, simpy.Event] | None = None
        if isinstance(self._inbox, Mailbox):
            self._inbox.on_post = self._wake_host

    def start(self) -> simpy.Process:
        """Begin; the process ends with the engine's run. SimPy raises from it what the engine raises."""
        return self._env.process(self._host())

    def run(self) -> None:
        """Run to the end. Raises what the engine raises, and `StuckError` when nothing can happen any
        more."""
        process, thresholds = self.start(), gc.get_threshold()
        gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
        try:
            self._env.run(process)
        except RuntimeError as error:  # SimPy's word for a process that waits for nobody
            if process.is_alive:
                raise StuckError(f"the engine waits and nothing will happen any more: {error}") from None
            raise
        finally:
            gc.set_threshold(*thresholds)

    def _host(self) -> SimProcess:
        loop = self._engine.run(repeats=self._skips)
        is_open = self._inbox.is_open
        if is_open:
            yield self._everything_until(0)
        command = next(loop, None)
        while command is not None:
            if self._is_stopped():
                raise KeyboardInterrupt
            event: Event
            if isinstance(command, Submit):
                event = self._submit(command.batch)
            elif isinstance(command, Repeat):
                event = self._repeat(command)
                earlier, times = event
                ended_ns = times.finished_ns[-1:] or [item.finished_ns for item in earlier[-1:]]
                if ended_ns and ended_ns[0] > self._env.now:
                    yield self._env.timeout(ended_ns[0] - self._env.now)
            elif isinstance(command, Foresee):
                event = self._foresee(command.until_ns)
            elif isinstance(command, Wait):
                event = yield from self._wait(command.until_ns)
            else:
                self._on_handed(command)
                command = advance(loop, Tick(int(self._env.now)))
                continue
            if is_open and isinstance(event, Tick | Completion):
                yield self._everything_until(event.now_ns)
            command = advance(loop, event)

    def _submit(self, batch: ExecutionBatch) -> Tick:
        self._foresight.see(batch.transfers)
        if batch.stage is Stage.CODA and self._foresight.has_guesses:
            self._after_seqs[batch.seq] = batch.after_seq
        prediction = self._latency.times(batch.work, batch.transfers)
        return Tick(self._pipeline.launch(batch.seq, batch.work, prediction, int(self._env.now)))

    def _foresee(self, until_ns: int | None) -> Foreseen:
        flights = self._pipeline.flights
        if not flights:
            return Foreseen(True)
        is_late = until_ns is not None and flights[0].finished_ns >= until_ns
        return Foreseen(not (is_late or self._foresight.stops(flights[0].work)))

    def _repeat(self, command: Repeat) -> Stretch:
        """Launch and collect in turn, as often as `command` allows and no request comes to its end."""
        works, foresight, flights = command.works, self._foresight, self._pipeline.flights
        most, size = command.most, len(works)
        for at, flight in enumerate(flights):
            if foresight.stops(flight.work):
                most = min(most, at)
        for at, work in enumerate(works, len(flights)):
            if work.stage is Stage.CODA:
                turns = min([foresight.num_tokens_ahead(item) for item in work.ranges])
                most = min(most, at + turns * size)
        if most <= 0:
            return NOTHING
        return self._pipeline.repeat(command, most, self._latency, int(self._env.now))

    def _wait(self, until_ns: int | None) -> Generator[simpy.Event, Any, Event]:
        """The next completion, or the time once `until_ns` has come: a completion at that very time comes
        after it. Mail that is posted meanwhile ends the wait too."""
        env, flights = self._env, self._pipeline.flights
        while True:
            now_ns, wake_ns = int(env.now), until_ns
            if flights and (until_ns is None or flights[0].finished_ns < until_ns):
                wake_ns = flights[0].finished_ns
                if wake_ns <= now_ns:
                    work, foresight = flights[0].work, self._foresight
                    seq, refused = flights[0].seq, foresight.refused(work)
                    if work.stage is Stage.CODA:
                        after_seq = self._after_seqs.pop(seq, seq - 1)
                        counts = self._refusals.counting(seq, after_seq, work.ranges, refused)
                        tokens = [item for item, is_true in zip(work.ranges, counts, strict=True) if is_true]
                        self._on_collected([item.request_id for item in tokens if item.stage in HEADS])
                    stops, exits = foresight.stops(work, refused), foresight.early_exits(work)
                    return self._pipeline.collect(now_ns, stops, exits, refused)
            elif until_ns is not None and until_ns <= now_ns:
                return Tick(now_ns)
            if self._inbox.is_open:
                self._host_waits = env.event()
                yield self._host_waits if wake_ns is None else self._host_waits | self._alarm_at(wake_ns)
                self._host_waits = None
                if not (flights and flights[0].finished_ns <= env.now):
                    return Tick(int(env.now))
            else:
                assert wake_ns is not None, "the engine waits, nothing is in flight and nobody may post"
                yield env.timeout(wake_ns - now_ns)

    def _alarm_at(self, until_ns: int) -> simpy.Event:
        """A timeout at `until_ns`, made once however often the host waits for the same."""
        if self._alarm is None or self._alarm[0] != until_ns:
            self._alarm = (until_ns, self._env.timeout(until_ns - self._env.now))
        return self._alarm[1]

    def _everything_until(self, now_ns: int) -> simpy.Event:
        """Comes when SimPy is at `now_ns` and nothing else is left to happen then."""
        event = simpy.Event(self._env)
        event._ok, event._value = True, None
        self._env.schedule(event, LAST_OF_ITS_TIME, max(0, now_ns - self._env.now))
        return event

    def _wake_host(self) -> None:
        if self._host_waits is not None:
            self._host_waits.succeed()
            self._host_waits = None
