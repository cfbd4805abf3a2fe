"""What an engine with a role does beside its batches: prompts leave it, chunk by chunk, or come in.

Each sender has a lane to each receiver. One that breaks takes with it what is on it and no more: who decodes
computes the rest of those prompts, and the run goes on.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from executor.apart.copies import Copies, Passed
from executor.apart.posts import Hub, Outpost
from executor.apart.wire import Wires
from executor.errors import RunError
from executor.pools import Pools
from executor.timeline import Timeline
from policies.core.seam.events import Arrival, Handed, Import, Lost, Mail, Received, Reserve, Send
from policies.core.seam.inbox import Mailbox


class Side(Protocol):
    """What a run asks of its side."""

    @property
    def inbox(self) -> Mailbox: ...

    def start(self, timeline: Timeline, pools: Pools) -> None:
        """The engine is ready: wait for the others, and begin to count time."""
        ...

    def heard(self, command: Handed) -> None:
        """The engine says something to another."""
        ...

    def look(self) -> None:
        """See what has come, and what is due. Raises `RunError` when another engine failed, or is gone."""
        ...

    def figures(self) -> dict[str, int]:
        """Of copies, for the engine's summary."""
        ...


class PromptSide:
    """Computes prompts as engine `at`. `is_broken` says of a receiver whether its lane is, at some time."""

    def __init__(
        self,
        at: int,
        post: Hub | Outpost,
        wires: Wires,
        is_broken: Callable[[int, int], bool] = lambda receiver, now_ns: False,
    ) -> None:
        self._at, self._post, self._lanes, self._is_broken = at, post, wires.lanes, is_broken
        self._copies: Copies | None = None
        self._leaving: deque[tuple[Passed, int, bool]] = deque()
        self._lost: set[int] = set()
        self._copied_bytes = 0

    @property
    def inbox(self) -> Mailbox:
        return self._post.inbox

    def start(self, timeline: Timeline, pools: Pools) -> None:
        self._post.start(timeline)
        self._copies = Copies(pools)

    def heard(self, command: Handed) -> None:
        assert isinstance(command, Send) and self._copies is not None
        request_id = command.request_id
        if request_id in self._lost:
            return
        now_ns, receiver = self._post.clock(), self._post.receiver(request_id)
        if receiver not in self._lanes or self._is_broken(receiver, now_ns):
            self._lost.add(request_id)
            self._post.tell("lost", now_ns, request_id)
            return
        buffer, passed = self._copies.take(command)
        self._copied_bytes += buffer.nbytes
        self._leaving.append((passed, request_id, command.is_last))
        words = ("chunk", request_id, command.end, command.is_last, passed)
        self._lanes[receiver].send(*words, tensor=buffer)

    def look(self) -> None:
        self._post.look()
        while self._leaving and self._leaving[0][0].query():
            _, request_id, is_last = self._leaving.popleft()
            if is_last:
                self._post.tell("sent", self._post.clock(), request_id)
        for receiver, lane in list(self._lanes.items()):
            try:
                list(lane.poll())
            except RunError:
                del self._lanes[receiver]
                self._post.tell("cut", self._at, receiver)

    def figures(self) -> dict[str, int]:
        return {"copied_bytes": self._copied_bytes, "num_lost": len(self._lost)}


class DecodeSide:
    """Decodes what it receives."""

    def __init__(self, post: Outpost, wires: Wires) -> None:
        self._post, self._lanes = post, wires.lanes
        self._copies: Copies | None = None
        self._staged: dict[int, deque[tuple[torch.Tensor, Passed | None]]] = {}
        """Chunks that have come and that the engine has not taken, by live request."""
        self._awaited: set[int] = set()
        """Live requests of which more is to come."""
        self._copied_bytes = 0
        post.on_mail, post.on_end = self._hear, self._forget

    @property
    def inbox(self) -> Mailbox:
        return self._post.inbox

    def start(self, timeline: Timeline, pools: Pools) -> None:
        self._post.start(timeline)
        self._copies = Copies(pools)

    def heard(self, command: Handed) -> None:
        assert self._copies is not None
        if isinstance(command, Reserve):
            self._post.tell("reserved", command.request_id)
        elif isinstance(command, Import):
            buffer, passed = self._staged[command.request_id].popleft()
            self._copied_bytes += buffer.nbytes
            self._copies.put(command, buffer, passed)

    def look(self) -> None:
        self._post.look()
        for sender, lane in list(self._lanes.items()):
            try:
                for (_, request_id, end, is_last, passed), tensor in lane.poll():
                    if request_id in self._awaited:
                        assert tensor is not None
                        self._staged[request_id].append((tensor, passed))
                        self._post.inbox.post(Received(0, request_id, end))
                        if is_last:
                            self._awaited.discard(request_id)
            except RunError:  # the sender tells what was lost
                del self._lanes[sender]

    def figures(self) -> dict[str, int]:
        return {"copied_bytes": self._copied_bytes}

    def _hear(self, mail: Mail) -> None:
        assert self._copies is not None
        if isinstance(mail, Arrival):
            self._staged[mail.request.request_id] = deque()
            self._awaited.add(mail.request.request_id)
        elif isinstance(mail, Lost):
            if mail.request_id not in self._awaited:  # all of it had come
                return
            self._awaited.discard(mail.request_id)
            self._copies.join()  # it is computed here, after what has come of it
        elif mail.request_id not in self._staged:
            return
        self._post.inbox.post(mail)

    def _forget(self, request_id: int) -> None:
        del self._staged[request_id]
        self._awaited.discard(request_id)
