"""The door of a fleet: a workload's clients on one side, a mailbox for every engine on the other, and a
router between them. Knows no engine: it hears of ends through its mailboxes.
"""

from collections.abc import Callable, Sequence
from functools import partial

from policies.core.seam.clients import Clients
from policies.core.seam.events import Arrival
from policies.core.seam.inbox import Mailbox
from policies.core.seam.request import Request, Status
from policies.routing.router import Choose, Load


class Door:
    """Posts what `clients` send, when it is due, to the engine that `choose` names; a hang-up follows its
    request. `pools` says how many tokens each engine's pool holds, `clock` what time it is.

    Between several engines the news of an end takes 1 ns from when its engine acts on it: whom a closed loop
    lets in for it arrives then, when no engine can have decided already about the same instant. With one
    engine it is at once, as without a door.
    """

    def __init__(
        self, clients: Clients, pools: Sequence[int], choose: Choose, clock: Callable[[], int]
    ) -> None:
        self.boxes = [
            Mailbox(partial(self._ended, at), foresees=self.quiet_until_ns) for at in range(len(pools))
        ]
        self.on_change: Callable[[], None] = lambda: None
        """Called when an end may have changed what is due next."""
        self.places: dict[int, tuple[int, ...]] = {}
        """The boxes that every request went to, by id, in order of arrival: here one each."""
        self.numbers: dict[int, int] = {}
        """How many arrived before each."""
        self._clients = clients
        self._choose = choose
        self._clock = clock
        self._loads = [Load(0, 0, pool) for pool in pools]
        self._is_closed = False

    def next_ns(self) -> int | None:
        """When something is due next; None when nothing comes by itself."""
        return self._clients.next_ns()

    def quiet_until_ns(self) -> int | None:
        """Nothing is posted before then, whatever ends; None: never."""
        return 0 if self._clients.waits_for_an_end else self._clients.next_ns()

    def post_due(self, now_ns: int) -> bool:
        """Post all that is due at `now_ns`; return whether more may come. Once none will, the boxes are
        closed."""
        while not self._is_closed and (mail := self._clients.pop(now_ns)) is not None:
            if isinstance(mail, Arrival):
                at = self._choose(mail.request, tuple(self._loads))
                self.numbers[mail.request.request_id] = len(self.places)
                self.places[mail.request.request_id] = (at,)
                self._count(at, mail.request, 1)
            else:
                (at,) = self.places[mail.request_id]
            self.boxes[at].post(mail)
        if self._clients.is_exhausted and not self._is_closed:
            self._is_closed = True
            for box in self.boxes:
                box.close()
        return not self._is_closed

    def _ended(self, at: int, request: Request, status: Status, known_ns: int) -> None:
        self._count(at, request, -1)
        if len(self.boxes) == 1:
            self._clients.ended(request, status, known_ns)
            self.post_due(known_ns)
        else:
            self._clients.ended(request, status, max(known_ns, self._clock()) + 1)
        self.on_change()

    def _count(self, at: int, request: Request, change: int) -> None:
        requests, kv_positions, pool = self._loads[at]
        self._loads[at] = Load(requests + change, kv_positions + change * request.num_kv_positions, pool)
