"""How an engine of several gets its mail, and whom it tells what came of it.

Engine 0 has the hub: the clients and the door (`policies.routing.apart`), which names for every request the
engines that it goes to. All others have an outpost, which hears of the door over a wire. All count time from
one moment of one host's clock. Mail bears the time at which it was put into its box here, after all that the
engine has acted on, which is what its log needs to be decided again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from executor.apart.wire import Wire, Wires
from executor.timeline import Timeline
from policies.config.fleet import Fleet
from policies.core.errors import InputError
from policies.core.seam.clients import Clients
from policies.core.seam.events import Arrival, Mail
from policies.core.seam.inbox import Listener, Mailbox
from policies.core.seam.request import Request, Status
from policies.routing.apart import DoorApart

START_S = 600.0
"""How long one engine may take to be ready after another."""


class Post(Protocol):
    """Where an engine's mail comes from."""

    inbox: Mailbox

    def start(self, timeline: Timeline) -> None:
        """The engine is ready: wait for the others, and begin to count time."""
        ...

    def clock(self) -> int: ...

    def tell(self, word: str, *rest: Any) -> None:
        """Tell the door, by the name of its method, what became of a request, but for `cut`, sender and
        receiver: between the two nothing gets through any more."""
        ...

    def receiver(self, request_id: int) -> int:
        """Who decodes a request whose prompt is computed here."""
        ...

    def look(self) -> None:
        """See what has come, and what is due. Raises `RunError` when another engine failed, or is gone."""
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
    """The box of an engine elsewhere, which is told who decodes each of its requests."""

    def __init__(self, wire: Wire, receiver: Callable[[int], int]) -> None:
        super().__init__()
        self._wire, self._receiver = wire, receiver

    def post(self, mail: Mail) -> None:
        request_id = mail.request.request_id if isinstance(mail, Arrival) else mail.request_id
        self._wire.send("mail", mail, self._receiver(request_id))

    def close(self) -> None:
        self._wire.send("close")


class _Clock:
    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    def clock(self) -> int:
        return self._timeline.now_ns() if self._timeline is not None else 0


class Hub(_Clock):
    """The clients and the door of `fleet`, whose pools are all alike."""

    def __init__(self, fleet: Fleet, clients: Clients, seed: int, wires: Wires) -> None:
        super().__init__()
        self._wires = wires
        number = fleet.prefill + fleet.decode
        choose = fleet.router.chooser(fleet.prefill, seed), fleet.router.chooser(fleet.decode, seed)

        def box(at: int, on_end: Listener) -> Mailbox:
            return RemoteBox(wires.talk[at], self.receiver) if at else Box(on_end, self.clock)

        self.door = DoorApart(clients, [1] * number, fleet.prefill, choose, self.clock, box)
        self.inbox = self.door.boxes[0]

    def start(self, timeline: Timeline) -> None:
        for wire in self._wires.talk.values():
            _expect(wire, "ready")
        self._wires.send("start", timeline.restart())
        self._timeline = timeline

    def tell(self, word: str, *rest: Any) -> None:
        if word == "cut":
            for request_id, places in self.door.places.items():
                if places == rest and self.door.has_begun(request_id):
                    self.door.lost(self.clock(), request_id)
        else:
            getattr(self.door, word)(*rest)

    def receiver(self, request_id: int) -> int:
        return self.door.places[request_id][1]

    def look(self) -> None:
        self.door.post_due(self.clock())
        for wire in self._wires.talk.values():
            for (word, *rest), _ in wire.poll():
                self.tell(word, *rest)
        self.door.post_due(self.clock())


class Outpost(_Clock):
    """Of engine `at`."""

    def __init__(self, at: int, wires: Wires) -> None:
        super().__init__()
        (self._wire,) = wires.talk.values()
        self._at = at
        self._receivers: dict[int, int] = {}
        self.inbox = Box(self._ended, self.clock)
        self.on_mail: Callable[[Mail], None] = self.inbox.post
        self.on_end: Callable[[int], None] = lambda request_id: None

    def start(self, timeline: Timeline) -> None:
        self._wire.send("ready")
        (start_ns,) = _expect(self._wire, "start")
        timeline.restart(start_ns)
        self._timeline = timeline

    def tell(self, word: str, *rest: Any) -> None:
        self._wire.send(word, *rest)

    def receiver(self, request_id: int) -> int:
        return self._receivers[request_id]

    def look(self) -> None:
        for (word, *rest), _ in self._wire.poll():
            if word == "close":
                self.inbox.close()
                continue
            mail, receiver = rest
            if isinstance(mail, Arrival):
                self._receivers[mail.request.request_id] = receiver
            self.on_mail(mail)

    def _ended(self, request: Request, status: Status, known_ns: int) -> None:
        del self._receivers[request.request_id]
        self.on_end(request.request_id)
        self.tell("ended", self._at, request, status, known_ns)


def _expect(wire: Wire, word: str) -> Sequence[Any]:
    """What the other side says with `word`, the first that it says."""
    for (what, *rest), _ in wire.poll(START_S):
        assert what == word, f"{what} before {word}"
        return rest
    raise InputError(f"another engine was not ready within {START_S:.0f} s")
