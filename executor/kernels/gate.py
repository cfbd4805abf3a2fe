"""The exit gate: `sigmoid(w . h + b)` of every row, in float32."""

import torch

from executor.kernels.lang import block_for, jit, tl


@jit
def gate_kernel(p_h, p_w, p_bias, p_out, size, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < size
    b_h = tl.load(p_h + i_row * size + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_w = tl.load(p_w + o_h, mask=m_h, other=0.0).to(tl.float32)
    logit = tl.sum(b_h * b_w, 0) + tl.load(p_bias).to(tl.float32)
    tl.store(p_out + i_row, 1.0 / (1.0 + tl.exp(-logit)))


def gate_triton(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """hidden [rows, hidden] contiguous, weight [1, hidden], bias [1], out [rows] float32."""
    rows, size = hidden.shape
    gate_kernel[(rows,)](hidden, weight, bias, out, size, BLOCK=block_for(size), num_warps=4)


def gate_torch(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Twin of `gate_triton`; a row-wise sum, because a product's bits depend on its row count."""
    logit = (hidden.float() * weight.float()).sum(-1) + bias.float()
    out.copy_(1.0 / (1.0 + torch.exp(-logit)))
