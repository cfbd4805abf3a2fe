"""Attention of batches whose items have up to 16 rows, by the kernel of `attention.cu`: the bits of
`executor.kernels.attention`, which serves the rest."""

import ctypes
from dataclasses import dataclass, field
from pathlib import Path

import torch

from executor.cuda.driver import Kernel, Module, TensorMap, tensor_map
from executor.cuda.tall_attention import TallAttention
from executor.kernels.attention import LOG2_E, AttentionLauncher
from executor.kernels.kv import KVPools
from executor.kernels.meta import HEADER_COMBINES, HEADER_ITEMS, BatchMeta
from executor.kernels.worklist import SHORT_ROWS

FOLDER = Path(__file__).parent
HEAD_DIM, GROUP = 128, 16
CLUSTER, THREADS = 4, 160
SHARED_BYTES = 85040
"""Of `Shared` in `attention_load.cuh`."""
MAX_ROWS = 4
"""Of a batch: at more the Triton kernel is faster."""
COMBINE_WARPS = 4

SOURCE = f"#define SHARED_BYTES {SHARED_BYTES}\n" + "".join(
    (FOLDER / name).read_text() for name in ("common.cuh", "attention_load.cuh", "attention.cu")
)

_POINTERS = (
    "q",
    "groups",
    "items",
    "num_items",
    "positions",
    "out",
    "partial_sums",
    "partial_stats",
)
_NUMBERS = (
    "depth_offset",
    "stride_q",
    "stride_groups",
    "planes",
    "num_heads",
    "num_kv_heads",
    "is_plane_alone",
)


class Arguments(ctypes.Structure):
    """`Attention` in `attention_load.cuh`."""

    _fields_ = (
        ("k", TensorMap),
        ("v", TensorMap),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("padding", ctypes.c_uint64 * 4),
    )


@dataclass(frozen=True, slots=True)
class Attention:
    """Called like `AttentionLauncher`; `base` serves what this does not. `clusters` run at once."""

    base: AttentionLauncher | TallAttention
    kernel: Kernel
    combine: Kernel
    clusters: int
    max_rows: int = MAX_ROWS
    maps: dict[tuple[int, int], tuple[TensorMap, TensorMap]] = field(default_factory=dict)

    @classmethod
    def load(cls, base: AttentionLauncher | TallAttention, module: Module) -> "Attention":
        kernel = module.kernel("attention", SHARED_BYTES)
        clusters = kernel.max_clusters(THREADS, SHARED_BYTES, CLUSTER)
        return cls(base, kernel, module.kernel("combine", 0), clusters)

    def __call__(
        self, q: torch.Tensor, kv: KVPools, layer: int, meta: BatchMeta, tile_rows: int, depth_offset: int,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `AttentionLauncher.__call__`."""
        _, _, num_kv_heads, block_size, head_dim = kv.k.shape
        is_served = q.dtype == torch.bfloat16 and (head_dim, block_size) == (HEAD_DIM, GROUP)
        if not is_served or tile_rows > SHORT_ROWS or out.shape[0] > self.max_rows:
            self.base(q, kv, layer, meta, tile_rows, depth_offset, out)
            return
        workspace, num_heads = self.base.workspace, out.shape[1] // head_dim
        scale_log2 = head_dim**-0.5 * LOG2_E
        tensors = (
            q, kv.groups, meta.items, meta.header[HEADER_ITEMS:], meta.positions, out, workspace.acc,
            workspace.stats,
        )  # fmt: skip
        arguments = Arguments(
            *self._maps_of(kv, layer), *(tensor.data_ptr() for tensor in tensors), depth_offset, q.stride(0),
            kv.groups.stride(0), kv.planes, num_heads, num_kv_heads, int(kv.planes > 1), scale_log2,
        )  # fmt: skip
        self.kernel.launch(self.clusters * CLUSTER, THREADS, SHARED_BYTES, (arguments,), CLUSTER)
        tensors = (meta.combines, meta.header[HEADER_COMBINES:], workspace.acc, workspace.stats, out)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        numbers = (ctypes.c_int(num_heads), ctypes.c_float(scale_log2))
        blocks = -(-out.shape[0] * num_heads // COMBINE_WARPS)
        self.combine.launch(blocks, COMBINE_WARPS * 32, 0, (*pointers, *numbers))

    def _maps_of(self, kv: KVPools, layer: int) -> tuple[TensorMap, TensorMap]:
        """Of a layer's pools, which stay where they are: half of a head's columns of K, a quarter of V."""
        k, v = kv.k[layer], kv.v[layer]
        key = k.data_ptr(), k.shape[0]
        if key not in self.maps:
            self.maps[key] = (
                tensor_map(k.view(-1, HEAD_DIM), (GROUP, HEAD_DIM // 2)),
                tensor_map(v.view(-1, HEAD_DIM), (GROUP, HEAD_DIM // CLUSTER)),
            )
        return self.maps[key]
