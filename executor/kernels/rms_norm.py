"""RMSNorm of rows: `y = x / sqrt(mean(x^2) + eps) * w`, statistics in float32."""

import torch

from executor.kernels.lang import OVERLAP, allow_next, block_for, jit, tl, wait_for_inputs


@jit
def rms_norm_kernel(p_x, p_w, p_y, size, eps, BLOCK: tl.constexpr):
    """One program per row, the whole row in one block: the order of the sum never depends on how many rows
    there are."""
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < size
    allow_next()
    wait_for_inputs()
    b_x = tl.load(p_x + i_row * size + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_w = tl.load(p_w + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / size + eps) * b_w
    tl.store(p_y + i_row * size + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """x, out [rows, hidden] contiguous; weight [hidden]."""
    rows, size = x.shape
    rms_norm_kernel[(rows,)](x, weight, out, size, eps, BLOCK=block_for(size), num_warps=4, **OVERLAP)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Twin of `rms_norm_triton`."""
    out.copy_(normalise(x.float(), weight, eps))


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float32 of float32 rows [rows, hidden]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
