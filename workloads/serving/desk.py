"""The HTTP process's view of the engine: who has asked and not yet been answered, and what came for them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from policies.core.seam.request import Status
from workloads.asked import Asked
from workloads.serving.gauges import Gauges
from workloads.serving.link import Link


class Full(Exception):
    """As many requests are outstanding as may be."""


class Gone(Exception):
    """The engine is gone, or the client is."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that the engine has: tokens that came and were not fetched, and how it ended."""

    asked: Asked
    received_ns: int
    tokens: deque[int] = field(default_factory=deque)
    status: Status | None = None
    reason: str = ""
    first_ns: int | None = None
    last_ns: int | None = None
    num_sent: int = 0
    is_lost: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def fetch(self) -> list[int]:
        """Tokens as soon as there are some; none when the request has ended. Raises `Gone` when the engine
        is."""
        while not self.tokens and self.status is None:
            if self.is_lost:
                raise Gone("the engine has stopped")
            self.news.clear()
            await self.news.wait()
        found = list(self.tokens)
        self.tokens.clear()
        return found


class Desk:
    """Hands requests to the engine over `link` and what comes back to their tickets. `on_idle` is called when
    it drains and no request is left at the engine; `on_lost` when the engine is gone."""

    def __init__(self, link: Link, origin_ns: int, max_outstanding: int, gauges: Gauges) -> None:
        self._link = link
        self._origin_ns = origin_ns
        self._max_outstanding = max_outstanding
        self._gauges = gauges
        self._open: dict[int, Ticket] = {}
        self._next = 0
        self._is_writing = False
        self.is_draining = self.is_lost = False
        self.on_idle: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Begin to hear the engine, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._link.fileno(), self._read)

    def now_ns(self) -> int:
        """The run's clock."""
        return time.perf_counter_ns() - self._origin_ns

    @property
    def num_outstanding(self) -> int:
        return len(self._open)

    def submit(self, received_ns: int, **asked: Any) -> Ticket:
        """Hand a request to the engine. Raises `Full` and `Gone`."""
        if self.is_draining or self.is_lost:
            raise Gone("the server is stopping")
        if len(self._open) >= self._max_outstanding:
            raise Full
        ticket = Ticket(Asked(self._next, **asked), received_ns)
        self._next += 1
        self._open[ticket.asked.number] = ticket
        self._gauges.asked(len(ticket.asked.prompt), len(self._open))
        self._send("ask", ticket.asked.prompt.tobytes(), **ticket.asked.fields())
        return ticket

    def hang_up(self, ticket: Ticket) -> None:
        """Nobody waits for the answer any more."""
        if ticket.status is None and not self.is_lost:
            self._send("hang_up", number=ticket.asked.number)

    def sent(self, ticket: Ticket, num_tokens: int, at_once: bool = False) -> None:
        """So many tokens more were handed to the system; where `at_once`, as a whole answer."""
        now_ns = self.now_ns()
        self._gauges.tokens(ticket.received_ns, ticket.last_ns, now_ns, num_tokens, at_once)
        if ticket.first_ns is None:
            ticket.first_ns = now_ns
        ticket.last_ns = now_ns
        ticket.num_sent += num_tokens

    def answered(self, ticket: Ticket, is_whole: bool) -> None:
        """The answer is out, or its client is gone."""
        finished_ns = self.now_ns() if is_whole else None
        if finished_ns is not None:
            self._gauges.answered(ticket.received_ns, finished_ns)
        times = (ticket.received_ns, ticket.first_ns, finished_ns)
        self._send("sent", number=ticket.asked.number, times=times)

    def drain(self) -> None:
        """Take no more; tell the engine when it has nothing left."""
        if not self.is_draining:
            self.is_draining = True
            self._check_idle()

    def _send(self, kind: str, tail: bytes = b"", **fields: Any) -> None:
        self._link.send(kind, tail, **fields)
        self._write_later()

    def _write_later(self) -> None:
        if not self._link.flush() and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._link.fileno(), self._write)

    def _write(self) -> None:
        if self._link.flush():
            self._is_writing = False
            self._loop.remove_writer(self._link.fileno())

    def _read(self) -> None:
        for message in self._link.receive():
            fields = message.fields
            match message.kind:
                case "tokens":
                    for number, token in fields["rows"]:
                        ticket = self._open.get(number)
                        if ticket is not None:
                            ticket.tokens.append(token)
                            ticket.news.set()
                case "end":
                    ticket = self._open.pop(fields["number"])
                    ticket.status, ticket.reason = Status(fields["status"]), fields["reason"]
                    ticket.news.set()
                    self._gauges.ended(fields["status"], len(self._open))
                    self._check_idle()
                case "drain":
                    self.drain()
        if self._link.is_closed and not self.is_lost:
            self._loop.remove_reader(self._link.fileno())
            self.is_lost = True
            for ticket in self._open.values():
                ticket.is_lost = True
                ticket.news.set()
            self._open.clear()
            self.on_lost()

    def _check_idle(self) -> None:
        if self.is_draining and not self._open:
            self._send("drained")
            self.on_idle()
