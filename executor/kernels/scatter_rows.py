"""`target[index[i]] = source[i]` for rows with a non-negative index."""

import torch

from executor.kernels.lang import block_for, jit, tl


@jit
def scatter_rows_kernel(p_source, p_index, p_target, size, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_target = tl.load(p_index + i_row).to(tl.int64)
    if i_target >= 0:
        o_x = tl.arange(0, BLOCK)
        b_x = tl.load(p_source + i_row * size + o_x, mask=o_x < size)
        tl.store(p_target + i_target * size + o_x, b_x, mask=o_x < size)


def scatter_rows_triton(source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
    """source [rows, size], index [>= rows] int32 without duplicates, target [n, size]; contiguous, one
    dtype."""
    rows, size = source.shape
    scatter_rows_kernel[(rows,)](source, index, target, size, BLOCK=block_for(size), num_warps=4)


def scatter_rows_torch(source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
    """Twin of `scatter_rows_triton`."""
    index = index[: source.shape[0]]
    kept = index >= 0
    target[index[kept].long()] = source[kept]
