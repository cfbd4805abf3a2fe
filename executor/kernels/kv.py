"""The paged K/V pools and the block-group tables, as tensors. Who owns which group is the ledger's business,
not known here.

Layout `[num_layers, num_blocks, kv_heads, block_size, head_dim]`: one head's block is contiguous (16 x 128 x
2 B = 4 KiB), which is what an attention program reads. Group `g` of a request is one block in every depth
plane: plane `d` is block `g * planes + d`, so the *slot* (block * block_size + offset) of a token one depth
further on is `block_size` higher. With one plane (layout shared) all depths have the same slot: a token's K/V
are overwritten at every depth.
"""

from dataclasses import dataclass

import torch

from policies.core.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class KVPools:
    """K and V of all layers and planes, and `groups`, the row of block groups of every ring (admission writes
    it)."""

    k: torch.Tensor  # [num_layers, num_blocks, kv_heads, block_size, head_dim]
    v: torch.Tensor  # [num_layers, num_blocks, kv_heads, block_size, head_dim]
    groups: torch.Tensor  # [num_rings, groups_per_ring] int32
    planes: int

    @property
    def block_size(self) -> int:
        return self.k.shape[3]

    def plane_offset(self, depth_offset: int) -> int:
        """Planes between a row's first depth and the one `depth_offset` further on."""
        return depth_offset if self.planes > 1 else 0

    @classmethod
    def allocate(
        cls, shape: ModelShape, num_blocks: int, block_size: int, planes: int, num_rings: int,
        groups_per_ring: int, dtype: torch.dtype, device: torch.device,
    ) -> "KVPools":  # fmt: skip
        """Zeroed pools; `num_blocks` counts blocks of all planes."""
        size = (shape.num_layers, num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        return cls(
            k=torch.zeros(size, dtype=dtype, device=device),
            v=torch.zeros(size, dtype=dtype, device=device),
            groups=torch.zeros((num_rings, groups_per_ring), dtype=torch.int32, device=device),
            planes=planes,
        )

    @staticmethod
    def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of one plane: K and V of all layers. Ouro-1.4B, 16 tokens, bf16: 3,145,728."""
        return 2 * shape.num_layers * shape.num_kv_heads * block_size * shape.head_dim * dtype.itemsize


def plane_slots(
    groups: torch.Tensor, positions: torch.Tensor, plane: int, planes: int, block_size: int
) -> torch.Tensor:
    """Slots of `positions` in depth plane `plane` of a request whose table row is `groups`: first principles,
    for audits."""
    groups_of = groups[(positions // block_size).long()].long()
    return (groups_of * planes + plane) * block_size + positions % block_size
