"""Takes the rows out of a batch whose token had left the loop before it: with two batches in flight the host
could not know.

Such a row computes like any other and leaves no trace: no K/V slot, no target in the hidden pool, no gate.
This changes metadata, which overlapped kernels read early, so a kernel that waits for all of this one must
come between.
"""

import torch

from executor.kernels.lang import jit, tl


@jit
def drop_left_kernel(p_gates, p_left, p_slots, p_target_rows, NUM_LOOPS: tl.constexpr):
    i_row = tl.program_id(0)
    gate = tl.load(p_gates + i_row)
    is_later = (gate >= 0) & (gate % NUM_LOOPS > 0)
    is_surplus = tl.load(p_left + gate // NUM_LOOPS, mask=is_later, other=0) > 0
    tl.store(p_gates + i_row, -1, mask=is_surplus)
    tl.store(p_slots + i_row, -1, mask=is_surplus)
    tl.store(p_target_rows + i_row, -1, mask=is_surplus)


def drop_left_triton(
    gates: torch.Tensor, left: torch.Tensor, slots: torch.Tensor, target_rows: torch.Tensor, num_loops: int
) -> None:
    """gates, slots, target_rows [rows] int32, changed in place; left [num_rings] int32. A row at depth 0 is a
    new token."""
    drop_left_kernel[(gates.shape[0],)](gates, left, slots, target_rows, NUM_LOOPS=num_loops, num_warps=1)


def drop_left_torch(
    gates: torch.Tensor, left: torch.Tensor, slots: torch.Tensor, target_rows: torch.Tensor, num_loops: int
) -> None:
    """Twin of `drop_left_triton`."""
    is_surplus = (gates >= 0) & (gates % num_loops > 0) & (left[gates.clamp(min=0).long() // num_loops] > 0)
    for field in (gates, slots, target_rows):
        field[is_surplus] = -1
