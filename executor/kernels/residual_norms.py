"""The sandwich's seam: `h' = h + norm(x, w_post)`, then `y = norm(h', w_next)`, in one pass over the row.

`h'` is rounded to the residual's dtype before the second norm, so that fused and unfused give the same state.
"""

import torch

from executor.kernels.lang import OVERLAP, allow_next, block_for, jit, tl, wait_for_inputs
from executor.kernels.rms_norm import normalise


@jit
def residual_norms_kernel(p_x, p_h, p_w_post, p_w_next, p_h_out, p_y, size, eps, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < size
    b_w_post = tl.load(p_w_post + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_w_next = tl.load(p_w_next + o_x, mask=m_x, other=0.0).to(tl.float32)
    allow_next()
    wait_for_inputs()
    b_x = tl.load(p_x + i_row * size + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_h = tl.load(p_h + i_row * size + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_h = tl.fma(b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / size + eps), b_w_post, b_h)
    b_h = b_h.to(p_h_out.dtype.element_ty)
    tl.store(p_h_out + i_row * size + o_x, b_h, mask=m_x)
    b_h = b_h.to(tl.float32)
    b_y = b_h * tl.rsqrt(tl.sum(b_h * b_h, 0) / size + eps) * b_w_next
    tl.store(p_y + i_row * size + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)


def residual_norms_triton(
    x: torch.Tensor,
    h: torch.Tensor,
    w_post: torch.Tensor,
    w_next: torch.Tensor,
    eps: float,
    h_out: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """All rows [rows, hidden] contiguous; `h_out` may be `h`, `y` may be `x`; `y` and `h_out` must differ."""
    rows, size = x.shape
    block = block_for(size)
    residual_norms_kernel[(rows,)](
        x, h, w_post, w_next, h_out, y, size, eps, BLOCK=block, num_warps=4, **OVERLAP
    )


def residual_norms_torch(
    x: torch.Tensor,
    h: torch.Tensor,
    w_post: torch.Tensor,
    w_next: torch.Tensor,
    eps: float,
    h_out: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Twin of `residual_norms_triton`."""
    h_out.copy_(h.float() + normalise(x.float(), w_post, eps))
    y.copy_(normalise(h_out.float(), w_next, eps))
