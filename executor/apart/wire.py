"""What two sides send each other: messages in order, some with a tensor. Sending never waits; whoever listens
asks what has come.

A pipe joins two threads of one process, which share a card. A socket joins two processes over
torch.distributed: messages by gloo, tensors too where they are in host memory, by NCCL where each side has a
card of its own. Its two threads wait for the other side, so that the engine's host never does. When the other
side is gone, `poll` raises.
"""

import pickle
import threading
from collections.abc import Iterator
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


class Pipe:
    """One end of a pair of queues."""

    def __init__(self, outgoing: "SimpleQueue[Message]", incoming: "SimpleQueue[Message]") -> None:
        self._outgoing, self._incoming = outgoing, incoming

    @classmethod
    def pair(cls) -> "tuple[Pipe, Pipe]":
        there: SimpleQueue[Message] = SimpleQueue()
        back: SimpleQueue[Message] = SimpleQueue()
        return cls(there, back), cls(back, there)

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
    """Rank `rank` of two processes. The process group exists; `device` is where tensors lie."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(SimpleQueue(), SimpleQueue())
        self._peer, self._device = 1 - rank, device
        # A group for each direction: its two ends are then in one thread each.
        groups = [dist.new_group([0, 1], timeout=FOREVER, backend="gloo") for _ in range(2)]
        self._out, self._in = groups[rank], groups[1 - rank]
        self._tensors = dist.new_group([0, 1], backend="nccl") if device.type == "cuda" else None
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._sender.start()
        self._receiver.start()

    def _send_all(self) -> None:
        try:
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
        except RuntimeError:
            self._incoming.put((("failed", GONE), None))

    def _receive_all(self) -> None:
        try:
            while True:
                head = torch.empty(2, dtype=torch.int64)
                dist.recv(head, self._peer, self._in)
                num_text, num_tensor = head.tolist()
                text = torch.empty(num_text, dtype=torch.uint8)
                dist.recv(text, self._peer, self._in)
                words = pickle.loads(
                    text.numpy().tobytes()
                )  # from a process that this one started, or that did
                tensor = None
                if num_tensor:
                    tensor = torch.empty(num_tensor, dtype=torch.uint8, device=self._device)
                    dist.recv(tensor, self._peer, self._in if self._tensors is None else self._tensors)
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(
                            self._device
                        ).synchronize()  # of this thread, not the engine's
                self._incoming.put((words, tensor))
                if words[0] == "bye":
                    return
        except RuntimeError:
            self._incoming.put((("failed", GONE), None))

    def close(self) -> None:
        """Send what is left, and wait until the other side says the same."""
        self.send("bye")
        self._sender.join(10)
        self._receiver.join(10)
