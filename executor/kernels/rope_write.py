"""RoPE and the paged KV write in one pass over the merged qkv rows.

Rotates q in place (split halves, float32 cosines from a table), rotates k and stores k and v at the row's
slot. A row whose slot is negative is padding and writes nothing to the pools.
"""

import torch

from executor.kernels.lang import OVERLAP, allow_next, jit, tl, wait_for_inputs
from policies.core.models.shape import ModelShape

BLOCK_HEADS = 16


@jit
def rotate(b_lo, b_hi, b_cos, b_sin):
    """Both halves of heads rotated in float32 and rounded back."""
    b_lo_wide = b_lo.to(tl.float32)
    b_hi_wide = b_hi.to(tl.float32)
    b_lo_rotated = tl.fma(b_lo_wide, b_cos, -b_hi_wide * b_sin)
    b_hi_rotated = tl.fma(b_hi_wide, b_cos, b_lo_wide * b_sin)
    return b_lo_rotated.to(b_lo.dtype), b_hi_rotated.to(b_lo.dtype)


@jit(do_not_specialize=["slot_offset"])
def rope_write_kernel(
    p_qkv, p_cos, p_sin, p_positions, p_slots, p_k, p_v, slot_offset, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Programs: (row, block of heads); heads are q, then k, then v."""
    i_row = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_half = tl.arange(0, HALF)
    m_q = (o_head < NUM_HEADS)[:, None]
    m_k = ((o_head >= NUM_HEADS) & (o_head < NUM_HEADS + NUM_KV_HEADS))[:, None]
    m_v = ((o_head >= NUM_HEADS + NUM_KV_HEADS) & (o_head < NUM_HEADS + 2 * NUM_KV_HEADS))[:, None]
    p_row = p_qkv + i_row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF)
    p_lo = p_row + o_head[:, None] * (2 * HALF) + o_half[None, :]
    position = tl.load(p_positions + i_row).to(tl.int64)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    b_cos = tl.load(p_cos + position * HALF + o_half)[None, :]
    b_sin = tl.load(p_sin + position * HALF + o_half)[None, :]
    allow_next()
    wait_for_inputs()
    b_lo = tl.load(p_lo, mask=m_q | m_k | m_v, other=0.0)
    b_hi = tl.load(p_lo + HALF, mask=m_q | m_k | m_v, other=0.0)

    b_lo_rotated, b_hi_rotated = rotate(
        b_lo, b_hi, tl.broadcast_to(b_cos, b_lo.shape), tl.broadcast_to(b_sin, b_lo.shape)
    )
    tl.store(p_lo, b_lo_rotated, mask=m_q)
    tl.store(p_lo + HALF, b_hi_rotated, mask=m_q)

    if slot >= 0:
        slot += slot_offset
        o_kv_head = o_head % NUM_KV_HEADS  # NUM_HEADS is a multiple of it
        o_pool = (slot // BLOCK_SIZE * NUM_KV_HEADS + o_kv_head[:, None]) * BLOCK_SIZE + slot % BLOCK_SIZE
        o_pool = o_pool * (2 * HALF) + o_half[None, :]
        tl.store(p_k + o_pool, b_lo_rotated, mask=m_k)
        tl.store(p_k + o_pool + HALF, b_hi_rotated, mask=m_k)
        tl.store(p_v + o_pool, b_lo, mask=m_v)
        tl.store(p_v + o_pool + HALF, b_hi, mask=m_v)


def rope_table(
    shape: ModelShape, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [max_positions, head_dim / 2] float32, computed on the CPU so that they are the same
    for every device."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle = torch.arange(max_positions, dtype=torch.float32)[:, None] * (1.0 / shape.rope_theta**exponent)
    return angle.cos().to(device), angle.sin().to(device)


def rope_write_triton(
    qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, slots: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, depth_offset: int,
) -> None:  # fmt: skip
    """qkv [rows, (heads + 2 * kv_heads) * head_dim] contiguous; positions, slots [>= rows] int32; k, v one
    layer of the pools, [num_blocks, kv_heads, block_size, head_dim]. Slots name the plane of depth offset
    0."""
    _, num_kv_heads, block_size, head_dim = k.shape
    rows, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    grid = (rows, -(-(num_heads + 2 * num_kv_heads) // BLOCK_HEADS))
    rope_write_kernel[grid](
        qkv, *rope, positions, slots, k, v, depth_offset * block_size, NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK_SIZE=block_size, BLOCK_HEADS=BLOCK_HEADS,
        num_warps=4, **OVERLAP,
    )  # fmt: skip


def rope_write_torch(
    qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, slots: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, depth_offset: int,
) -> None:  # fmt: skip
    """Twin of `rope_write_triton`."""
    _, num_kv_heads, block_size, head_dim = k.shape
    rows = qkv.shape[0]
    heads = qkv.view(rows, -1, head_dim)
    num_rotated = heads.shape[1] - num_kv_heads
    lo, hi = heads[:, :num_rotated].float().chunk(2, dim=2)  # [rows, heads + kv_heads, head_dim / 2]
    index = positions[:rows].long()
    cosine, sine = rope[0][index][:, None], rope[1][index][:, None]
    rotated = torch.cat((lo * cosine - hi * sine, hi * cosine + lo * sine), dim=2).to(qkv.dtype)
    num_heads = num_rotated - num_kv_heads
    heads[:, :num_heads] = rotated[:, :num_heads]
    is_real = slots[:rows] >= 0
    slot = slots[:rows][is_real].long() + depth_offset * block_size
    k[slot // block_size, :, slot % block_size] = rotated[is_real, num_heads:]
    v[slot // block_size, :, slot % block_size] = heads[is_real, num_rotated:]
