"""SwiGLU on the merged product: `y = silu(gate) * up`, in float32, rounded once."""

import torch

from executor.kernels.lang import OVERLAP, allow_next, jit, tl, wait_for_inputs

BLOCK_COLUMNS = 2048


@jit
def silu_times(b_gate, b_up):
    """silu(gate) * up in float32, of values already rounded to the activations' dtype."""
    b_gate = b_gate.to(tl.float32)
    return b_gate / (1.0 + tl.exp(-b_gate)) * b_up.to(tl.float32)


@jit
def swiglu_kernel(p_x, p_y, size, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_y = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_y = o_y < size
    allow_next()
    wait_for_inputs()
    b_gate = tl.load(p_x + i_row * 2 * size + o_y, mask=m_y, other=0.0)
    b_up = tl.load(p_x + i_row * 2 * size + size + o_y, mask=m_y, other=0.0)
    tl.store(p_y + i_row * size + o_y, silu_times(b_gate, b_up).to(p_y.dtype.element_ty), mask=m_y)


def swiglu_triton(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """gate_up [rows, 2 * intermediate], out [rows, intermediate], both contiguous."""
    rows, size = out.shape
    grid = (rows, -(-size // BLOCK_COLUMNS))
    swiglu_kernel[grid](gate_up, out, size, BLOCK=BLOCK_COLUMNS, num_warps=4, **OVERLAP)


def swiglu_torch(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Twin of `swiglu_triton`. Written with exp: torch's sigmoid and silu round the tail of a buffer
    differently from its body."""
    gate, up = gate_up.float().chunk(2, dim=1)
    out.copy_(gate / (1.0 + torch.exp(-gate)) * up)
