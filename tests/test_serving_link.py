"""The link between an engine and its HTTP process, and the inbox at its end."""

import signal
import socket
from array import array
from random import Random

from policies.core.engine.runlog import RequestRecord
from policies.core.seam.events import Arrival, HangUp
from policies.core.seam.request import Request, Status
from workloads.asked import Asked, Sampling
from workloads.serving.inbox import LiveInbox, Sent
from workloads.serving.link import Link
from workloads.serving.options import Place
from workloads.serving.server import Server, listen
from workloads.serving.settings import Limits


def pair() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours), Link(theirs)


def test_messages_come_whole_and_in_order_whatever_the_other_side_takes_at_a_time() -> None:
    chance = Random(4)
    here, there = pair()
    tails = [chance.randbytes(chance.choice([0, 3, 70_000, 900_000])) for _ in range(30)]
    for number, tail in enumerate(tails):
        here.send("ask", tail, number=number)
    found = []
    while not here.flush() or len(found) < len(tails):
        found += there.receive()
    assert [message.fields["number"] for message in found] == list(range(30))
    assert [message.tail for message in found] == tails
    here.send("last")
    here.close()
    assert [message.kind for message in there.receive()] == ["last"]
    assert there.receive() == [] and there.is_closed
    there.send("nobody hears")
    assert there.flush()


def asked(number: int) -> Asked:
    return Asked(number, array("i", [1, 2, 3]), 5, -2, Sampling(0.5, 7, 0.9, 11), ("a", "b"), True)


def ask(link: Link, request: Asked) -> None:
    link.send("ask", request.prompt.tobytes(), **request.fields())


def test_mail_is_taken_in_at_the_first_asking_of_a_time_and_bears_that_time() -> None:
    front, engine = pair()
    inbox = LiveInbox(engine)
    assert inbox.pop(10) is None and inbox.next_ns() is None
    ask(front, asked(0))
    assert inbox.pop(10) is None, "what comes after the engine has asked at a time is later than it"
    assert inbox.next_ns() == 11
    assert inbox.pop(25) == Arrival(25, Request(0, 25, 3, 5, -2)) and inbox.asked(0) == asked(0)
    front.send("hang_up", number=0)
    ask(front, asked(1))
    assert [inbox.pop(30), inbox.pop(30)] == [Arrival(30, Request(1, 30, 3, 5, -2)), HangUp(30, 0)]
    front.send("drained")
    assert not inbox.is_exhausted and inbox.pop(31) is None and inbox.is_exhausted


def test_records_wait_for_their_http_times_which_may_come_first() -> None:
    front, engine = pair()
    inbox = LiveInbox(engine)
    written: list[tuple[int, object]] = []
    inbox.write = lambda record, sent: written.append((record.request.request_id, sent))
    for number in range(3):
        ask(front, asked(number))
    while inbox.pop(5) is not None:
        pass
    records = [RequestRecord(Request(number, 5, 3, 5), number) for number in range(3)]
    front.send("sent", number=1, times=[1, 2, None])
    inbox.look()
    for record in records:
        record.status = Status.FINISHED
        inbox.record_ended(record)
    assert written == [(1, Sent(1, 2, None))]
    front.send("sent", number=0, times=[1, 2, 3])
    front.close()
    inbox.hear_the_rest(lambda: False)
    assert written[1:] == [(0, Sent(1, 2, 3)), (2, Sent())]


def test_a_client_process_that_is_gone_hangs_up_for_all() -> None:
    front, engine = pair()
    inbox = LiveInbox(engine)
    ask(front, asked(0))
    inbox.pop(1)
    front.close()
    assert inbox.pop(2) == HangUp(2, 0) and inbox.is_deserted and inbox.is_exhausted


def test_a_signal_says_nothing_while_a_message_is_written() -> None:
    place = Place("127.0.0.1", 0, Limits(), None)
    server = Server(place, listen(place))
    sent: list[str] = []
    server._link.send = lambda kind, **fields: sent.append(kind)  # type: ignore[method-assign]
    server._press(signal.SIGTERM, None)
    assert sent == []
    assert not server.is_stopped() and sent == ["drain"]
    assert not server.is_stopped() and sent == ["drain"]
    server._press(signal.SIGTERM, None)
    assert server.is_stopped()
    server._end_front()
