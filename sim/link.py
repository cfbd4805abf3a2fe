"""Links between engines: one chunk after another, at a bandwidth that may fall for a while, and not at all
while a link is broken.

A chunk takes `bytes / bandwidth` of its link, and arrives a latency after that. What is on a link when it
breaks is lost, whole, and with it all that its request still waits to send there. Nothing on a link happens
at the very instant at which it was asked for, but 1 ns later at the earliest, so that no engine has acted at
that instant.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import simpy

from policies.config.fleet import Fault, Fleet, Link
from policies.core.models.shape import ModelShape
from policies.core.seam.events import Handed, Reserve, Send
from policies.routing.apart import DoorApart
from results.metrics import distribution, ratio

LinkProcess = Generator[simpy.Event, Any, None]


class Chunk(NamedTuple):
    """Tokens of a prompt up to `end`, `num_bytes` of them, that were ready at `ready_ns`."""

    request_id: int
    end: int
    num_bytes: int
    is_last: bool
    ready_ns: int


@dataclass(slots=True)
class LinkTotals:
    """What a link did: chunks and bytes that arrived, time it was busy, time that chunks waited for it,
    requests that were lost on it."""

    num_chunks: int = 0
    num_bytes: int = 0
    busy_ns: int = 0
    waited_ns: "list[int]" = field(default_factory=list)
    num_lost: int = 0

    def account(self, duration_ns: float) -> dict[str, Any]:
        """Its figures, of a run that took `duration_ns`."""
        return {
            "num_chunks": self.num_chunks,
            "gb": self.num_bytes / 1e9,
            "busy_fraction": ratio(self.busy_ns, duration_ns),
            "waited_ms": distribution(np.array(self.waited_ns, dtype=np.int64), 1e6),
            "num_lost": self.num_lost,
        }


class SimLink:
    """Link `number` of a fleet in `env`. It tells when a chunk has `left` its sender, when it has `arrived`,
    and which request was `lost`."""

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        settings: Link,
        left: Callable[[int, Chunk, int], object],
        arrived: Callable[[int, Chunk], object],
        lost: Callable[[int, int], object],
    ) -> None:
        self.totals = LinkTotals()
        self._env, self._left, self._arrived, self._lost = env, left, arrived, lost
        self._latency_ns = settings.latency_ns
        faults = sorted(
            [item for item in settings.faults if item.link == number], key=lambda item: item.from_s
        )
        self._speeds = _speeds(settings.gb_per_s, faults)
        self._queue: deque[Chunk] = deque()
        self._has_more = env.event()
        env.process(self._run())

    def send(self, chunk: Chunk) -> None:
        """Take `chunk` to send after all that wait."""
        self._queue.append(chunk)
        if not self._has_more.triggered:
            self._has_more.succeed()

    def drop(self, request_id: int) -> None:
        """Nothing of a request is to be sent any more; what is on the way goes on."""
        self._queue = deque([item for item in self._queue if item.request_id != request_id])

    def _run(self) -> LinkProcess:
        env, totals = self._env, self.totals
        while True:
            if not self._queue:
                self._has_more = env.event()
                yield self._has_more
            yield env.timeout(1)
            if not self._queue:
                continue
            chunk, started_ns = self._queue.popleft(), int(env.now)
            totals.waited_ns.append(started_ns - 1 - chunk.ready_ns)
            ended_ns, is_whole = self._end(started_ns, chunk.num_bytes)
            if ended_ns > started_ns:
                yield env.timeout(ended_ns - started_ns)
            totals.busy_ns += ended_ns - started_ns + 1
            if is_whole:
                totals.num_chunks += 1
                totals.num_bytes += chunk.num_bytes
                self._left(ended_ns, chunk, ended_ns - started_ns)
                env.process(self._fly(chunk))
            else:
                totals.num_lost += 1
                self.drop(chunk.request_id)
                self._lost(ended_ns, chunk.request_id)

    def _fly(self, chunk: Chunk) -> LinkProcess:
        yield self._env.timeout(self._latency_ns)
        self._arrived(int(self._env.now), chunk)

    def _end(self, started_ns: int, num_bytes: int) -> tuple[int, bool]:
        """When `num_bytes` that begin at `started_ns` are through, or lost."""
        at_ns, left = started_ns, float(num_bytes)
        for until_ns, gb_per_s in self._speeds:
            if until_ns is not None and at_ns >= until_ns:
                continue
            if gb_per_s == 0:
                return at_ns, False
            needed_ns = round(left / gb_per_s)  # GB/s is bytes/ns
            if until_ns is None or at_ns + needed_ns <= until_ns:
                return at_ns + needed_ns, True
            left -= (until_ns - at_ns) * gb_per_s
            at_ns = until_ns
        raise AssertionError("the last speed has no end")


def _speeds(gb_per_s: float, faults: Sequence[Fault]) -> list[tuple[int | None, float]]:
    """Bandwidth as steps: (until when, in ns, None: for ever; GB/s). Where faults overlap, the later one
    counts from its beginning on."""
    edges = sorted({round(1e9 * at) for item in faults for at in (item.from_s, item.until_s)})
    steps: list[tuple[int | None, float]] = []
    at_ns = 0
    for edge in edges:
        covering = [item for item in faults if 1e9 * item.from_s <= at_ns < round(1e9 * item.until_s)]
        if edge > at_ns:
            steps.append((edge, gb_per_s * (covering[-1].speed if covering else 1.0)))
        at_ns = edge
    return [*steps, (None, gb_per_s)]


@dataclass(slots=True)
class Journey:
    """One prompt's way: when its last chunk was ready to go, and arrived; what its chunks took of their link,
    with the latency of one."""

    ready_ns: int = 0
    arrived_ns: int = 0
    wire_ns: int = 0


class Transfers:
    """All links of a fleet, between its door and its engines: hears what engines say to each other."""

    def __init__(
        self,
        env: simpy.Environment,
        fleet: Fleet,
        settings: Link,
        door: DoorApart,
        model: ModelShape,
        planes: int,
    ) -> None:
        self.journeys: dict[int, Journey] = {}
        self._env, self._fleet, self._settings, self._door = env, fleet, settings, door
        self._token_bytes = planes * model.kv_bytes_per_token_and_depth
        self._hidden_bytes = model.hidden_bytes_per_row
        self.links = [
            SimLink(env, at, settings, self._left, self._arrived, door.lost)
            for at in range(settings.number(fleet.prefill, fleet.decode))
        ]
        door.on_drop = self._drop

    def heard(self, command: Handed) -> None:
        """An engine says that a request has room, or that a chunk is ready to go."""
        if isinstance(command, Reserve):
            self._door.reserved(command.request_id)
        elif isinstance(command, Send):
            now_ns = int(self._env.now)
            num_bytes = (command.end - command.start) * self._token_bytes
            num_bytes += self._hidden_bytes if command.is_last else 0
            chunk = Chunk(command.request_id, command.end, num_bytes, command.is_last, now_ns)
            self.journeys.setdefault(command.request_id, Journey()).ready_ns = now_ns
            self.link_of(command.request_id).send(chunk)

    def link_of(self, request_id: int) -> SimLink:
        sender, receiver = self._door.places[request_id]
        return self.links[self._settings.between(sender, receiver - self._fleet.prefill, self._fleet.decode)]

    def _left(self, at_ns: int, chunk: Chunk, took_ns: int) -> None:
        self.journeys[chunk.request_id].wire_ns += took_ns
        if chunk.is_last:
            self._door.sent(at_ns, chunk.request_id)

    def _arrived(self, at_ns: int, chunk: Chunk) -> None:
        if chunk.is_last:
            journey = self.journeys[chunk.request_id]
            journey.arrived_ns = at_ns
            journey.wire_ns += self._settings.latency_ns
        self._door.received(at_ns, chunk.request_id, chunk.end)

    def _drop(self, request_id: int) -> None:
        self.link_of(request_id).drop(request_id)

    def account(self, duration_ns: float) -> dict[str, Any]:
        """Figures of all links, and of the prompts whose last chunk arrived: `exposed` is from when that was
        ready to when it arrived, what decoding waited for; the rest of what a prompt's chunks took was hidden
        behind the rest of the prompt."""
        whole = [item for item in self.journeys.values() if item.arrived_ns]
        exposed = [item.arrived_ns - item.ready_ns for item in whole]
        wire_ns = sum([item.wire_ns for item in whole])
        hidden = [max(0, item.wire_ns - late) for item, late in zip(whole, exposed, strict=True)]
        return {
            "links": [link.totals.account(duration_ns) for link in self.links],
            "num_transferred": len(whole),
            "exposed_ms": distribution(np.array(exposed, dtype=np.int64), 1e6),
            "wire_ms": distribution(np.array([item.wire_ns for item in whole], dtype=np.int64), 1e6),
            "hidden_share": ratio(sum(hidden), wire_ns),
            "waited_for_room_ms": distribution(np.array(self._door.waited_ns, dtype=np.int64), 1e6),
        }
