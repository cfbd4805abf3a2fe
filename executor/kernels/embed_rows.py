"""Embeds rows whose token the host knows, or that was sampled and never left the device.

A row's token is `token_ids[i]`, or when that is -1 `sampled[sampled_rows[i]]`; where both are -1, `out[i]`
keeps what it holds.
"""

import torch

from executor.kernels.lang import block_for, jit, tl


@jit
def embed_rows_kernel(p_embedding, p_token_ids, p_sampled, p_sampled_rows, p_out, size, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_sampled = tl.load(p_sampled_rows + i_row)
    token = tl.load(p_token_ids + i_row)
    if (token < 0) & (i_sampled >= 0):
        token = tl.load(p_sampled + i_sampled)
    if token >= 0:
        o_x = tl.arange(0, BLOCK)
        b_x = tl.load(p_embedding + token.to(tl.int64) * size + o_x, mask=o_x < size)
        tl.store(p_out + i_row * size + o_x, b_x, mask=o_x < size)


def embed_rows_triton(
    embedding: torch.Tensor,
    token_ids: torch.Tensor,
    sampled: torch.Tensor,
    sampled_rows: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """embedding [vocab, hidden]; token_ids, sampled_rows [>= rows] int32; sampled [n] int32; out [rows,
    hidden]."""
    rows, size = out.shape
    block = block_for(size)
    embed_rows_kernel[(rows,)](
        embedding, token_ids, sampled, sampled_rows, out, size, BLOCK=block, num_warps=4
    )


def embed_rows_torch(
    embedding: torch.Tensor,
    token_ids: torch.Tensor,
    sampled: torch.Tensor,
    sampled_rows: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Twin of `embed_rows_triton`."""
    rows = out.shape[0]
    tokens = token_ids[:rows].clone()
    from_sampled = (tokens < 0) & (sampled_rows[:rows] >= 0)
    tokens[from_sampled] = sampled[sampled_rows[:rows][from_sampled].long()]
    kept = tokens >= 0
    out[kept] = embedding[tokens[kept].long()]
