"""The qkv and gate+up products of few rows, each with what follows it in the same kernel: RoPE and the K/V
write, SwiGLU.

The weight is seen as [groups, 2, columns, in]: a column tile takes the same columns of both halves of a group
(gate and up, or the lower and upper half of one head), so what must be combined meets in one program. The
bulk copy engine fetches the tiles. The sum over the inner size runs in one order whatever the tile (no
split-K), so the bits are those of cuBLAS without a workspace (`executor.environment`), which takes over at
more rows (`executor.kernels.linear`).
"""

from dataclasses import dataclass
from typing import Any

import torch

from executor.kernels.lang import OVERLAP, TensorDescriptor, allow_next, jit, tl, wait_for_inputs
from executor.kernels.rope_write import rotate
from executor.kernels.swiglu import silu_times


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tile and pipeline of one (product, row class); a tile has `block_n` columns of each half."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return (-(-rows // self.block_m), columns // self.block_n)

    def descriptors(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, Any]:
        """How tiles are cut from `x` [rows, in], whose rows past the end are read as 0, and `weight` [groups,
        2, columns, in]."""
        box = [1, 2, self.block_n, self.block_k]
        return TensorDescriptor.from_tensor(x, [self.block_m, self.block_k]), TensorDescriptor.from_tensor(
            weight, box
        )


@jit
def pair_product(
    d_x, d_w, first_m, i_group, first_n, SIZE_IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Two products [BLOCK_M, BLOCK_N] of the same rows: the weight rows from `first_n` on in both halves of
    group `i_group`."""
    wait_for_inputs()
    allow_next()
    b_acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)
    for i_k in tl.range(0, SIZE_IN, BLOCK_K, num_stages=NUM_STAGES):
        b_x = d_x.load([first_m, i_k])
        b_w = tl.reshape(d_w.load([i_group, 0, first_n, i_k]), (2 * BLOCK_N, BLOCK_K))
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    return tl.split(tl.permute(tl.reshape(b_acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))


@jit(do_not_specialize=["rows"])
def swiglu_product_kernel(
    d_x, d_w, p_out, rows, size_out, SIZE_IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A column tile is BLOCK_N gate columns and the up columns that belong to them, `size_out` rows of the
    weight further on."""
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * BLOCK_N
    b_gate, b_up = pair_product(d_x, d_w, first_m, 0, first_n, SIZE_IN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES)
    o_m = first_m + tl.arange(0, BLOCK_M)
    dtype = p_out.dtype.element_ty
    p_o = p_out + o_m.to(tl.int64)[:, None] * size_out + (first_n + tl.arange(0, BLOCK_N))[None, :]
    tl.store(p_o, silu_times(b_gate.to(dtype), b_up.to(dtype)).to(dtype), mask=(o_m < rows)[:, None])


@jit(do_not_specialize=["rows", "slot_offset"])
def rope_product_kernel(
    d_x, d_w, p_qkv, p_cos, p_sin, p_positions, p_slots, p_k, p_v, rows, slot_offset, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIZE_IN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A column tile is BLOCK_N columns of the lower half of one head and their partners in the upper half."""
    first_m = tl.program_id(0) * BLOCK_M
    i_head = tl.program_id(1) * BLOCK_N // HALF
    first_column = tl.program_id(1) * BLOCK_N % HALF
    o_m = first_m + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    o_column = first_column + tl.arange(0, BLOCK_N)
    position = tl.load(p_positions + o_m, mask=m_m, other=0).to(tl.int64)
    slot = tl.load(p_slots + o_m, mask=m_m, other=-1).to(tl.int64)
    o_table = position[:, None] * HALF + o_column[None, :]
    b_cos = tl.load(p_cos + o_table)
    b_sin = tl.load(p_sin + o_table)
    b_lo, b_hi = pair_product(
        d_x, d_w, first_m, i_head, first_column, SIZE_IN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES
    )
    b_lo = b_lo.to(p_qkv.dtype.element_ty)
    b_hi = b_hi.to(p_qkv.dtype.element_ty)
    b_lo_rotated, b_hi_rotated = rotate(b_lo, b_hi, b_cos, b_sin)
    if i_head < NUM_HEADS:
        o_q = (
            o_m.to(tl.int64)[:, None] * ((NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF)
            + (i_head * (2 * HALF) + o_column)[None, :]
        )
        tl.store(p_qkv + o_q, b_lo_rotated, mask=m_m[:, None])
        tl.store(p_qkv + o_q + HALF, b_hi_rotated, mask=m_m[:, None])
    else:
        m_slot = (slot >= 0)[:, None]
        slot += slot_offset
        i_kv_head = (i_head - NUM_HEADS) % NUM_KV_HEADS
        o_pool = (slot // BLOCK_SIZE * NUM_KV_HEADS + i_kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        o_pool = o_pool[:, None] * (2 * HALF) + o_column[None, :]
        if i_head < NUM_HEADS + NUM_KV_HEADS:
            tl.store(p_k + o_pool, b_lo_rotated, mask=m_slot)
            tl.store(p_k + o_pool + HALF, b_hi_rotated, mask=m_slot)
        else:
            tl.store(p_v + o_pool, b_lo, mask=m_slot)
            tl.store(p_v + o_pool + HALF, b_hi, mask=m_slot)


def swiglu_product_triton(
    x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, config: ProductConfig
) -> None:
    """out = silu(x @ gate.T) * (x @ up.T): x [rows, in], gate_up [2 * intermediate, in], out [rows,
    intermediate]."""
    rows, size_in = x.shape
    swiglu_product_kernel[config.grid(rows, out.shape[1])](
        *config.descriptors(x, gate_up.view(1, 2, -1, size_in)), out, rows, out.shape[1], SIZE_IN=size_in,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps, **OVERLAP,
    )  # fmt: skip


def rope_product_triton(
    x: torch.Tensor, weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor,
    slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, depth_offset: int, qkv: torch.Tensor,
    config: ProductConfig,
) -> None:  # fmt: skip
    """`qkv = x @ weight.T` followed by `rope_write_triton`, except that of `qkv` only q is written. Arguments
    as there."""
    _, num_kv_heads, block_size, head_dim = k.shape
    rows, size_in = x.shape
    rope_product_kernel[config.grid(rows, weight.shape[0] // 2)](
        *config.descriptors(x, weight.view(-1, 2, head_dim // 2, size_in)), qkv, *rope, positions, slots, k,
        v, rows, depth_offset * block_size, NUM_HEADS=weight.shape[0] // head_dim - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK_SIZE=block_size, SIZE_IN=size_in,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps, **OVERLAP,
    )  # fmt: skip
