"""LAST_EXITED: a decode token that leaves at depth e has its depth-e K/V copied into planes e+1 .. T-1, in
every layer."""

import torch

from executor.kernels.lang import block_for, jit, tl


@jit
def exit_copy_kernel(
    p_k, p_v, p_slots, stride_layer, PLANES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Programs: (row, layer)."""
    slot = tl.load(p_slots + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        depth = slot // BLOCK_SIZE % PLANES
        o_head = tl.arange(0, BLOCK_HEADS)[:, None]
        m_head = o_head < NUM_KV_HEADS
        o_dim = tl.arange(0, HEAD_DIM)[None, :]
        o_in = (
            (slot // BLOCK_SIZE * NUM_KV_HEADS + o_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        ) * HEAD_DIM + o_dim
        o_in += tl.program_id(1).to(tl.int64) * stride_layer
        b_k = tl.load(p_k + o_in, mask=m_head)
        b_v = tl.load(p_v + o_in, mask=m_head)
        for i_plane in range(1, PLANES):
            if depth + i_plane < PLANES:
                o_out = o_in + i_plane * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
                tl.store(p_k + o_out, b_k, mask=m_head)
                tl.store(p_v + o_out, b_v, mask=m_head)


def exit_copy_triton(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, planes: int) -> None:
    """k, v whole pools; slots [rows] int32 of the tokens in the plane of their last loop (negative: nothing
    to copy)."""
    num_layers, _, num_kv_heads, block_size, head_dim = k.shape
    exit_copy_kernel[(slots.shape[0], num_layers)](
        k, v, slots, k.stride(0), PLANES=planes, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, BLOCK_HEADS=block_for(num_kv_heads), num_warps=4,
    )  # fmt: skip


def exit_copy_torch(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, planes: int) -> None:
    """Twin of `exit_copy_triton`."""
    block_size = k.shape[3]
    for plane in range(1, planes):
        copied = (slots >= 0) & (slots // block_size % planes + plane < planes)
        slot = slots[copied].long()
        block, offset = slot // block_size, slot % block_size
        for pool in (k, v):
            pool[:, block + plane, :, offset] = pool[:, block, :, offset]
