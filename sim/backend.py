"""The SimPy world: a host process that drives the engine and a device process that runs batches one after another.

The host is busy for a batch's select, prepare and launch time; the device is a FIFO. With two batches in flight the host's time
hides behind the device's. Simulated time is integer nanoseconds throughout.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import simpy

from policies.core.batch import ExecutionBatch
from policies.core.engine import Engine, advance
from policies.core.events import Completion, Event, Submit, Tick
from policies.core.oracle import last_tokens
from policies.core.request import Oracle
from sim.latency import LatencyModel, Prediction

SimProcess = Generator[simpy.Event, Any, None]


class SimBackend:
    """Drives one `engine` in simulated time. `oracle` says when a request's true output ends; only this class reads it.

    `is_stopped` is asked between two steps; when it answers True the run ends with `KeyboardInterrupt`.
    """

    def __init__(
        self, engine: Engine, latency: LatencyModel, oracle: Oracle, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._engine = engine
        self._latency = latency
        self._oracle = oracle
        self._is_stopped = is_stopped
        self._env = simpy.Environment()
        self._queue: deque[tuple[ExecutionBatch, Prediction]] = deque()
        self._done: deque[tuple[ExecutionBatch, Prediction, int, int]] = deque()
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
                event = yield from self._submit(command.batch)
            else:
                event = yield from self._wait(command.until_ns)
            command = advance(loop, event)

    def _submit(self, batch: ExecutionBatch) -> Generator[simpy.Event, Any, Tick]:
        prediction = self._latency.predict(batch)
        busy_ns = prediction.select_ns + prediction.host_ns
        if busy_ns:
            yield self._env.timeout(busy_ns)
        self._queue.append((batch, prediction))
        if self._device_idle is not None:
            self._device_idle.succeed()
            self._device_idle = None
        return Tick(int(self._env.now))

    def _wait(self, until_ns: int | None) -> Generator[simpy.Event, Any, Event]:
        """The next completion, or the time once `until_ns` has come: a completion at that very time comes after it."""
        env = self._env
        while True:
            if self._done and (until_ns is None or self._done[0][3] < until_ns):
                if self._latency.collect_ns:
                    yield env.timeout(self._latency.collect_ns)
                return self._collect()
            if until_ns is not None and env.now >= until_ns:
                return Tick(int(env.now))
            self._host_waits = env.event()
            yield self._host_waits if until_ns is None else self._host_waits | self._alarm_at(until_ns)
            self._host_waits = None

    def _collect(self) -> Completion:
        batch, prediction, started_ns, finished_ns = self._done.popleft()
        return Completion(
            batch.seq,
            int(self._env.now),
            started_ns,
            finished_ns,
            last_tokens(batch, self._engine.log.records, self._oracle),
            prediction.select_ns,
            prediction.host_ns,
            prediction.limit_ns,
            prediction.components_ns,
        )

    def _alarm_at(self, until_ns: int) -> simpy.Event:
        """A timeout at `until_ns`, made once however often the host waits for the same arrival."""
        if self._alarm is None or self._alarm[0] != until_ns:
            self._alarm = (until_ns, self._env.timeout(until_ns - self._env.now))
        return self._alarm[1]

    def _device(self) -> SimProcess:
        env = self._env
        while True:
            if not self._queue:
                self._device_idle = env.event()
                yield self._device_idle
            batch, prediction = self._queue.popleft()
            started_ns = int(env.now)
            device_ns = prediction.device_ns
            if device_ns:
                yield env.timeout(device_ns)
            self._done.append((batch, prediction, started_ns, int(env.now)))
            if self._host_waits is not None:
                self._host_waits.succeed()
                self._host_waits = None
