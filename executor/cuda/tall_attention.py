"""Attention of batches packed in tiles of 128 query rows, by the kernel of `tall_attention.cu`: the bits of
`executor.kernels.attention`, which serves the rest."""

import ctypes
from dataclasses import dataclass, field
from pathlib import Path

import torch

from executor.cuda.driver import Kernel, Module, TensorMap, tensor_map
from executor.kernels.attention import LOG2_E, AttentionLauncher, Workspace
from executor.kernels.combine import combine_triton
from executor.kernels.kv import KVPools
from executor.kernels.meta import HEADER_COMBINES, HEADER_ITEMS, BatchMeta

FOLDER = Path(__file__).parent
HEAD_DIM, GROUP, LINE = 128, 16, 64
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

SOURCE = f"#define SHARED_BYTES {SHARED_BYTES}\n" + "".join(
    (FOLDER / name).read_text() for name in ("common.cuh", "tall_attention.cu")
)

_POINTERS = ("groups", "items", "num_items", "out", "partial_sums", "partial_stats")
_NUMBERS = ("depth_offset", "stride_groups", "planes", "num_heads", "num_kv_heads")


class Arguments(ctypes.Structure):
    """`Attention` in `tall_attention.cu`."""

    _fields_ = (
        ("q", TensorMap),
        ("k", TensorMap),
        ("v", TensorMap),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("padding", ctypes.c_uint64 * 7),
    )


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
        _, _, num_kv_heads, block_size, head_dim = kv.k.shape
        is_served = q.dtype == torch.bfloat16 and (head_dim, block_size) == (HEAD_DIM, GROUP)
        if not is_served or tile_rows != TILE_ROWS:
            self.base(q, kv, layer, meta, tile_rows, depth_offset, out)
            return
        workspace, num_heads = self.workspace, out.shape[1] // head_dim
        scale_log2 = head_dim**-0.5 * LOG2_E
        num_items, num_combines = meta.header[HEADER_ITEMS:], meta.header[HEADER_COMBINES:]
        tensors = (kv.groups, meta.items, num_items, out, workspace.acc, workspace.stats)
        arguments = Arguments(
            self._map_of(q, (SIDE_ROWS, LINE)), *self._maps_of(kv, layer),
            *(tensor.data_ptr() for tensor in tensors), depth_offset, kv.groups.stride(0), kv.planes,
            num_heads, num_kv_heads, scale_log2,
        )  # fmt: skip
        self.kernel.launch(self.num_sms, THREADS, SHARED_BYTES, (arguments,))
        combine_triton(
            workspace.acc, workspace.stats, meta.combines, num_combines, self.num_sms, scale_log2, out
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
