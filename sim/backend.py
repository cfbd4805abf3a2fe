"""The SimPy world: a host process that drives the engine and a device process that runs batches one after
another.

It does what `executor/backend.py` does. The host chooses a batch, packs it, launches it. The device, a FIFO,
begins a batch when it is packed and the one before it has ended; how soon after packing it can end depends on
the launch, which an idle device waits for. With several batches in flight the host's time hides behind the
device's. A host that waits learns of an end a little later. Simulated time is integer nanoseconds throughout.
While the host works its own time runs ahead of SimPy's, and what it does takes effect at the times it names;
SimPy catches up when the host waits. The host's time for a batch varies, as the real host's does, by a factor
from a log-normal stream of the run's seed; batches of one shape take the device the same time.
"""

import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import simpy

from policies.core.engine.engine import Engine, advance
from policies.core.seam.batch import ExecutionBatch
from policies.core.seam.events import Completion, Event, Submit, Tick
from policies.core.seam.oracle import early_exits, last_tokens
from policies.core.seam.request import ExitOracle, Oracle
from policies.costs.latency import LatencyModel, Prediction

SimProcess = Generator[simpy.Event, Any, None]


class Launched(NamedTuple):
    """A batch that has been handed to the device; `ready_ns` is when an idle device would have begun it."""

    batch: ExecutionBatch
    prediction: Prediction
    ready_ns: int


class Done(NamedTuple):
    """A batch that the device is through with, when it began and ended, and how long of that it waited for
    its launch."""

    batch: ExecutionBatch
    prediction: Prediction
    started_ns: int
    finished_ns: int
    waited_ns: int


class SimBackend:
    """Drives one `engine` in simulated time. `oracle` says when a request's true output ends, `exits` where
    its tokens leave (None: nowhere early); only this class reads them.

    `seed` is that of the run; `is_stopped` is asked between two steps; when it answers True the run ends with
    `KeyboardInterrupt`.
    """

    def __init__(
        self,
        engine: Engine,
        latency: LatencyModel,
        oracle: Oracle,
        is_stopped: Callable[[], bool] = lambda: False,
        exits: ExitOracle | None = None,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._latency = latency
        self._oracle = oracle
        self._exits = exits
        self._is_stopped = is_stopped
        self._env = simpy.Environment()
        self._loop = latency.loop
        self._host_rng = random.Random(f"{seed} host")
        self._queue: deque[Launched] = deque()
        self._done: deque[Done] = deque()
        self._free_ns = 0
        """From when on the host is free to act on what it was last told."""
        self._device_idle: simpy.Event | None = None
        self._host_waits: simpy.Event | None = None
        self._alarm: tuple[int, simpy.Event] | None = None

    def run(self) -> None:
        """Run to the end. Raises what the engine raises."""
        self._env.process(self._device())
        self._env.run(self._env.process(self._host()))

    def _host(self) -> SimProcess:
        loop = self._engine.run()
        command = next(loop, None)
        while command is not None:
            if self._is_stopped():
                raise KeyboardInterrupt
            event: Event
            if isinstance(command, Submit):
                event = self._submit(command.batch)
            else:
                event = yield from self._wait(command.until_ns)
            command = advance(loop, event)

    def _submit(self, batch: ExecutionBatch) -> Tick:
        loop = self._loop
        prediction = self._latency.times(batch)
        if loop.host_spread:
            prediction = prediction.slowed(self._host_rng.lognormvariate(0.0, loop.host_spread))
        prepared_ns = max(self._free_ns, int(self._env.now)) + prediction.select_ns + prediction.prepare_ns
        launched_ns = prepared_ns + prediction.launch_ns
        self._queue.append(Launched(batch, prediction, prepared_ns + loop.mark_ns))
        if self._device_idle is not None:
            self._device_idle.succeed()
            self._device_idle = None
        self._free_ns = launched_ns + loop.after_submit_ns
        return Tick(launched_ns)

    def _wait(self, until_ns: int | None) -> Generator[simpy.Event, Any, Event]:
        """The next completion, or the time once `until_ns` has come: a completion at that very time comes
        after it."""
        env = self._env
        while True:
            now_ns = int(env.now)
            if self._done and (until_ns is None or self._done[0].finished_ns < until_ns):
                return self._collect(max(self._free_ns, now_ns) + self._loop.collect_ns)
            if until_ns is not None and now_ns >= until_ns:
                return Tick(now_ns)
            self._host_waits = env.event()
            yield self._host_waits if until_ns is None else self._host_waits | self._alarm_at(until_ns)
            self._host_waits = None

    def _collect(self, now_ns: int) -> Completion:
        """The oldest batch that is done, of which the host has learnt at `now_ns`."""
        self._free_ns = now_ns + self._loop.after_collect_ns
        batch, prediction, started_ns, finished_ns, waited_ns = self._done.popleft()
        return Completion(
            batch.seq,
            now_ns,
            started_ns,
            finished_ns,
            last_tokens(batch, self._engine.log.records, self._oracle),
            prediction.select_ns,
            prediction.host_ns,
            prediction.limit_ns,
            prediction.components_after(waited_ns),
            early_exits(batch, self._engine.scheduler.exits, self._exits) if self._exits else frozenset(),
        )

    def _alarm_at(self, until_ns: int) -> simpy.Event:
        """A timeout at `until_ns`, made once however often the host waits for the same arrival."""
        if self._alarm is None or self._alarm[0] != until_ns:
            self._alarm = (until_ns, self._env.timeout(until_ns - self._env.now))
        return self._alarm[1]

    def _device(self) -> SimProcess:
        env, gap_ns = self._env, self._loop.device_gap_ns
        finished_ns = -gap_ns
        while True:
            if not self._queue:
                self._device_idle = env.event()
                yield self._device_idle
            batch, prediction, ready_ns = self._queue.popleft()
            started_ns = max(ready_ns, finished_ns + gap_ns)
            waited_ns = prediction.waiting_ns(ready_ns, started_ns)
            finished_ns = started_ns + prediction.device_ns + waited_ns
            now_ns = int(env.now)
            if finished_ns > now_ns:
                yield env.timeout(finished_ns - now_ns)
            self._done.append(Done(batch, prediction, started_ns, finished_ns, waited_ns))
            if self._host_waits is not None:
                self._host_waits.succeed()
                self._host_waits = None
