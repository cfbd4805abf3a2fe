"""Attention of batches packed in tiles of 128 query rows, by the kernel of `tall_attention.cu`: the bits of
`executor.kernels.attention`, which serves the rest."""

import ctypes
from dataclasses import dataclass, field

import torch

from executor.cuda.batch import GROUP, HEAD_DIM, LINE, SCALE_LOG2, Batch, fields_of, is_served, source_of
from executor.cuda.driver import Kernel, Module, TensorMap, tensor_map
from executor.kernels.attention import AttentionLauncher, Workspace
from executor.kernels.combine import combine_triton
from executor.kernels.kv import KVPools
from executor.kernels.meta import HEADER_COMBINES, BatchMeta

TILE_ROWS, SIDE_ROWS = 128, 64
"""Query rows of an item, and of one of the two warpgroups that share it."""
TILE_CLASSES = (16, 32, TILE_ROWS)
"""Query-tile heights to pack for where this kernel is: at half its height it is as fast as Triton's at 64."""
TALL_MARGIN = 2.5
"""Where its tiles are cut: see `executor.kernels.worklist.Packer`. Partial results cost it more than waiting,
as a history tile takes 1.2 us instead of 1.7: on an H200 4 x 128 rows at 4096 take 79 us whole and 98 cut
into eight, 2 x 128 rows 78 and 50."""
THREADS = 384
SHARED_BYTES = 196784
"""Of `Shared` in `tall_attention.cu`: queries of two units, four stages of keys and values, barriers."""

SOURCE = source_of(SHARED_BYTES, "tall_attention.cu")


class Arguments(ctypes.Structure):
    """`Attention` in `tall_attention.cu`."""

    _fields_ = (("batch", Batch), ("q", TensorMap))


@dataclass(frozen=True, slots=True)
class TallAttention:
    """Called like `AttentionLauncher`; `base` serves what this does not."""

    base: AttentionLauncher
    kernel: Kernel
    maps: dict[tuple[int, ...], TensorMap] = field(default_factory=dict)

    @classmethod
    def load(cls, base: AttentionLauncher, module: Module) -> "TallAttention":
        return cls(base, module.kernel("tall_attention", SHARED_BYTES))

    @property
    def workspace(self) -> Workspace:
        return self.base.workspace

    @property
    def num_sms(self) -> int:
        return self.base.num_sms

    def __call__(
        self, q: torch.Tensor, kv: KVPools, layer: int, meta: BatchMeta, tile_rows: int, depth_offset: int,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `AttentionLauncher.__call__`."""
        if tile_rows != TILE_ROWS or not is_served(q, kv):
            self.base(q, kv, layer, meta, tile_rows, depth_offset, out)
            return
        workspace, num_combines = self.workspace, meta.header[HEADER_COMBINES:]
        batch = Batch(*fields_of(self._maps_of(kv, layer), kv, meta, workspace, out, depth_offset))
        arguments = Arguments(batch, self._map_of(q, (SIDE_ROWS, LINE)))
        self.kernel.launch(self.num_sms, THREADS, SHARED_BYTES, (arguments,))
        combine_triton(
            workspace.acc, workspace.stats, meta.combines, num_combines, self.num_sms, SCALE_LOG2, out
        )

    def _maps_of(self, kv: KVPools, layer: int) -> tuple[TensorMap, TensorMap]:
        """Of a layer's pools, which stay where they are: half of a head's columns of K at once, and of V both
        halves one after the other."""
        k, v = kv.k[layer].view(-1, HEAD_DIM), kv.v[layer].view(-1, HEAD_DIM)
        halves = v.view(-1, HEAD_DIM // LINE, LINE).transpose(0, 1)
        return self._map_of(k, (GROUP, LINE)), self._map_of(halves, (HEAD_DIM // LINE, GROUP, LINE))

    def _map_of(self, tensor: torch.Tensor, box: tuple[int, ...]) -> TensorMap:
        key = (tensor.data_ptr(), *tensor.shape, *tensor.stride(), *box)
        if key not in self.maps:
            self.maps[key] = tensor_map(tensor, box)
        return self.maps[key]
