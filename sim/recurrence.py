"""The recurrence of `sim.pipeline` for many batches at once: columns of integers in, columns out.

While the device is never out of work its batches begin when the one before has ended, so their times are
running sums, and the host's follow from them: lists are added as a whole, which takes a fifth of the time.
Where a batch shows that the host was late after all, that batch and some more are computed one by one.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, repeat
from operator import add, ge, mul, sub
from typing import NamedTuple

from policies.core.seam.batch import Work
from policies.costs.latency import HostLoop, LatencyModel, Prediction, Run

MOST_SINGLE = 256
"""Batches that are computed one by one before the host is again taken to be in time."""


class Columns(NamedTuple):
    """What batches take, one after another: see `policies.costs.latency.Prediction`."""

    predictions: list[Prediction]
    components_ns: list[tuple[int, ...]]
    device_ns: list[int]
    limit_ns: list[int]
    select_ns: list[int]
    prepare_ns: list[int]
    launch_ns: list[int]
    idle_ns: list[int]

    def slowed(self, factors: list[float]) -> "Columns":
        """The same on a host that takes so many times as long for each: `Prediction.slowed`."""
        host_ns = [list(map(round, map(mul, factors, times_ns))) for times_ns in self[4:]]
        return Columns(*self[:4], *host_ns)


def predicted(
    latency: LatencyModel, works: tuple[Work, ...], most: int, until_ns: int | None, depth: int
) -> Columns:
    """What the batches of `works` take that follow one another again and again, each time every row a token
    further: `most`, or as many as end within `until_ns` from now and `depth` more."""
    size = len(works)
    if most <= size:
        predictions = list(map(latency.predict, works[:most]))
        limits_ns = [item.limit_ns for item in predictions]
    else:
        turns = [latency.ahead(work, -(-(most - at) // size)) for at, work in enumerate(works)]
        firsts = [next(turn) for turn in turns]
        turn_ns = sum([run.prediction.device_ns + latency.loop.device_gap_ns for run in firsts])
        if until_ns is not None and turn_ns > 0:
            most = min(most, size * (max(0, until_ns) // turn_ns + 2) + depth)
        predictions, limits_ns = [firsts[0].prediction] * most, [0] * most
        for at, (first, turn) in enumerate(zip(firsts, turns, strict=True)):
            some, limits = _column(first, turn, -(-(most - at) // size))
            predictions[at::size], limits_ns[at::size] = some, limits
    components_ns, _, *host_ns = map(list, zip(*predictions, strict=True))
    return Columns(predictions, components_ns, list(map(sum, components_ns)), limits_ns, *host_ns)


def _column(first: Run, turn: Iterator[Run], count: int) -> tuple[list[Prediction], list[int]]:
    """The next `count` of one work."""
    predictions, limits_ns = [first.prediction] * len(first.limits_ns), first.limits_ns
    while len(limits_ns) < count:
        prediction, more_ns = next(turn)
        predictions += [prediction] * len(more_ns)
        limits_ns = limits_ns + more_ns
    return predictions[:count], limits_ns[:count]


class Recurrence:
    """Batches of `columns` behind those in flight, which end at `earlier_ns`: each is launched when one is
    collected, until one would be known at `until_ns` or later."""

    def __init__(
        self,
        loop: HostLoop,
        columns: Columns,
        earlier_ns: list[int],
        until_ns: int | None,
        free_ns: int,
        device_free_ns: int,
    ) -> None:
        self.started_ns: list[int] = []
        self.finished_ns: list[int] = []
        self.known_ns: list[int] = []
        """When that is known to have ended which was the oldest in flight when each was launched."""
        self.free_ns, self.device_free_ns = free_ns, device_free_ns
        self.columns = columns
        self._loop = loop
        self._ended_ns = earlier_ns
        self._until_ns = until_ns
        self._is_over = False

    def run(self, size: int) -> None:
        """Compute as many as there are; they come round after `size`."""
        total, together, single = len(self.columns.device_ns), 8 * size, size
        while not self._is_over and (at := len(self.known_ns)) < total:
            end = min(total, at + together)
            self._behind_device(at, end)
            found = len(self.known_ns)
            together *= 4
            if found < end and not self._is_over:
                single = min(2 * single, MOST_SINGLE) if found - at < size else size
                self._one_by_one(found, min(total, found + single))
                together = 4 * size

    def _behind_device(self, first: int, end: int) -> None:
        """Batches from `first` to `end`, or up to one for which the host is late."""
        loop, columns = self._loop, self.columns
        device_ns = columns.device_ns[first:end]
        busy_ns = map(add, device_ns, repeat(loop.device_gap_ns))
        finished_ns = list(accumulate(busy_ns, initial=self.device_free_ns))[1:]
        started_ns = list(map(sub, finished_ns, device_ns))
        ended_ns = [*self._ended_ns[first:], *finished_ns][: end - first]
        known_ns = list(map(add, ended_ns, repeat(loop.collect_ns)))
        count = len(known_ns)
        if self._until_ns is not None:
            count = bisect_left(known_ns, self._until_ns)
            self._is_over = count < len(known_ns)
        free_ns = [self.free_ns, *map(add, known_ns, repeat(loop.after_collect_ns))]
        host_ns = map(add, columns.select_ns[first:end], columns.prepare_ns[first:end])
        prepared_ns = list(map(add, free_ns, host_ns))
        latest_ns = map(add, map(add, prepared_ns, columns.idle_ns[first:end]), repeat(loop.mark_ns))
        launched_ns = map(
            add, map(add, prepared_ns, columns.launch_ns[first:end]), repeat(loop.after_submit_ns)
        )
        is_hidden = list(map(ge, started_ns[:count], latest_ns))
        is_waiting = list(map(ge, ended_ns[:count], launched_ns))
        for in_time in (is_hidden, is_waiting):
            if not all(in_time):
                late = in_time.index(False)
                if late < count:
                    count, self._is_over = late, False
        if count:
            self.started_ns += started_ns[:count]
            self.finished_ns += finished_ns[:count]
            self.known_ns += known_ns[:count]
            self._ended_ns += finished_ns[:count]
            self.free_ns = known_ns[count - 1] + loop.after_collect_ns
            self.device_free_ns = finished_ns[count - 1]

    def _one_by_one(self, first: int, end: int) -> None:
        """Batches from `first` to `end`, whatever the host does."""
        loop, columns, ended_ns = self._loop, self.columns, self._ended_ns
        free_ns, device_free_ns = self.free_ns, self.device_free_ns
        rows = zip(
            columns.device_ns[first:end], columns.select_ns[first:end], columns.prepare_ns[first:end],
            columns.launch_ns[first:end], columns.idle_ns[first:end], strict=True,
        )  # fmt: skip
        for at, (device_ns, select_ns, prepare_ns, launch_ns, idle_ns) in enumerate(rows, first):
            prepared_ns = free_ns + select_ns + prepare_ns
            ready_ns = prepared_ns + loop.mark_ns
            started_ns = max(ready_ns, device_free_ns + loop.device_gap_ns)
            finished_ns = started_ns + device_ns
            late_ns, waited_ns = ready_ns + idle_ns - started_ns, 0
            if late_ns > 0:
                waited_ns = min(late_ns, idle_ns)
                finished_ns += waited_ns
            ended_ns.append(finished_ns)
            known_ns = max(prepared_ns + launch_ns + loop.after_submit_ns, ended_ns[at]) + loop.collect_ns
            if self._until_ns is not None and known_ns >= self._until_ns:
                ended_ns.pop()
                self._is_over = True
                break
            if waited_ns:
                columns.components_ns[at] = columns.predictions[at].components_after(waited_ns)
            self.started_ns.append(started_ns)
            self.finished_ns.append(finished_ns)
            self.known_ns.append(known_ns)
            free_ns, device_free_ns = known_ns + loop.after_collect_ns, finished_ns
        self.free_ns, self.device_free_ns = free_ns, device_free_ns
