"""Host and device of one engine as times: when batches are packed, launched, begun, done and known to be.
Integers only; no SimPy, no engine.

What goes on from batch to batch is when the host is free to act, when the device is free, and the batches in
flight. A batch's times are known when it is launched, because the device is a FIFO.

With n batches in flight a busy host does the same again and again: it learns that the oldest has ended,
chooses the next one, packs and launches it. With k_i for when it knows of batch i's end, batch i + n is

    prepared = k_i + after_collect + select + prepare
    started  = max(prepared + mark, finished of i + n - 1 + gap)
    finished = started + device + what an idle device waits for the launch
    k_(i+1)  = max(prepared + launch + after_submit, finished of i + 1) + collect

`sim.recurrence` computes that for many batches at once; a test holds `Pipeline.repeat` equal to `launch` and
`collect` in turn.
"""

import random
from collections import deque
from math import exp, log, sqrt
from operator import add
from typing import NamedTuple

from policies.core.seam.batch import Work
from policies.core.seam.events import Completion, Repeat, Stretch, Times
from policies.core.seam.oracle import NOBODY, NONE_REFUSED, Refused
from policies.costs.latency import HostLoop, LatencyModel, Prediction
from sim.recurrence import Recurrence, predicted

SPREAD_BLOCK = 1024
NORMAL_MAGIC = 4 * exp(-0.5) / sqrt(2.0)
"""By which `random.normalvariate` stretches its uniform variates."""
NOTHING = Stretch([], Times([], [], [], [], [], [], []))


class HostSpread:
    """By what factors a host's times vary in a run, in order: log-normal, around 1, of the run's seed and the
    host's number.

    They are drawn in blocks; what a batch gets does not depend on the blocks, nor on who asks.
    """

    def __init__(self, seed: int, spread: float, replica: int = 0) -> None:
        self._random = random.Random(f"{seed} host {replica}" if replica else f"{seed} host")
        self._spread = spread
        self._block: list[float] = []
        self._at = 0

    def draw(self) -> float:
        return self.take(1)[0]

    def take(self, count: int) -> list[float]:
        """The next `count`."""
        missing = self._at + count - len(self._block)
        if missing > 0:
            self._block = self._block[self._at :] + self._drawn(max(missing, SPREAD_BLOCK))
            self._at = 0
        self._at += count
        return self._block[self._at - count : self._at]

    def put_back(self, count: int) -> None:
        """The last `count` that were taken come again."""
        self._at -= count

    def _drawn(self, count: int) -> list[float]:
        """`lognormvariate(0.0, spread)` so many times: the standard library's way to a normal variate, by
        Kinderman and Monahan, without its three calls for each."""
        spread, chance = self._spread, self._random.random
        if not spread:
            return [1.0] * count
        found: list[float] = []
        while len(found) < count:
            uniform = chance()
            other = 1.0 - chance()
            normal = NORMAL_MAGIC * (uniform - 0.5) / other
            if normal * normal / 4.0 <= -log(other):
                found.append(exp(0.0 + normal * spread))
        return found


class Flight(NamedTuple):
    """A batch that has been handed to the device: when it begins and ends there, and what a `Completion` says
    of it."""

    seq: int
    work: Work
    started_ns: int
    finished_ns: int
    select_ns: int
    host_ns: int
    limit_ns: int
    components_ns: tuple[int, ...]


def completion_of(
    flight: Flight,
    known_ns: int,
    stops: frozenset[int] = NOBODY,
    exits: frozenset[int] = NOBODY,
    refused: Refused = NONE_REFUSED,
) -> Completion:
    """What the host learns of `flight` at `known_ns`."""
    seq, _, started_ns, finished_ns, select_ns, host_ns, limit_ns, components_ns = flight
    return Completion(
        seq, known_ns, started_ns, finished_ns, stops, select_ns, host_ns, limit_ns, components_ns, exits,
        refused
    )  # fmt: skip


