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

A maximum of sums of maxima has no closed form in integers that are rounded one by one, but is a loop over a
few of them: `Pipeline.repeat`, which a test holds equal to `launch` and `collect` in turn.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

from policies.core.seam.batch import Work
from policies.core.seam.events import Completion
from policies.core.seam.oracle import NOBODY
from policies.costs.latency import HostLoop, Prediction

SPREAD_BLOCK = 1024


class HostSpread:
    """By what factors the host's times of a run vary, in order: log-normal, around 1, of the run's seed.

    They are drawn in blocks; what a batch gets does not depend on the blocks, nor on who asks.
    """

    def __init__(self, seed: int, spread: float) -> None:
        self._random = random.Random(f"{seed} host")
        self._spread = spread
        self._block: list[float] = []
        self._at = 0

    def draw(self) -> float:
        if self._at == len(self._block):
            draw, spread = self._random.lognormvariate, self._spread
            self._block = [draw(0.0, spread) if spread else 1.0 for _ in range(SPREAD_BLOCK)]
            self._at = 0
        self._at += 1
        return self._block[self._at - 1]

    def put_back(self) -> None:
        """The one that was drawn last comes again."""
        self._at -= 1


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


new_flight: Callable[[tuple[object, ...]], Flight] = partial(tuple.__new__, Flight)
new_completion: Callable[[tuple[object, ...]], Completion] = partial(tuple.__new__, Completion)


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
        prepared_ns = max(self.free_ns, now_ns) + prediction.select_ns + prediction.prepare_ns
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

    def collect(self, now_ns: int, stops: frozenset[int], exits: frozenset[int]) -> Completion:
        """What the host learns of the oldest batch, which is done at `now_ns`, when it is free."""
        known_ns = max(self.free_ns, now_ns) + self._loop.collect_ns
        self.free_ns = known_ns + self._loop.after_collect_ns
        seq, _, started_ns, finished_ns, select_ns, host_ns, limit_ns, components_ns = self.flights.popleft()
        return Completion(
            seq, known_ns, started_ns, finished_ns, stops, select_ns, host_ns, limit_ns, components_ns, exits
        )

    def repeat(
        self,
        works: Sequence[Work],
        times: Sequence[Iterator[Prediction]],
        first_seq: int,
        most: int,
        until_ns: int | None,
        now_ns: int,
    ) -> list[Completion]:
        """Launch a batch and collect the oldest, in turn, `most` times, or until the next would be known at
        `until_ns` or later; return what was collected.

        Batches are `works` again and again, each time a token further, numbers from `first_seq` on, and their
        times what `times` say next. They end no request. Their work is made only of those left in flight.
        """
        loop, flights, draw, size = self._loop, self.flights, self._spread.draw, len(works)
        gap_ns, mark_ns, after_submit_ns = loop.device_gap_ns, loop.mark_ns, loop.after_submit_ns
        free_ns, device_free_ns = max(self.free_ns, now_ns), self._device_free_ns
        found: list[Completion] = []
        for at, prediction in zip(range(most), map(next, cycle(times)), strict=False):
            components_ns, limit_ns, select_ns, prepare_ns, launch_ns, idle_ns = prediction
            factor = draw()
            select_ns, prepare_ns = round(factor * select_ns), round(factor * prepare_ns)
            launch_ns, idle_ns = round(factor * launch_ns), round(factor * idle_ns)
            prepared_ns = free_ns + select_ns + prepare_ns
            ready_ns = prepared_ns + mark_ns
            started_ns = max(ready_ns, device_free_ns + gap_ns)
            finished_ns = started_ns + sum(components_ns)
            late_ns = ready_ns + idle_ns - started_ns
            if late_ns > 0:
                waited_ns = min(late_ns, idle_ns)
                finished_ns += waited_ns
                components_ns = prediction.components_after(waited_ns)
            host_ns, work = prepare_ns + launch_ns, works[at % size]
            flights.append(
                new_flight(
                    (
                        first_seq + at,
                        work,
                        started_ns,
                        finished_ns,
                        select_ns,
                        host_ns,
                        limit_ns,
                        components_ns,
                    )
                )
            )
            seq, _, begun_ns, ended_ns, choosing_ns, hosting_ns, least_ns, parts_ns = flights[0]
            known_ns = max(prepared_ns + launch_ns + after_submit_ns, ended_ns) + loop.collect_ns
            if until_ns is not None and known_ns >= until_ns:
                flights.pop()
                self._spread.put_back()
                break
            flights.popleft()
            found.append(
                new_completion(
                    (
                        seq,
                        known_ns,
                        begun_ns,
                        ended_ns,
                        NOBODY,
                        choosing_ns,
                        hosting_ns,
                        least_ns,
                        parts_ns,
                        NOBODY,
                    )
                )
            )
            free_ns, device_free_ns = known_ns + loop.after_collect_ns, finished_ns
        self.free_ns, self._device_free_ns = free_ns, device_free_ns
        for at, flight in enumerate(flights):
            if flight.seq >= first_seq:
                flights[at] = flight._replace(work=flight.work.moved((flight.seq - first_seq) // size))
        return found
