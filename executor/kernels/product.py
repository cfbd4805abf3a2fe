"""Products of few rows with the work that follows them in the same kernel: plain, SwiGLU, or RoPE with the K/V write.

Few rows leave a product waiting for its weights, so these kernels are built to stream them: narrow column tiles, so that all
multiprocessors take part; a deep pipeline; and, because launches overlap, each program asks for its weights before it waits for its
rows. The reduction over the inner size runs in one order whatever the tile (no split-K), so the bits are those of every other tile
shape and of cuBLAS without a workspace (`executor.environment`), which takes over at more rows (`executor.kernels.linear`).
"""

from dataclasses import dataclass

import torch

from executor.kernels.lang import OVERLAP, allow_next, jit, prefetch_l2, tl, wait_for_inputs
from executor.kernels.rope_write import rotate
from executor.kernels.swiglu import silu_times


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tile and pipeline of one (product, row class)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return (-(-rows // self.block_m), columns // self.block_n)


@jit
def tile_product(
    p_x, p_w, rows, o_m, o_n, p_prefetch,
    SIZE_IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
):  # fmt: skip
    """x[o_m] @ w[o_n].T as [BLOCK_M, BLOCK_N] float32; x [rows, SIZE_IN], w [*, SIZE_IN]. Waits for x here."""
    allow_next()
    prefetch_l2(p_prefetch, PREFETCH_BYTES)
    wait_for_inputs()
    o_k = tl.arange(0, BLOCK_K)
    m_m = (o_m < rows)[:, None]
    p_x += o_m.to(tl.int64)[:, None] * SIZE_IN + o_k[None, :]
    p_w += o_n.to(tl.int64)[:, None] * SIZE_IN + o_k[None, :]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i_k in tl.range(0, SIZE_IN, BLOCK_K, num_stages=NUM_STAGES):
        b_x = tl.load(p_x + i_k, mask=m_m, other=0.0)
        b_w = tl.load(p_w + i_k)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    return b_acc


@jit
def split_halves(b_x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] to its left and right half, each [BLOCK_M, BLOCK_N / 2]."""
    return tl.split(tl.permute(tl.reshape(b_x, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@jit(do_not_specialize=["rows"])
def linear_kernel(
    p_x, p_w, p_out, rows, size_out,
    SIZE_IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Programs: (row tile, column tile); row tiles of one column tile run side by side and share its weights in L2."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = tl.program_id(1) * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    PART: tl.constexpr = BLOCK_N * SIZE_IN // THREADS
    p_prefetch = p_w + first_n.to(tl.int64) * SIZE_IN + tl.arange(0, THREADS) * PART
    b_acc = tile_product(
        p_x, p_w, rows, o_m, o_n, p_prefetch, SIZE_IN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        PART * p_w.dtype.element_ty.primitive_bitwidth // 8,
    )  # fmt: skip
    p_o = p_out + o_m.to(tl.int64)[:, None] * size_out + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=(o_m < rows)[:, None])


@jit(do_not_specialize=["rows"])
def swiglu_product_kernel(
    p_x, p_w, p_out, rows, size_out,
    SIZE_IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """A column tile is BLOCK_N / 2 gate columns and the up columns that belong to them, `size_out` rows of the weight further on."""
    HALF_N: tl.constexpr = BLOCK_N // 2
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_n = tl.program_id(1) * HALF_N
    o_i = tl.arange(0, BLOCK_N)
    o_n = first_n + o_i % HALF_N + o_i // HALF_N * size_out
    PART: tl.constexpr = BLOCK_N * SIZE_IN // THREADS
    o_t = tl.arange(0, THREADS)
    first_row = first_n.to(tl.int64) + o_t // (THREADS // 2) * size_out
    p_prefetch = p_w + first_row * SIZE_IN + o_t % (THREADS // 2) * PART
    b_acc = tile_product(
        p_x, p_w, rows, o_m, o_n, p_prefetch, SIZE_IN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        PART * p_w.dtype.element_ty.primitive_bitwidth // 8,
    )  # fmt: skip
    b_gate, b_up = split_halves(b_acc.to(p_out.dtype.element_ty), BLOCK_M, BLOCK_N)
    o_out = first_n + tl.arange(0, HALF_N)
    p_o = p_out + o_m.to(tl.int64)[:, None] * size_out + o_out[None, :]
    tl.store(p_o, silu_times(b_gate, b_up).to(p_out.dtype.element_ty), mask=(o_m < rows)[:, None])


@jit(do_not_specialize=["rows", "slot_offset"])
def rope_product_kernel(
    p_x, p_w, p_qkv, p_cos, p_sin, p_positions, p_slots, p_k, p_v, rows, slot_offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SIZE_IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """A column tile is BLOCK_N / 2 columns of the lower half of one head and their partners in the upper half."""
    HALF_N: tl.constexpr = BLOCK_N // 2
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    i_head = tl.program_id(1) * HALF_N // HALF
    first_column = tl.program_id(1) * HALF_N % HALF
    first_n = i_head * (2 * HALF) + first_column
    o_i = tl.arange(0, BLOCK_N)
    o_n = first_n + o_i % HALF_N + o_i // HALF_N * HALF
    o_column = first_column + tl.arange(0, HALF_N)
    position = tl.load(p_positions + o_m, mask=m_m, other=0).to(tl.int64)
    slot = tl.load(p_slots + o_m, mask=m_m, other=-1).to(tl.int64)
    o_table = position[:, None] * HALF + o_column[None, :]
    b_cos = tl.load(p_cos + o_table)
    b_sin = tl.load(p_sin + o_table)

    PART: tl.constexpr = BLOCK_N * SIZE_IN // THREADS
    o_t = tl.arange(0, THREADS)
    first_row = first_n.to(tl.int64) + o_t // (THREADS // 2) * HALF
    p_prefetch = p_w + first_row * SIZE_IN + o_t % (THREADS // 2) * PART
    b_acc = tile_product(
        p_x, p_w, rows, o_m, o_n, p_prefetch, SIZE_IN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        PART * p_w.dtype.element_ty.primitive_bitwidth // 8,
    )  # fmt: skip
    b_lo, b_hi = split_halves(b_acc.to(p_qkv.dtype.element_ty), BLOCK_M, BLOCK_N)
    b_lo_rotated, b_hi_rotated = rotate(b_lo, b_hi, b_cos, b_sin)
    is_q = i_head < NUM_HEADS
    is_v = i_head >= NUM_HEADS + NUM_KV_HEADS
    if is_q:
        p_o = p_qkv + o_m.to(tl.int64)[:, None] * ((NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF) + (i_head * (2 * HALF) + o_column)[None, :]
        tl.store(p_o, b_lo_rotated, mask=m_m[:, None])
        tl.store(p_o + HALF, b_hi_rotated, mask=m_m[:, None])
    else:
        m_slot = (slot >= 0)[:, None]
        slot += slot_offset
        i_kv_head = (i_head - NUM_HEADS) % NUM_KV_HEADS
        o_pool = (slot // BLOCK_SIZE * NUM_KV_HEADS + i_kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        o_pool = o_pool[:, None] * (2 * HALF) + o_column[None, :]
        if is_v:
            tl.store(p_v + o_pool, b_lo, mask=m_slot)
            tl.store(p_v + o_pool + HALF, b_hi, mask=m_slot)
        else:
            tl.store(p_k + o_pool, b_lo_rotated, mask=m_slot)
            tl.store(p_k + o_pool + HALF, b_hi_rotated, mask=m_slot)


def linear_triton(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, config: ProductConfig) -> None:
    """x [rows, in], weight [out, in], out [rows, out], contiguous; `config` must divide both sizes."""
    rows, size_in = x.shape
    linear_kernel[config.grid(rows, weight.shape[0])](
        x, weight, out, rows, out.shape[1], SIZE_IN=size_in, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, THREADS=32 * config.num_warps, num_warps=config.num_warps, **OVERLAP,
    )  # fmt: skip


def swiglu_product_triton(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, config: ProductConfig) -> None:
    """out = silu(x @ gate.T) * (x @ up.T): x [rows, in], gate_up [2 * intermediate, in], out [rows, intermediate]."""
    rows, size_in = x.shape
    swiglu_product_kernel[config.grid(rows, gate_up.shape[0])](
        x, gate_up, out, rows, out.shape[1], SIZE_IN=size_in, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        NUM_STAGES=config.num_stages, THREADS=32 * config.num_warps, num_warps=config.num_warps, **OVERLAP,
    )  # fmt: skip


def rope_product_triton(
    x: torch.Tensor, weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, slots: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, depth_offset: int, qkv: torch.Tensor, config: ProductConfig,
) -> None:  # fmt: skip
    """`qkv = x @ weight.T` followed by `rope_write_triton`, except that of `qkv` only q is written. Arguments as there."""
    _, num_kv_heads, block_size, head_dim = k.shape
    rows, size_in = x.shape
    rope_product_kernel[config.grid(rows, weight.shape[0])](
        x, weight, qkv, *rope, positions, slots, k, v, rows, depth_offset * block_size,
        NUM_HEADS=weight.shape[0] // head_dim - 2 * num_kv_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK_SIZE=block_size,
        SIZE_IN=size_in, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, NUM_STAGES=config.num_stages,
        THREADS=32 * config.num_warps, num_warps=config.num_warps, **OVERLAP,
    )  # fmt: skip
