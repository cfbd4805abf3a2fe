"""The socket between an engine and its HTTP process: whole messages, and no side waits for the other.

A message is a JSON object and bytes (token ids of a prompt). What the other side does not take at once stays
here until it does, so a busy HTTP process delays no batch.
"""

import json
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

HEAD = struct.Struct("<II")
READ_BYTES = 1 << 18
MAX_BYTES = 1 << 28


class Message(NamedTuple):
    """`fields` has `kind` and what belongs to it; `tail` is bytes that are no JSON."""

    fields: Mapping[str, Any]
    tail: bytes = b""

    @property
    def kind(self) -> str:
        return str(self.fields["kind"])


class Link:
    """One end of a connected stream socket, which it makes non-blocking."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self.is_closed = False
        """Whether the other side is gone."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, tail: bytes = b"", **fields: Any) -> None:
        """Hand a message over, at once or by a later `flush`. To a side that is gone it is dropped."""
        if self.is_closed:
            return
        head = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
        self._out.append(memoryview(HEAD.pack(len(head), len(tail)) + head + tail))
        self.flush()

    def flush(self) -> bool:
        """Write what the other side takes; return whether all is written."""
        out = self._out
        while out and not self.is_closed:
            try:
                sent = self._socket.send(out[0])
            except BlockingIOError:
                return False
            except OSError:
                self._lost()
                break
            if sent < len(out[0]):
                out[0] = out[0][sent:]
            else:
                out.popleft()
        return True

    def receive(self) -> list[Message]:
        """The messages that are here. The last ones of a side that is gone are among them."""
        data = self._in
        while not self.is_closed:
            try:
                piece = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            if not piece:
                self._lost()
            data += piece
            if len(piece) < READ_BYTES:
                break
        if len(data) < HEAD.size:
            return []
        found, at = [], 0
        while len(data) - at >= HEAD.size:
            head, tail = HEAD.unpack_from(data, at)
            if head + tail > MAX_BYTES:
                raise ValueError(f"a message of {head + tail} bytes, expected at most {MAX_BYTES}")
            end = at + HEAD.size + head + tail
            if len(data) < end:
                break
            middle = at + HEAD.size + head
            found.append(Message(json.loads(data[at + HEAD.size : middle]), bytes(data[middle:end])))
            at = end
        del data[:at]
        return found

    def wait(self, timeout_s: float) -> None:
        """Until something can be read, or what was held back can be written, or `timeout_s` is over."""
        if self.is_closed:
            select.select([], [], [], timeout_s)
            return
        select.select([self._socket], [self._socket] if self._out else [], [], timeout_s)

    def close(self) -> None:
        self._lost()
        self._socket.close()

    def _lost(self) -> None:
        self.is_closed = True
        self._out.clear()
