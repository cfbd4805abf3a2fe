"""The loop a user would write without an engine: eager torch, scaled_dot_product_attention, T loops, K/V kept
in dense caches.

A peer for benchmarks only: the same weights as the executor's, one static batch of equally long sequences, no
scheduler.
"""

import torch
import torch.nn.functional as F

from executor.kernels.rope_write import rope_table
from executor.model.weights import LayerWeights, Weights
from policies.core.models.shape import ModelShape


class EagerLoop:
    """A static batch of `batch` sequences of up to `max_tokens` tokens."""

    def __init__(self, shape: ModelShape, weights: Weights, batch: int, max_tokens: int) -> None:
        self._shape = shape
        self._weights = weights
        embedding = weights.embedding
        size = (shape.num_loops, shape.num_layers, 2, batch, shape.num_kv_heads, max_tokens, shape.head_dim)
        self._cache = torch.zeros(size, dtype=embedding.dtype, device=embedding.device)
        cosine, sine = rope_table(shape, max_tokens, embedding.device)
        self._cosine, self._sine = cosine.repeat(1, 2), sine.repeat(1, 2)  # [max_tokens, head_dim]

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        """Run tokens [batch, count] at positions `start ..` through all loops; logits of the last position,
        [batch, vocab]."""
        count = token_ids.shape[1]
        cosine, sine = self._cosine[start : start + count], self._sine[start : start + count]
        mask = None
        if start and count > 1:
            keys = torch.arange(start + count, device=token_ids.device)
            mask = keys[None] <= keys[start:, None]  # [count, start + count]
        hidden = F.embedding(token_ids, self._weights.embedding)
        for loop in range(self._shape.num_loops):
            for index, layer in enumerate(self._weights.layers):
                branch = self._attend(
                    self._norm(hidden, layer.input_layernorm), layer, loop, index, start, cosine, sine, mask
                )
                hidden = hidden + self._norm(branch, layer.input_layernorm_2)
                gate, up = F.linear(self._norm(hidden, layer.post_attention_layernorm), layer.gate_up).chunk(
                    2, dim=-1
                )
                hidden = hidden + self._norm(
                    F.linear(F.silu(gate) * up, layer.down), layer.post_attention_layernorm_2
                )
            hidden = self._norm(hidden, self._weights.norm)
        return F.linear(hidden[:, -1], self._weights.lm_head)

    def fill(self, tokens: int) -> None:
        """Pretend that `tokens` tokens have been run: random K/V, so that a later chunk can be timed at its
        true context."""
        self._cache[:, :, :, :, :, :tokens].normal_()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._shape.rms_norm_eps)).to(
            x.dtype
        ) * weight

    def _attend(
        self, x: torch.Tensor, layer: LayerWeights, loop: int, index: int, start: int, cosine: torch.Tensor,
        sine: torch.Tensor, mask: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        shape, (batch, count, _) = self._shape, x.shape
        sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        query, key, value = (
            part.view(batch, count, -1, shape.head_dim).transpose(1, 2)
            for part in F.linear(x, layer.qkv).split([heads * shape.head_dim for heads in sizes], dim=-1)
        )
        query, key = (_rotate(part, cosine, sine) for part in (query, key))
        cache = self._cache[loop, index]
        cache[0, :, :, start : start + count] = key
        cache[1, :, :, start : start + count] = value
        keys, values = cache[0, :, :, : start + count], cache[1, :, :, : start + count]
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None and count > 1
        )
        return F.linear(attended.transpose(1, 2).reshape(batch, count, -1), layer.o)


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return (x.float() * cosine + torch.cat((-high, low), dim=-1) * sine).to(x.dtype)
