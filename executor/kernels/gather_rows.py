"""`out[i] = source[index[i]]` for rows with a non-negative index; other rows of `out` keep what they hold."""

import torch

from executor.kernels.lang import block_for, jit, tl


@jit
def gather_rows_kernel(p_source, p_index, p_out, size, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_source = tl.load(p_index + i_row).to(tl.int64)
    if i_source >= 0:
        o_x = tl.arange(0, BLOCK)
        b_x = tl.load(p_source + i_source * size + o_x, mask=o_x < size)
        tl.store(p_out + i_row * size + o_x, b_x, mask=o_x < size)


def gather_rows_triton(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """source [n, size], index [>= rows] int32, out [rows, size]; contiguous, one dtype."""
    rows, size = out.shape
    gather_rows_kernel[(rows,)](source, index, out, size, BLOCK=block_for(size), num_warps=4)


def gather_rows_torch(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """Twin of `gather_rows_triton`."""
    index = index[: out.shape[0]]
    kept = index >= 0
    out[kept] = source[index[kept].long()]
