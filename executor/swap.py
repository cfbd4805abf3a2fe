"""Host memory for requests that were preempted: what the device holds of them goes out and comes back, in the
order of its work.

Copies are enqueued like a batch's kernels and never waited for. K/V pass through one small device buffer,
gathered from their blocks and copied in one piece. The host never looks at what it keeps, so the device's
order is all that a buffer's next use needs.
"""

from dataclasses import dataclass

import torch

from executor.pools import Pools
from policies.core.errors import InputError

COPY_BYTES = 64 << 20
"""About what one copy moves: long enough for the bus, short enough to buffer on the device."""
RESERVED_BYTES = 4 << 30
"""Host memory that is taken before a run at most; what a run needs beyond is taken when it does, which stops
the device a while."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a ring keeps of the tokens that its request decodes, on the host. Each tensor is one of `Pools`,
    cut to that ring."""

    hidden: torch.Tensor  # [decode_rows, hidden]
    sampled: torch.Tensor  # [decode_rows] int32
    survival: torch.Tensor  # [1] float32
    left: torch.Tensor  # [1] int32

    @classmethod
    def of(cls, pools: Pools, ring_id: int) -> "Row":
        """Views of the device's."""
        count, ring = pools.decode_rows, slice(ring_id, ring_id + 1)
        row, token = pools.decode_row(ring_id, 0), pools.sampled_row(ring_id, 0)
        hidden, sampled = pools.hidden[row : row + count], pools.sampled[token : token + count]
        return cls(hidden, sampled, pools.survival[ring], pools.left[ring])

    @classmethod
    def on_host(cls, pools: Pools) -> "Row":
        parts = (
            torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            for part in cls.of(pools, 0).parts
        )
        return cls(*parts)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.sampled, self.survival, self.left

    def copy_from(self, other: "Row") -> None:
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.copy_(theirs, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Kept:
    """One request's in host memory: the first `num_groups` groups in pages of `SwapSpace.groups_per_page`,
    and its row."""

    num_groups: int
    pages: list[torch.Tensor]
    row: Row


class SwapSpace:
    """Pages of host memory over `pools`, used again and again; `reserve` takes some beforehand."""

    def __init__(self, pools: Pools) -> None:
        kv = pools.kv
        layers, _, *block = kv.k.shape
        self._shape = (layers, -1, *block)
        self._group_elements = kv.planes * kv.k[:, 0].numel()
        groups_per_ring = kv.groups.shape[1]
        self.groups_per_page = max(
            1, min(groups_per_ring, COPY_BYTES // (2 * self._group_elements * kv.k.itemsize))
        )
        self._pools = pools
        self._planes = torch.arange(kv.planes, device=kv.k.device)
        self._buffer = self._page(on_host=False)
        self._free_pages: list[torch.Tensor] = []
        self._free_rows: list[Row] = []
        self._kept: dict[int, Kept] = {}

    def reserve(self, num_groups: int) -> None:
        """Have host memory for `num_groups` groups ready, up to RESERVED_BYTES. Raises `InputError` when it
        cannot be had."""
        num_pages = min(-(-num_groups // self.groups_per_page), RESERVED_BYTES // self._buffer.nbytes)
        try:
            while len(self._free_pages) < num_pages:
                self._free_pages.append(self._page(on_host=True))
                self._free_rows.append(Row.on_host(self._pools))
        except RuntimeError as error:
            raise InputError(
                f"cache.preemption: swap: {num_pages * self._buffer.nbytes / 2**30:.2f} GiB of page-locked "
                f"host memory cannot be had ({str(error).splitlines()[0]}); set cache.swap_blocks lower, or "
                "cache.preemption: recompute"
            ) from None

    @property
    def num_pages(self) -> int:
        """Pages taken so far, free or not."""
        return len(self._free_pages) + sum(len(kept.pages) for kept in self._kept.values())

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._kept

    def clear(self) -> None:
        """Keep nothing: a new run begins."""
        for request_id in list(self._kept):
            self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """Give up what is kept of a request, if anything is."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._free_pages += kept.pages
            self._free_rows.append(kept.row)

    def take_out(self, request_id: int, ring_id: int, num_groups: int) -> None:
        """Enqueue the copies of the first `num_groups` groups of the request in ring `ring_id`, and of its
        row, to host memory."""
        kept = Kept(num_groups, [], self._free_rows.pop() if self._free_rows else Row.on_host(self._pools))
        for first in range(0, num_groups, self.groups_per_page):
            page = self._free_pages.pop() if self._free_pages else self._page(on_host=True)
            kept.pages.append(page)
            blocks = self._blocks(ring_id, first, num_groups)
            for pool, part in zip(self._kv, self._parts(len(blocks)), strict=True):
                torch.index_select(pool, 1, blocks, out=part)
            used = self._used(len(blocks))
            page[:used].copy_(self._buffer[:used], non_blocking=True)
        kept.row.copy_from(Row.of(self._pools, ring_id))
        self._kept[request_id] = kept

    def bring_back(self, request_id: int, ring_id: int) -> None:
        """Enqueue the copies of a request's groups and row to where ring `ring_id` has its own; its table
        must be there before."""
        kept = self._kept[request_id]
        for at, page in enumerate(kept.pages):
            blocks = self._blocks(ring_id, at * self.groups_per_page, kept.num_groups)
            used = self._used(len(blocks))
            self._buffer[:used].copy_(page[:used], non_blocking=True)
            for pool, part in zip(self._kv, self._parts(len(blocks)), strict=True):
                pool.index_copy_(1, blocks, part)
        Row.of(self._pools, ring_id).copy_from(kept.row)
        self.forget(request_id)

    @property
    def _kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pools.kv.k, self._pools.kv.v

    def _page(self, on_host: bool) -> torch.Tensor:
        pool = self._pools.kv.k
        device = torch.device("cpu") if on_host else pool.device
        num_elements = 2 * self.groups_per_page * self._group_elements
        return torch.empty(num_elements, dtype=pool.dtype, device=device, pin_memory=on_host and pool.is_cuda)

    def _blocks(self, ring_id: int, first_group: int, num_groups: int) -> torch.Tensor:
        """Blocks of one page's groups, all planes, by the device's own table, so that nothing of the host's
        is read late."""
        end = min(first_group + self.groups_per_page, num_groups)
        groups = self._pools.kv.groups[ring_id, first_group:end]
        return (groups[:, None] * len(self._planes) + self._planes).flatten()  # [groups * planes]

    def _used(self, num_blocks: int) -> int:
        return 2 * num_blocks // len(self._planes) * self._group_elements

    def _parts(self, num_blocks: int) -> torch.Tensor:
        """The buffer's K and V of `num_blocks` blocks."""
        return self._buffer[: self._used(num_blocks)].view(
            2, *self._shape
        )  # [2, layers, blocks, kv_heads, block_size, head_dim]
