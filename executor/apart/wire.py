"""What engines of one run send each other: messages in order, some with a tensor. Sending never waits;
whoever listens asks what has come.

A pipe joins two threads of one process, which share a card. A socket joins two processes over
torch.distributed: messages by gloo, tensors too where they are in host memory, by NCCL where each side has a
card of its own. Its threads wait for the other side, so that the engine's host never does. When the other
side is gone, `poll` raises.
"""

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from executor.apart.copies import Passed
from executor.errors import RunError

Message = tuple[tuple[Any, ...], torch.Tensor | None]
FOREVER = timedelta(days=30)
GONE = "the other engine's process has ended"


class Wire(Protocol):
    def send(self, *words: Any, tensor: torch.Tensor | None = None) -> None: ...

    def poll(self, timeout_s: float | None = None) -> Iterator[Message]:
        """What has come; of nothing, what comes within `timeout_s`. Raises `RunError` when the other side
        failed, or is gone."""
        ...

    def close(self) -> None:
        """Nothing more will be sent."""
        ...


@dataclass(frozen=True, slots=True)
class Wires:
    """Of one engine: to those that it talks with, by their numbers, and lanes for chunks, whose other ends
    may be lost without the run."""

    talk: dict[int, Wire]
    lanes: dict[int, Wire]

    def send(self, *words: Any) -> None:
        """To everybody that it talks with."""
        for wire in self.talk.values():
            wire.send(*words)

    def close(self) -> None:
        for wire in [*self.talk.values(), *self.lanes.values()]:
            wire.close()


def pairs_of(prefill: int, decode: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Which of so many engines talk, each pair once, and which have a lane, its sender first. The clients
    stand before engine 0."""
    number = prefill + decode
    lanes = [(sender, receiver) for sender in range(prefill) for receiver in range(prefill, number)]
    return [(0, at) for at in range(1, number)], lanes


class Pipe:
    """One end of a pair of queues."""

    def __init__(self, outgoing: "SimpleQueue[Message]", incoming: "SimpleQueue[Message]") -> None:
        self._outgoing, self._incoming = outgoing, incoming

    @classmethod
    def pair(cls) -> "tuple[Pipe, Pipe]":
        there: SimpleQueue[Message] = SimpleQueue()
        back: SimpleQueue[Message] = SimpleQueue()
        return cls(there, back), cls(back, there)

    @classmethod
    def between(cls, prefill: int, decode: int) -> list[Wires]:
        """All wires of so many engines in one process."""
        wires = [Wires({}, {}) for _ in range(prefill + decode)]
        talk, lanes = pairs_of(prefill, decode)
        for one, other in talk:
            wires[one].talk[other], wires[other].talk[one] = cls.pair()
        for one, other in lanes:
            wires[one].lanes[other], wires[other].lanes[one] = cls.pair()
        return wires

    def send(self, *words: Any, tensor: torch.Tensor | None = None) -> None:
        self._outgoing.put((words, tensor))

    def poll(self, timeout_s: float | None = None) -> Iterator[Message]:
        try:
            words, tensor = (
                self._incoming.get(timeout=timeout_s) if timeout_s else self._incoming.get_nowait()
            )
            while True:
                if words[0] == "failed":
                    raise RunError(f"the other engine failed: {words[1]}")
                if words[0] == "interrupted":
                    raise KeyboardInterrupt
                yield words, tensor
                words, tensor = self._incoming.get_nowait()
        except Empty:
            return

    def close(self) -> None:
        """Nothing is kept that would have to be."""


class Socket(Pipe):
    """To or from the process `peer`, or both: what goes `out` has a group of the two for itself, and so has
    what comes in, so that both ends of a group are in one thread each. `tensors` is a group that brings them
    from device to device (None: they are in host memory)."""

    def __init__(
        self, peer: int, device: torch.device, out: Any = None, into: Any = None, tensors: Any = None
    ) -> None:
        super().__init__(SimpleQueue(), SimpleQueue())
        self._peer, self._device, self._out, self._in, self._tensors = peer, device, out, into, tensors
        self._threads = [
            threading.Thread(target=self._until_it_breaks, args=(work,), daemon=True)
            for group, work in ((out, self._send_all), (into, self._receive_all))
            if group is not None
        ]
        for thread in self._threads:
            thread.start()

    def _until_it_breaks(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError:
            self._incoming.put((("failed", GONE), None))

    def _send_all(self) -> None:
        while True:
            words, tensor = self._outgoing.get()
            for word in words:
                if isinstance(word, Passed):
                    word.wait()
            words = tuple([None if isinstance(word, Passed) else word for word in words])
            text = torch.frombuffer(bytearray(pickle.dumps(words)), dtype=torch.uint8)
            head = torch.tensor([len(text), 0 if tensor is None else tensor.nbytes])
            dist.send(head, self._peer, self._out)
            dist.send(text, self._peer, self._out)
            if tensor is not None:
                group = self._out if self._tensors is None else self._tensors
                dist.send(tensor.view(torch.uint8), self._peer, group)
            if words[0] == "bye":
                return

    def _receive_all(self) -> None:
        while True:
            head = torch.empty(2, dtype=torch.int64)
            dist.recv(head, self._peer, self._in)
            num_text, num_tensor = head.tolist()
            text = torch.empty(num_text, dtype=torch.uint8)
            dist.recv(text, self._peer, self._in)
            words = pickle.loads(text.numpy().tobytes())  # from a process that this one started, or that did
            tensor = None
            if num_tensor:
                tensor = torch.empty(num_tensor, dtype=torch.uint8, device=self._device)
                dist.recv(tensor, self._peer, self._in if self._tensors is None else self._tensors)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()  # of this thread, not the engine's
            if words[0] == "bye":
                return
            self._incoming.put((words, tensor))

    def close(self) -> None:
        """Send what is left, and wait until the other side says the same; not for long where it may not."""
        if self._out is not None:
            self.send("bye")
        for thread in self._threads:
            thread.join(10 if self._out is not None else 1)

    @property
    def is_stuck(self) -> bool:
        """A thread waits for what may never come."""
        return any(thread.is_alive() for thread in self._threads)


def connect(at: int, prefill: int, decode: int, device: torch.device, store: str) -> Wires:
    """Wires of engine `at` of so many, each in a process of its own, which all call this."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = f"file://{store}"
    dist.init_process_group("gloo", init_method=place, rank=at, world_size=prefill + decode, timeout=FOREVER)

    def group(one: int, other: int, backend: str = "gloo") -> Any:
        return dist.new_group([one, other], timeout=FOREVER, backend=backend)

    wires, (talk, lanes) = Wires({}, {}), pairs_of(prefill, decode)
    for one, other in talk:
        there, back = group(one, other), group(one, other)
        if at == one:
            wires.talk[other] = Socket(other, device, there, back)
        elif at == other:
            wires.talk[one] = Socket(one, device, back, there)
    for one, other in lanes:
        lane = group(one, other)
        tensors = group(one, other, "nccl") if device.type == "cuda" else None
        if at == one:
            wires.lanes[other] = Socket(other, device, lane, None, tensors)
        elif at == other:
            wires.lanes[one] = Socket(one, device, None, lane, tensors)
    return wires
