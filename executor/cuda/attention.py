"""Attention of batches whose items have up to 16 rows, by the kernel of `attention.cu`: the bits of
`executor.kernels.attention`, which serves the rest."""

import ctypes
from dataclasses import dataclass, field

import torch

from executor.cuda.batch import GROUP, HEAD_DIM, LINE, SCALE_LOG2, Batch, fields_of, is_served, source_of
from executor.cuda.driver import Kernel, Module, TensorMap, tensor_map
from executor.cuda.tall_attention import TallAttention
from executor.kernels.attention import AttentionLauncher
from executor.kernels.kv import KVPools
from executor.kernels.meta import HEADER_COMBINES, BatchMeta
from executor.kernels.worklist import SHORT_ROWS

CLUSTER, THREADS = 4, 160
SHARED_BYTES = 85040
"""Of `Shared` in `attention_load.cuh`."""
MAX_ROWS = 4
"""Of a batch: at more the Triton kernel is faster."""
COMBINE_WARPS = 4

SOURCE = source_of(SHARED_BYTES, "attention_load.cuh", "attention.cu")


class Arguments(ctypes.Structure):
    """`Attention` in `attention_load.cuh`."""

    _fields_ = (
        ("batch", Batch),
        ("q", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("stride_q", ctypes.c_int),
        ("is_plane_alone", ctypes.c_int),
        ("padding", ctypes.c_uint64 * 5),
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
        if tile_rows > SHORT_ROWS or out.shape[0] > self.max_rows or not is_served(q, kv):
            self.base(q, kv, layer, meta, tile_rows, depth_offset, out)
            return
        workspace, num_heads = self.base.workspace, out.shape[1] // HEAD_DIM
        batch = Batch(*fields_of(self._maps_of(kv, layer), kv, meta, workspace, out, depth_offset))
        arguments = Arguments(
            batch, q.data_ptr(), meta.positions.data_ptr(), q.stride(0), int(kv.planes > 1)
        )  # fmt: skip
        self.kernel.launch(self.clusters * CLUSTER, THREADS, SHARED_BYTES, (arguments,), CLUSTER)
        tensors = (meta.combines, meta.header[HEADER_COMBINES:], workspace.acc, workspace.stats, out)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        numbers = (ctypes.c_int(num_heads), ctypes.c_float(SCALE_LOG2))
        blocks = -(-out.shape[0] * num_heads // COMBINE_WARPS)
        self.combine.launch(blocks, COMBINE_WARPS * 32, 0, (*pointers, *numbers))

    def _maps_of(self, kv: KVPools, layer: int) -> tuple[TensorMap, TensorMap]:
        """Of a layer's pools, which stay where they are: half of a head's columns of K, a quarter of V."""
        k, v = kv.k[layer], kv.v[layer]
        key = k.data_ptr(), k.shape[0]
        if key not in self.maps:
            self.maps[key] = (
                tensor_map(k.view(-1, HEAD_DIM), (GROUP, LINE)),
                tensor_map(v.view(-1, HEAD_DIM), (GROUP, HEAD_DIM // CLUSTER)),
            )
        return self.maps[key]
