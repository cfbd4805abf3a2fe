"""What both attention kernels are given: the K/V and the work items of a batch."""

import ctypes
from pathlib import Path

import torch

from executor.cuda.driver import TensorMap
from executor.kernels.attention import LOG2_E, Workspace
from executor.kernels.kv import KVPools
from executor.kernels.meta import HEADER_ITEMS, BatchMeta

FOLDER = Path(__file__).parent
HEAD_DIM, GROUP, LINE = 128, 16, 64
"""Columns of a head, tokens of a K/V block, and columns of half a head: a line of shared memory."""
SCALE_LOG2 = HEAD_DIM**-0.5 * LOG2_E
POINTERS = ("groups", "items", "num_items", "out", "partial_sums", "partial_stats")
NUMBERS = ("depth_offset", "stride_groups", "planes", "num_heads", "num_kv_heads")


class Batch(ctypes.Structure):
    """`Batch` in `attention_batch.cuh`."""

    _fields_ = (
        ("k", TensorMap),
        ("v", TensorMap),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int) for name in NUMBERS),
        ("scale", ctypes.c_float),
        ("padding", ctypes.c_uint64 * 7),
    )


def source_of(shared_bytes: int, *files: str) -> str:
    """Of a kernel whose blocks have so much shared memory."""
    names = ("common.cuh", "attention_batch.cuh", *files)
    return f"#define SHARED_BYTES {shared_bytes}\n" + "".join((FOLDER / name).read_text() for name in names)


def is_served(q: torch.Tensor, kv: KVPools) -> bool:
    """Whether the kernels are made for such queries and pools."""
    _, _, _, block_size, head_dim = kv.k.shape
    return q.dtype == torch.bfloat16 and (head_dim, block_size) == (HEAD_DIM, GROUP)


def fields_of(
    maps: tuple[TensorMap, TensorMap], kv: KVPools, meta: BatchMeta, workspace: Workspace, out: torch.Tensor,
    depth_offset: int,
) -> tuple[object, ...]:  # fmt: skip
    """Of `Batch`, without its padding; `maps` are those of keys and values."""
    num_heads, num_kv_heads = out.shape[1] // HEAD_DIM, kv.k.shape[2]
    tensors = (kv.groups, meta.items, meta.header[HEADER_ITEMS:], out, workspace.acc, workspace.stats)
    return (
        *maps, *(tensor.data_ptr() for tensor in tensors), depth_offset, kv.groups.stride(0), kv.planes,
        num_heads, num_kv_heads, SCALE_LOG2,
    )  # fmt: skip
