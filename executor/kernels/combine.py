"""Joins the partial results of rows whose history was split between work items, in the order of the
splits."""

import torch

from executor.kernels.fold import fold
from executor.kernels.lang import OVERLAP, allow_next, jit, tl, wait_for_inputs
from executor.kernels.meta import COMBINE_WORDS

PROGRAMS_PER_SM = 8


@jit
def combine_kernel(
    p_acc, p_stats, p_combines, p_num_combines, p_out, scale_log2,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COMBINE_WORDS: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs share (row, head) units, whose number is read from the device."""
    allow_next()
    o_one = tl.arange(0, 1)
    o_d = tl.arange(0, HEAD_DIM)[None, :]
    num_units = tl.load(p_num_combines) * NUM_HEADS
    wait_for_inputs()
    for i_unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        i_head = i_unit % NUM_HEADS
        p_entry = p_combines + i_unit // NUM_HEADS * COMBINE_WORDS
        row = tl.load(p_entry).to(tl.int64)
        first_partial = tl.load(p_entry + 1).to(tl.int64)
        stride_split = tl.load(p_entry + 2).to(tl.int64)
        num_splits = tl.load(p_entry + 3)
        b_max = tl.full([1], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([1], dtype=tl.float32)
        b_acc = tl.zeros([1, HEAD_DIM], dtype=tl.float32)
        for i_split in range(num_splits):
            o_partial = (first_partial + i_split * stride_split) * NUM_HEADS + i_head + o_one
            b_split_max = tl.load(p_stats + o_partial * 2)
            b_split_sum = tl.load(p_stats + o_partial * 2 + 1)
            b_split_acc = tl.load(p_acc + o_partial[:, None] * HEAD_DIM + o_d)
            b_max, b_sum, b_acc = fold(b_max, b_sum, b_acc, b_split_max, b_split_sum, b_split_acc, scale_log2)
        b_out = b_acc * (1.0 / b_sum)[:, None]
        o_out = (row * NUM_HEADS + i_head + o_one)[:, None] * HEAD_DIM + o_d
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty))


def combine_triton(
    acc: torch.Tensor, stats: torch.Tensor, combines: torch.Tensor, num_combines: torch.Tensor, num_sms: int,
    scale_log2: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """acc [partials, heads, head_dim], stats [partials, heads, 2] float32; combines [max_rows, 4] and
    num_combines [>= 1] int32; out [rows, heads * head_dim]. Rows that no entry names keep what they hold."""
    _, num_heads, head_dim = acc.shape
    combine_kernel[(num_sms * PROGRAMS_PER_SM,)](
        acc, stats, combines, num_combines, out, scale_log2, NUM_HEADS=num_heads, HEAD_DIM=head_dim,
        COMBINE_WORDS=COMBINE_WORDS, num_warps=1, **OVERLAP,
    )  # fmt: skip
