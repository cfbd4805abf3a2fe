"""Device memory of a run: K/V pools, hidden rings, last sampled tokens. Which ids are free is the ledgers'
business.

Every ring (one per request that may run at once) owns `rows_per_ring` rows of the hidden pool:
`resident_chunks` slots of a prompt chunk each, then `decode_rows` for the tokens that are in the loop at
once: one, or where tokens are guessed one more than are guessed ahead. Position p has the row p modulo that
many.
"""

from dataclasses import dataclass

import numpy as np
import torch

from executor.environment import check_memory
from executor.kernels.kv import KVPools
from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.core.seam.batch import Allocation

MEMORY_FRACTION = 0.9
"""Of the memory free after the weights are loaded; the rest is for activations, graphs and the driver."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Tensors that outlive a batch, and the host's copy of the block-group table.

    What an exit gate knows of a ring's token (`survival`, `left`) belongs to its hidden row: a request that
    comes back in another ring brings both.
    """

    kv: KVPools
    hidden: torch.Tensor  # [num_rings * rows_per_ring, hidden]
    sampled: torch.Tensor  # [num_rings * decode_rows + 1] int32, the last tokens of every ring, known and
    # guessed, each in its position's place; the extra entry takes padding rows' tokens
    survival: torch.Tensor  # [num_rings] float32, product of what the exit gate left a ring's token so far
    left: torch.Tensor  # [num_rings] int32, 1 where a ring's token has left the loop early by its gate
    host_groups: np.ndarray  # [num_rings, groups_per_ring] int32
    ring_rows: int
    decode_rows: int

    @classmethod
    def allocate(
        cls,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        planes: int,
        num_rings: int,
        ring_rows: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        decode_rows: int = 1,
    ) -> "Pools":
        """`ring_rows` are the prompt rows of one ring, `decode_rows` those of its tokens; `num_blocks` counts
        blocks of all planes.

        Raises `InputError` without room.
        """
        groups_per_ring = -(-max_positions // block_size)
        kv_bytes = num_blocks * KVPools.block_bytes(shape, block_size, dtype)
        hidden_bytes = num_rings * (ring_rows + decode_rows) * shape.hidden_size * dtype.itemsize
        check_memory(
            device, kv_bytes + hidden_bytes, f"a KV pool of {num_blocks} blocks and {num_rings} hidden rings"
        )
        kv = KVPools.allocate(
            shape, num_blocks, block_size, planes, num_rings, groups_per_ring, dtype, device
        )
        return cls(
            kv=kv,
            hidden=torch.zeros(
                (num_rings * (ring_rows + decode_rows), shape.hidden_size), dtype=dtype, device=device
            ),
            sampled=torch.zeros(num_rings * decode_rows + 1, dtype=torch.int32, device=device),
            survival=torch.ones(num_rings, dtype=torch.float32, device=device),
            left=torch.zeros(num_rings, dtype=torch.int32, device=device),
            host_groups=np.zeros((num_rings, groups_per_ring), dtype=np.int32),
            ring_rows=ring_rows,
            decode_rows=decode_rows,
        )

    @property
    def rows_per_ring(self) -> int:
        return self.ring_rows + self.decode_rows

    def first_row(self, ring_id: int) -> int:
        """Hidden row of the first ring slot of `ring_id`."""
        return ring_id * self.rows_per_ring

    def decode_row(self, ring_id: int, position: int) -> int:
        """Hidden row of the token at `position` that `ring_id` decodes."""
        return ring_id * self.rows_per_ring + self.ring_rows + position % self.decode_rows

    def sampled_row(self, ring_id: int, position: int) -> int:
        """Place in `sampled` of the token at `position` of `ring_id`."""
        return ring_id * self.decode_rows + position % self.decode_rows

    def admit(self, allocation: Allocation) -> None:
        """Write the block groups of a newly admitted request into its ring's row of the table, on both
        sides."""
        self.write_groups(allocation.ring_id, 0, allocation.block_groups)

    def write_groups(self, ring_id: int, first_group: int, groups: tuple[int, ...]) -> None:
        """Write `groups` into a ring's row of the table from place `first_group` on: at once on the host, in
        turn on the device.

        Every copy has a pinned buffer of its own: an earlier one of the same ring may not have run yet.
        PyTorch gives a buffer out again once the device is past the copy that read it.
        """
        table = self.kv.groups
        end = first_group + len(groups)
        self.host_groups[ring_id, first_group:end] = groups
        staged = torch.empty(table.shape[1], dtype=torch.int32, pin_memory=table.is_cuda)[: len(groups)]
        staged.numpy()[:] = groups
        table[ring_id, first_group:end].copy_(staged, non_blocking=True)


def blocks_that_fit(
    shape: ModelShape,
    block_size: int,
    planes: int,
    num_rings: int,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Blocks for the memory that is free now, but no more than all rings could ever use. Raises `InputError`
    when not one fits."""
    useful = num_rings * planes * -(-max_positions // block_size)
    if device.type != "cuda":
        return useful
    free_bytes, _ = torch.cuda.mem_get_info(device)
    fits = int(free_bytes * MEMORY_FRACTION) // KVPools.block_bytes(shape, block_size, dtype)
    if fits < planes:
        raise InputError(
            f"--device cuda: {free_bytes / 2**30:.2f} GiB free after the weights hold no KV block of "
            f"{shape.name}"
        )
    return min(fits, useful)
