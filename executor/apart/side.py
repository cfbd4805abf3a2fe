"""One engine's side of a run with two: what it says goes over the wire, what comes over it becomes mail.

The clients and the door (`policies.routing.apart`) are on the side that computes prompts. Both sides count
time from one moment of one host's clock. Mail bears the time at which it was put into its box here, after all
that the engine has acted on, which is what its log needs to be decided again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from executor.apart.copies import Copies, Passed
from executor.apart.wire import Socket, Wire
from executor.pools import Pools
from executor.timeline import Timeline
from policies.core.errors import InputError
from policies.core.seam.clients import Clients
from policies.core.seam.events import Arrival, Handed, Import, Mail, Received, Reserve, Send
from policies.core.seam.inbox import Listener, Mailbox
from policies.core.seam.request import Request, Status
from policies.routing.apart import DoorApart
from policies.routing.router import Choose

START_S = 600.0
"""How long one side may take to be ready after the other."""


class Side(Protocol):
    """What a run asks of its side."""

    @property
    def inbox(self) -> Mailbox: ...

    def start(self, timeline: Timeline, pools: Pools) -> None:
        """The engine is ready: wait for the other, and begin to count time."""
        ...

    def heard(self, command: Handed) -> None:
        """The engine says something to the other."""
        ...

    def look(self) -> None:
        """See what has come, and what is due. Raises `RunError` when the other side failed, or is gone."""
        ...


class Box(Mailbox):
    """Its mail bears the time at which it is posted."""

    def __init__(self, on_end: Listener, clock: Callable[[], int]) -> None:
        super().__init__(on_end)
        self._clock = clock

    def post(self, mail: Mail) -> None:
        at_ns = self._clock() + 1
        if isinstance(mail, Arrival):
            super().post(Arrival(at_ns, replace(mail.request, arrival_ns=at_ns)))
        else:
            super().post(mail._replace(at_ns=at_ns))


class RemoteBox(Mailbox):
    """The box of the other side."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def post(self, mail: Mail) -> None:
        self._wire.send("mail", mail)

    def close(self) -> None:
        self._wire.send("close")


class PromptSide:
    """Computes prompts; `clients` stand before it. `pools` are the tokens that both pools hold."""

    def __init__(
        self, clients: Clients, pools: tuple[int, int], choose: tuple[Choose, Choose], wire: Wire
    ) -> None:
        self._wire = wire
        self._timeline: Timeline | None = None
        self._copies: Copies | None = None
        self._leaving: deque[tuple[Passed, int, bool]] = deque()
        self.copied_bytes = 0
        self.is_socket = isinstance(wire, Socket)

        def box(at: int, on_end: Listener) -> Mailbox:
            return RemoteBox(wire) if at else Box(on_end, self.clock)

        self.door = DoorApart(clients, pools, 1, choose, self.clock, box)

    @property
    def inbox(self) -> Mailbox:
        return self.door.boxes[0]

    def clock(self) -> int:
        return self._timeline.now_ns() if self._timeline is not None else 0

    def start(self, timeline: Timeline, pools: Pools) -> None:
        _expect(self._wire, "ready")
        self._wire.send("start", timeline.restart())
        self._timeline, self._copies = timeline, Copies(pools)

    def heard(self, command: Handed) -> None:
        assert isinstance(command, Send) and self._copies is not None
        buffer, passed = self._copies.take(command)
        self.copied_bytes += buffer.nbytes
        self._leaving.append((passed, command.request_id, command.is_last))
        words = ("chunk", command.request_id, command.start, command.end, passed)
        self._wire.send(*words, tensor=buffer)

    def look(self) -> None:
        self.door.post_due(self.clock())
        while self._leaving and self._leaving[0][0].query():
            _, request_id, is_last = self._leaving.popleft()
            if is_last:
                self.door.sent(self.clock(), request_id)
        for (what, *rest), _ in self._wire.poll():
            if what == "reserved":
                self.door.reserved(*rest)
            elif what == "ended":
                self.door.ended(1, *rest)
        self.door.post_due(self.clock())


class DecodeSide:
    """Decodes what it receives."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._timeline: Timeline | None = None
        self._copies: Copies | None = None
        self._staged: dict[int, deque[tuple[torch.Tensor, Passed | None]]] = {}
        """Chunks that have come and that the engine has not taken, by live request."""
        self.inbox = Box(self._ended, self.clock)

    def clock(self) -> int:
        return self._timeline.now_ns() if self._timeline is not None else 0

    def start(self, timeline: Timeline, pools: Pools) -> None:
        self._wire.send("ready")
        (start_ns,) = _expect(self._wire, "start")
        timeline.restart(start_ns)
        self._timeline, self._copies = timeline, Copies(pools)

    def heard(self, command: Handed) -> None:
        assert self._copies is not None
        if isinstance(command, Reserve):
            self._wire.send("reserved", command.request_id)
        elif isinstance(command, Import):
            buffer, passed = self._staged[command.request_id].popleft()
            self._copies.put(command, buffer, passed)

    def look(self) -> None:
        for (what, *rest), tensor in self._wire.poll():
            if what == "mail":
                self._post(rest[0])
            elif what == "chunk" and rest[0] in self._staged:
                request_id, _, end, passed = rest
                assert tensor is not None
                self._staged[request_id].append((tensor, passed))
                self.inbox.post(Received(0, request_id, end))
            elif what == "close":
                self.inbox.close()

    def _post(self, mail: Mail) -> None:
        assert self._copies is not None
        if isinstance(mail, Arrival):
            self._staged[mail.request.request_id] = deque()
            self.inbox.post(mail)
        elif mail.request_id in self._staged:
            self._copies.join()  # a prompt that is lost is computed here, after what has come of it
            self.inbox.post(mail)

    def _ended(self, request: Request, status: Status, known_ns: int) -> None:
        del self._staged[request.request_id]
        self._wire.send("ended", request, status, known_ns)


def _expect(wire: Wire, word: str) -> tuple[Any, ...]:
    """What the other side says with `word`, the first that it says."""
    for (what, *rest), _ in wire.poll(START_S):
        assert what == word, f"{what} before {word}"
        return tuple(rest)
    raise InputError(f"the other engine was not ready within {START_S:.0f} s")
