"""The engine's end: an open inbox that is filled over a link, and what its clients are told.

When a request arrived or a client hung up is the engine's time of taking it in, never an earlier one: a
recorded run is then decided again from its log alone. So mail is read once for every time that the engine
asks at, the first time that it does: what came later has not arrived before the engine's time moves on.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from policies.core.engine.runlog import RequestRecord
from policies.core.seam.events import Arrival, HangUp, Mail
from policies.core.seam.inbox import Mailbox
from policies.core.seam.request import Request
from workloads.asked import Asked
from workloads.serving.link import Link, Message

Write = Callable[[RequestRecord, tuple[int | None, ...]], None]


class Sent(NamedTuple):
    """Times of the HTTP process on the run's clock, None where nothing was sent: when a request's head had
    come, when its first token and when the end of its answer were handed to the system."""

    received_ns: int | None = None
    first_ns: int | None = None
    finished_ns: int | None = None


HTTP_COLUMNS = tuple(f"http_{name}" for name in Sent._fields)


class LiveInbox(Mailbox):
    """Requests from `link`. `write` gets the record of each that has ended, with its HTTP times."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.write: Write = lambda record, sent: None
        self._link = link
        self._taken_ns = -1
        self._raw: deque[Asked | int] = deque()
        self._asked: dict[int, Asked] = {}
        self._sent: dict[int, Sent] = {}
        self._to_write: dict[int, RequestRecord] = {}
        self.num_asked = 0
        self._is_drained = False
        self.is_deserted = False
        """Whether the HTTP process is gone before it had drained."""

    def asked(self, request_id: int) -> Asked:
        """What the client of a request that has not ended asked for."""
        return self._asked[request_id]

    def pop(self, now_ns: int) -> Mail | None:
        if now_ns > self._taken_ns:
            self._taken_ns = now_ns
            self.look()
            while self._raw:
                self._take(self._raw.popleft(), now_ns)
            if self._must_close:
                self.close()
        return super().pop(now_ns)

    def next_ns(self) -> int | None:
        """Mail that has come and was not taken in is due as soon as time moves on."""
        self.look()
        known_ns = super().next_ns()
        return self._taken_ns + 1 if known_ns is None and (self._raw or self._must_close) else known_ns

    @property
    def _must_close(self) -> bool:
        return self._is_drained and not self._is_closed

    def look(self) -> bool:
        """Read what has come; return whether there is mail for the engine."""
        self._link.flush()
        for message in self._link.receive():
            self._hear(message)
        if self._link.is_closed and not self._is_drained:
            self._is_drained = self.is_deserted = True
            self._raw.extend(self._asked)  # nobody is left to answer to
        return bool(self._raw) or self._must_close

    def _hear(self, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "ask":
                asked = Asked.from_fields(fields, message.tail)
                self._asked[asked.number] = asked
                self._raw.append(asked)
            case "hang_up":
                self._raw.append(int(fields["number"]))
            case "sent":
                number, sent = int(fields["number"]), Sent(*fields["times"])
                record = self._to_write.pop(number, None)
                if record is not None:
                    self.write(record, sent)
                elif number in self._asked:  # of a client that hangs up, which the engine does not know yet
                    self._sent[number] = sent
            case "drained":
                self._is_drained = True

    def _take(self, item: Asked | int, now_ns: int) -> None:
        if isinstance(item, Asked):
            self.num_asked += 1
            request = Request(item.number, now_ns, len(item.prompt), item.max_tokens, item.priority)
            self.post(Arrival(now_ns, request))
        elif item in self._asked and not self._is_closed:
            self.post(HangUp(now_ns, item))

    def tell(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Clients get tokens: pairs of request and token id. Those of requests that have ended are
        surplus."""
        rows = [pair for pair in tokens if pair[0] in self._asked]
        if rows:
            self._link.send("tokens", rows=rows)

    def record_ended(self, record: RequestRecord) -> None:
        """A request has ended: its client is told how, and its record waits for the HTTP times."""
        number = record.request.request_id
        del self._asked[number]
        sent = self._sent.pop(number, None)
        if sent is None:
            self._to_write[number] = record
        else:
            self.write(record, sent)
        self._link.send("end", number=number, status=record.status.value, reason=record.reason)

    def hear_the_rest(self, is_over: Callable[[], bool]) -> None:
        """The engine has ended: take in HTTP times until the other side is gone or `is_over`, and write what
        is left without."""
        while not self._link.is_closed and not is_over():
            self._link.flush()
            self._link.wait(0.05)
            for message in self._link.receive():
                if message.kind == "sent":
                    self._hear(message)
        for record in self._records():
            self.write(record, Sent())

    def _records(self) -> Iterator[RequestRecord]:
        while self._to_write:
            yield self._to_write.pop(next(iter(self._to_write)))
