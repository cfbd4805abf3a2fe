"""The door of a fleet whose prompts are computed by some engines and continued by others.

A router names both when a request arrives. It goes to the one that decodes first, which says when it has room
for the whole; only then does the prompt begin, so that whatever is computed can be sent, and no pool waits
for another. Where no room is free, requests wait before their prompts begin.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from policies.core.seam.clients import Clients
from policies.core.seam.events import Arrival, HangUp, Lost, Received, Sent
from policies.core.seam.inbox import Listener, Mailbox
from policies.core.seam.request import Request, Status
from policies.routing.router import Choose, Load


class DoorApart:
    """Boxes of `prefill` engines and then of `decode` ones, whose pools hold `pools` tokens, in this order.
    `choose` are the routers of both sides, `clock` says what time it is.

    What one engine's step makes others do reaches them 1 ns later, when none of them can have decided already
    about the same instant. Whoever sends tells `sent`, `received` and `lost` what became of a prompt.
    """

    def __init__(
        self,
        clients: Clients,
        pools: Sequence[int],
        prefill: int,
        choose: tuple[Choose, Choose],
        clock: Callable[[], int],
        make_box: Callable[[int, Listener], Mailbox] = lambda at, on_end: Mailbox(on_end),
    ) -> None:
        self.boxes = [make_box(at, partial(self.ended, at)) for at in range(len(pools))]
        self.on_change: Callable[[], None] = lambda: None
        self.on_drop: Callable[[int], None] = lambda request_id: None
        """Called with a request of which nothing is to be sent any more."""
        self.places: dict[int, tuple[int, ...]] = {}
        """The boxes that every request went to, by id, in order of arrival."""
        self.numbers: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        """Every request as its client sent it, by id."""
        self.waited_ns: list[int] = []
        """How long each prompt that began had waited for room where it is decoded."""
        self._clients, self._choose, self._clock, self._prefill = clients, choose, clock, prefill
        self._loads = [Load(0, 0, pool) for pool in pools]
        self._waiting: dict[int, Request] = {}
        """Requests that have no room yet."""
        self._live: list[set[int]] = [set() for _ in pools]
        self._lost: set[int] = set()
        """Live requests whose prompts were lost on the way."""
        self._is_closed = False

    def next_ns(self) -> int | None:
        return self._clients.next_ns()

    def post_due(self, now_ns: int) -> bool:
        """Post all that is due at `now_ns`; return whether more may come. Once none will, the boxes are
        closed."""
        while not self._is_closed and (mail := self._clients.pop(now_ns)) is not None:
            if isinstance(mail, Arrival):
                self._arrive(mail)
            elif isinstance(mail, HangUp):
                self._withdraw(mail.request_id)
                for at in self.places[mail.request_id]:
                    self._post(at, mail)
        if self._clients.is_exhausted and not self._waiting and not any(self._live) and not self._is_closed:
            self._is_closed = True
            for box in self.boxes:
                box.close()
        return not self._is_closed

    def reserved(self, request_id: int) -> None:
        """There is room for a request where it is decoded: its prompt begins."""
        request = self._waiting.pop(request_id, None)
        if request is None:  # its client has hung up
            return
        at_ns, place = self._clock() + 1, self.places[request_id][0]
        self.waited_ns.append(at_ns - request.arrival_ns)
        self._let_in(place, Arrival(at_ns, replace(request, arrival_ns=at_ns, max_tokens=1)))

    def has_begun(self, request_id: int) -> bool:
        """There is room for a request, so its prompt has begun."""
        return request_id in self.places and request_id not in self._waiting

    def received(self, at_ns: int, request_id: int, end: int) -> None:
        if request_id not in self._lost:
            self._post(self.places[request_id][1], Received(at_ns, request_id, end))

    def sent(self, at_ns: int, request_id: int) -> None:
        self._post(self.places[request_id][0], Sent(at_ns, request_id))

    def lost(self, at_ns: int, request_id: int) -> None:
        """What has been sent until now is all that comes: whoever decodes computes the rest."""
        sender, receiver = self.places[request_id]
        if request_id in self._live[receiver]:
            self._lost.add(request_id)
        self._post(sender, HangUp(at_ns, request_id))
        self._post(receiver, Lost(at_ns, request_id))

    def _arrive(self, mail: Arrival) -> None:
        request, split = mail.request, self._prefill
        prompt = self._choose[0](request, tuple(self._loads[:split]))
        rest = split + self._choose[1](request, tuple(self._loads[split:]))
        self.numbers[request.request_id] = len(self.places)
        self.requests[request.request_id] = request
        self.places[request.request_id] = prompt, rest
        self._waiting[request.request_id] = request
        self._count(prompt, request.prompt_tokens, 1)  # it is on its way there
        self._let_in(rest, mail)

    def _let_in(self, at: int, mail: Arrival) -> None:
        if at >= self._prefill:
            self._count(at, mail.request.num_kv_positions, 1)
        self._live[at].add(mail.request.request_id)
        self.boxes[at].post(mail)

    def _post(self, at: int, mail: HangUp | Received | Sent | Lost) -> None:
        """Post `mail` unless its request has ended there, or never came."""
        if mail.request_id in self._live[at]:
            self.boxes[at].post(mail)

    def ended(self, at: int, request: Request, status: Status, known_ns: int) -> None:
        """A request has ended in engine `at`."""
        request_id, next_ns = request.request_id, max(known_ns, self._clock()) + 1
        self._live[at].discard(request_id)
        if at < self._prefill:
            self._count(at, request.prompt_tokens, -1)
            if status is not Status.SENT:
                self.on_drop(request_id)
            if status is Status.REFUSED:
                self.lost(next_ns, request_id)
        else:
            self._count(at, request.num_kv_positions, -1)
            self._withdraw(request_id)
            self._lost.discard(request_id)
            self._clients.ended(request, status, next_ns)
        self.on_change()

    def _withdraw(self, request_id: int) -> None:
        """The prompt of a request that has no room yet never begins."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._count(self.places[request_id][0], request.prompt_tokens, -1)

    def _count(self, at: int, kv_positions: int, change: int) -> None:
        requests, positions, pool = self._loads[at]
        self._loads[at] = Load(requests + change, positions + change * kv_positions, pool)
