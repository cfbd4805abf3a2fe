"""Chunks taken out of one engine's pools and put into another's, on a stream of their own.

A chunk is one buffer: K and V of its blocks in all planes, then, with the prompt's end, the hidden state of
its last token. A block that a chunk only begins is sent whole; the next chunk sends it again.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from executor.pools import Pools
from policies.core.seam.events import Import, Send


class Copies:
    """Of one side's `pools`."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._dtype = pools.kv.k.dtype
        # A copy moves the widest words that there are, whatever they say.
        self._kv = [pool.flatten(2).view(torch.int64) for pool in (pools.kv.k, pools.kv.v)]
        self._device = pools.kv.k.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def take(self, command: Send) -> tuple[torch.Tensor, "Passed"]:
        """The chunk as a buffer, and when what it was copied from is free again."""
        with self._own_stream():
            blocks = self._blocks(command.block_groups)
            planes, hidden = self._shape(len(blocks)), self._hidden(command)
            width = hidden.view(torch.int64).numel() if command.is_last else 0
            buffer = torch.empty(planes.numel() + width, dtype=torch.int64, device=self._device)
            for pool, part in zip(self._kv, buffer[: planes.numel()].view(planes), strict=True):
                torch.index_select(pool, 1, blocks, out=part)
            if command.is_last:
                buffer[planes.numel() :].view(self._dtype).copy_(hidden)
            return buffer, Passed(self._stream)

    def put(self, command: Import, buffer: torch.Tensor, after: "Passed | None") -> None:
        """Copy a buffer into the blocks of `command`; with the prompt's end, what the engine launches next
        comes after all of it."""
        with self._own_stream():
            if self._stream is not None and after is not None and after.event is not None:
                self._stream.wait_event(after.event)
            if self._stream is not None:
                buffer.record_stream(self._stream)
            buffer = buffer.view(torch.int64)
            blocks = self._blocks(command.block_groups)
            planes = self._shape(len(blocks))
            for pool, part in zip(self._kv, buffer[: planes.numel()].view(planes), strict=True):
                pool.index_copy_(1, blocks, part)
            if command.is_last:
                self._hidden(command).copy_(buffer[planes.numel() :].view(self._dtype))
        if command.is_last:
            self.join()

    def join(self) -> None:
        """What the engine launches from now on comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _shape(self, num_blocks: int) -> torch.Size:
        """Of K and V of so many blocks, as words."""
        return torch.Size((2, self._kv[0].shape[0], num_blocks, self._kv[0].shape[2]))

    def _hidden(self, command: Send | Import) -> torch.Tensor:
        return self._pools.hidden[self._pools.decode_row(command.ring_id, command.end - 1)]

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _blocks(self, groups: tuple[int, ...]) -> torch.Tensor:
        planes = self._pools.kv.planes
        ids = torch.tensor([group * planes + plane for group in groups for plane in range(planes)])
        if self._stream is None:
            return ids
        return ids.pin_memory().to(self._device, non_blocking=True)


class Passed:
    """A point in the order of a stream, or of a CPU, where it has passed already."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self.event = None
        if stream is not None:
            self.event = torch.cuda.Event()
            self.event.record(stream)

    def query(self) -> bool:
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
