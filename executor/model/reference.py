"""An independent dense Ouro in float64: the oracle of the tests, straight from the published description.

Shares no code with the fast path: separate projections by their published names, a full causal mask, no
cache, no tiles. With a fixed depth LAST_EXITED decoding is the same function, so row i of the result is also
what a decode step at position i must give.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from policies.core.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class DenseResult:
    """States after the final norm of every loop, and the LM head's logits of the last one."""

    hidden: torch.Tensor  # [loops, tokens, hidden] float64
    gate: torch.Tensor  # [loops, tokens] float64, the exit gate's probability
    logits: torch.Tensor  # [tokens, vocab] float64


def dense_forward(
    shape: ModelShape, tensors: Mapping[str, torch.Tensor], token_ids: torch.Tensor
) -> DenseResult:
    """Run the whole sequence `token_ids` [tokens] through all loops, on the device where the tokens are.

    `tensors` holds the published names; any floating dtype, same device.
    """
    device = token_ids.device

    def get(name: str) -> torch.Tensor:
        return tensors[name].detach().double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return get(name) * x / (x.square().mean(dim=1, keepdim=True) + shape.rms_norm_eps).sqrt()

    tokens = token_ids.shape[0]
    half = shape.head_dim // 2
    inverse_frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = (
        torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * inverse_frequency
    )  # [tokens, head_dim / 2]
    cosine, sine = torch.cat((angle, angle), 1).cos(), torch.cat((angle, angle), 1).sin()
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        swapped = torch.cat((-x[:, :, half:], x[:, :, :half]), 2)
        return x * cosine[:, None] + swapped * sine[:, None]

    def attention(x: torch.Tensor, at: str) -> torch.Tensor:
        query = rotate((x @ get(at + "q_proj.weight").T).reshape(tokens, shape.num_heads, shape.head_dim))
        key = rotate((x @ get(at + "k_proj.weight").T).reshape(tokens, shape.num_kv_heads, shape.head_dim))
        value = (x @ get(at + "v_proj.weight").T).reshape(tokens, shape.num_kv_heads, shape.head_dim)
        repeat = shape.num_heads // shape.num_kv_heads
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scores = torch.einsum("ihd,jhd->hij", query, key) / shape.head_dim**0.5
        probability = scores.masked_fill(future, float("-inf")).softmax(-1)
        return (
            torch.einsum("hij,jhd->ihd", probability, value).reshape(tokens, -1) @ get(at + "o_proj.weight").T
        )

    def mlp(x: torch.Tensor, at: str) -> torch.Tensor:
        gate = x @ get(at + "gate_proj.weight").T
        return (gate * gate.sigmoid() * (x @ get(at + "up_proj.weight").T)) @ get(at + "down_proj.weight").T

    hidden = get("model.embed_tokens.weight")[token_ids]
    states, gates = [], []
    for _ in range(shape.num_loops):
        for i in range(shape.num_layers):
            at = f"model.layers.{i}."
            branch = attention(norm(hidden, at + "input_layernorm.weight"), at + "self_attn.")
            hidden = hidden + norm(branch, at + "input_layernorm_2.weight")
            branch = mlp(norm(hidden, at + "post_attention_layernorm.weight"), at + "mlp.")
            hidden = hidden + norm(branch, at + "post_attention_layernorm_2.weight")
        hidden = norm(hidden, "model.norm.weight")
        states.append(hidden)
        gate_logit = hidden @ get("model.early_exit_gate.weight").T + get("model.early_exit_gate.bias")
        gates.append(gate_logit[:, 0].sigmoid())
    return DenseResult(torch.stack(states), torch.stack(gates), hidden @ get("lm_head.weight").T)