class Pipeline:
    """The times of one run on a host and a device that are as `loop` says; the host's vary by `spread`."""

    def __init__(self, loop: HostLoop, spread: HostSpread) -> None:
        self._loop = loop
        self._spread = spread
        self.flights: deque[Flight] = deque()
        """Batches in flight, the oldest first."""
        self.free_ns = 0
        """From when on the host is free to act on what it last heard."""
        self._device_free_ns = -loop.device_gap_ns

    def launch(self, seq: int, work: Work, prediction: Prediction, now_ns: int) -> int:
        """Choose, pack and launch a batch from `now_ns` on, or when the host is free; return when it is
        launched."""
        loop, prediction = self._loop, prediction.slowed(self._spread.draw())
        prepared_ns = self._begins_ns(now_ns) + prediction.select_ns + prediction.prepare_ns
        ready_ns = prepared_ns + loop.mark_ns
        started_ns = max(ready_ns, self._device_free_ns + loop.device_gap_ns)
        waited_ns = prediction.waiting_ns(ready_ns, started_ns)
        self._device_free_ns = finished_ns = started_ns + prediction.device_ns + waited_ns
        self.flights.append(
            Flight(
                seq,
                work,
                started_ns,
                finished_ns,
                prediction.select_ns,
                prediction.host_ns,
                prediction.limit_ns,
                prediction.components_after(waited_ns),
            )
        )
        launched_ns = prepared_ns + prediction.launch_ns
        self.free_ns = launched_ns + loop.after_submit_ns
        return launched_ns

    def _begins_ns(self, now_ns: int) -> int:
        """When the host begins to choose a batch that it is asked for at `now_ns`."""
        return self._loop.begins_ns(now_ns, self.free_ns, bool(self.flights))

    def collect(
        self, now_ns: int, stops: frozenset[int], exits: frozenset[int], refused: Refused = NONE_REFUSED
    ) -> Completion:
        """What the host learns of the oldest batch, which is done at `now_ns`, when it is free."""
        known_ns = max(self.free_ns, now_ns) + self._loop.collect_ns
        self.free_ns = known_ns + self._loop.after_collect_ns
        return completion_of(self.flights.popleft(), known_ns, stops, exits, refused)

    def repeat(self, command: Repeat, most: int, latency: LatencyModel, now_ns: int) -> Stretch:
        """Launch a batch of `command` and collect the oldest, in turn, `most` times, or until the next would
        be known at `command.until_ns` or later. They end no request."""
        first_seq, works, _, until_ns = command
        flights, free_ns = self.flights, self._begins_ns(now_ns)
        depth, size = len(flights), len(works)
        left_ns = None if until_ns is None else until_ns - now_ns
        columns = predicted(latency, works, most, left_ns, depth)
        columns = columns.slowed(self._spread.take(len(columns.device_ns)))
        run = Recurrence(
            self._loop, columns, [flight.finished_ns for flight in flights], until_ns, free_ns,
            self._device_free_ns,
        )  # fmt: skip
        run.run(size)
        count = len(run.known_ns)
        self._spread.put_back(len(columns.device_ns) - count)
        if not count:
            return NOTHING
        self.free_ns, self._device_free_ns = run.free_ns, run.device_free_ns
        earlier = [completion_of(flights.popleft(), known_ns) for known_ns in run.known_ns[:depth]]
        collected = count - len(earlier)
        host_ns = list(map(add, columns.prepare_ns, columns.launch_ns))
        for at in range(collected, count):
            turn, index = divmod(at, size)
            flights.append(
                Flight(
                    first_seq + at,
                    works[index].moved(turn),
                    run.started_ns[at],
                    run.finished_ns[at],
                    columns.select_ns[at],
                    host_ns[at],
                    columns.limit_ns[at],
                    columns.components_ns[at],
                )
            )
        times = Times(
            run.known_ns[depth:],
            run.started_ns[:collected],
            run.finished_ns[:collected],
            columns.select_ns[:collected],
            host_ns[:collected],
            columns.limit_ns[:collected],
            columns.components_ns[:collected],
        )
        return Stretch(earlier, times)
