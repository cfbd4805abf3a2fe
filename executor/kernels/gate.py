"""The exit gate and its rule, once a loop for every decode row: `1 - prod (1 - sigmoid(w . h + b)) >=
threshold`, in float32.

The product over the loops of a token lives on the device, one number for every ring. A row is told by its
entry in `gates`, `ring * num_loops + depth`; -1 is no decode row.
"""

from typing import NamedTuple

import torch

from executor.kernels.lang import block_for, jit, tl


class GateRule(NamedTuple):
    """Leave after loop i in [`min_loops`, `max_loops`) once the gate says so by `threshold`. Later nothing is
    left to decide."""

    threshold: float
    min_loops: int
    max_loops: int
    num_loops: int


@jit(do_not_specialize=["depth_offset"])
def gate_kernel(
    p_h, p_w, p_bias, p_gates, p_survival, p_left, p_decisions, size, depth_offset, threshold,
    MIN_LOOPS: tl.constexpr, MAX_LOOPS: tl.constexpr, NUM_LOOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    gate = tl.load(p_gates + i_row)
    leaves = 0
    if gate >= 0:
        o_h = tl.arange(0, BLOCK)
        m_h = o_h < size
        b_h = tl.load(p_h + i_row * size + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_w = tl.load(p_w + o_h, mask=m_h, other=0.0).to(tl.float32)
        logit = tl.sum(b_h * b_w, 0) + tl.load(p_bias).to(tl.float32)
        ring = gate // NUM_LOOPS
        loops = gate % NUM_LOOPS + depth_offset + 1
        before = tl.where(loops == 1, 1.0, tl.load(p_survival + ring))
        survival = before * (1.0 - 1.0 / (1.0 + tl.exp(-logit)))
        tl.store(p_survival + ring, survival)
        leaves = ((loops >= MIN_LOOPS) & (loops < MAX_LOOPS) & (1.0 - survival >= threshold)).to(tl.int32)
        tl.store(p_left + ring, leaves)
    tl.store(p_decisions + i_row, leaves)


def gate_triton(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gates: torch.Tensor,
    survival: torch.Tensor, left: torch.Tensor, decisions: torch.Tensor, depth_offset: int, rule: GateRule,
) -> None:  # fmt: skip
    """hidden [rows, hidden] after a loop; weight [1, hidden]; bias [1]; gates [>= rows] int32 of the batch's
    first loop.

    Updates survival [num_rings] float32 and left [num_rings] int32, 1 for a token that has left; writes
    decisions [>= rows] int32, 1 for a row that leaves after this loop. The first loop of a token starts both
    anew.
    """
    rows, size = hidden.shape
    gate_kernel[(rows,)](
        hidden, weight, bias, gates, survival, left, decisions, size, depth_offset, rule.threshold,
        MIN_LOOPS=rule.min_loops, MAX_LOOPS=rule.max_loops, NUM_LOOPS=rule.num_loops, BLOCK=block_for(size),
        num_warps=4,
    )  # fmt: skip


def gate_torch(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gates: torch.Tensor,
    survival: torch.Tensor, left: torch.Tensor, decisions: torch.Tensor, depth_offset: int, rule: GateRule,
) -> None:  # fmt: skip
    """Twin of `gate_triton`; a row-wise sum, because a product's bits depend on its row count."""
    gates = gates[: hidden.shape[0]]
    is_decode = gates >= 0
    ring = gates[is_decode].long() // rule.num_loops
    loops = gates[is_decode] % rule.num_loops + depth_offset + 1
    logit = (hidden[is_decode].float() * weight.float()).sum(-1) + bias.float()
    before = torch.where(loops == 1, 1.0, survival[ring])
    survival[ring] = before * (1.0 - 1.0 / (1.0 + torch.exp(-logit)))
    leaves = (loops >= rule.min_loops) & (loops < rule.max_loops) & (1.0 - survival[ring] >= rule.threshold)
    left[ring] = leaves.int()
    decisions[: hidden.shape[0]] = 0
    decisions[: hidden.shape[0]][is_decode] = leaves.int()
