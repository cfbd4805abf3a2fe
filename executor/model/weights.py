"""The weights of a looped model on one device, in the merged form the fast path multiplies with.

Owns the tensors, their published names and seeded random values. Knows no file format and no kernel.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from policies.core.models.shape import ModelShape

Fill = Callable[[str, torch.Tensor], None]
"""Writes the values of one published tensor, by name, into a view of its place."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One physical layer. Products are `x @ w.T`."""

    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: torch.Tensor  # [hidden, heads * head_dim]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    input_layernorm: torch.Tensor  # [hidden]
    input_layernorm_2: torch.Tensor  # [hidden], applied to attention's output
    post_attention_layernorm: torch.Tensor  # [hidden]
    post_attention_layernorm_2: torch.Tensor  # [hidden], applied to the MLP's output


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, one dtype, one device."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    gate_weight: torch.Tensor  # [1, hidden]
    gate_bias: torch.Tensor  # [1]
    lm_head: torch.Tensor  # [vocab, hidden]


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Published tensor names and their shapes, in checkpoint order."""
    hidden, inter = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for i in range(shape.num_layers):
        at = f"model.layers.{i}."
        shapes[at + "self_attn.q_proj.weight"] = (q_size, hidden)
        shapes[at + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[at + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[at + "mlp.gate_proj.weight"] = (inter, hidden)
        shapes[at + "mlp.up_proj.weight"] = (inter, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inter)
        for norm in (
            "input_layernorm",
            "input_layernorm_2",
            "post_attention_layernorm",
            "post_attention_layernorm_2",
        ):
            shapes[f"{at}{norm}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["model.early_exit_gate.weight"] = (1, hidden)
    shapes["model.early_exit_gate.bias"] = (1,)
    shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes


def weight_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Device memory that the weights take: the tensors themselves, merged or not."""
    return sum(math.prod(size) for size in tensor_shapes(shape).values()) * dtype.itemsize


def build_weights(shape: ModelShape, dtype: torch.dtype, device: torch.device, fill: Fill) -> Weights:
    """Allocate the merged tensors and let `fill` write every published tensor into the view that belongs to
    it."""
    weights = _allocate(shape, dtype, device)
    for name, view in named_tensors(shape, weights):
        fill(name, view)
    return weights


def random_weights(shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device) -> Weights:
    """Seeded random weights: matrices N(0, 1 / fan_in), norms 1 + N(0, 0.01), so that states keep unit size
    at every depth.

    Each tensor has a generator of its own, seeded from (seed, name): a tensor's values do not depend on the
    others. They are drawn in float32 on the target device, so they are the same on every run of one kind of
    device, and differ between CPU and CUDA.
    """

    def fill(name: str, view: torch.Tensor) -> None:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(view.shape, generator=generator, device=device, dtype=torch.float32)
        if "norm" in name:
            values.mul_(0.1).add_(1.0)
        elif name.endswith("early_exit_gate.bias"):
            values.mul_(0.1)
        elif name != "model.embed_tokens.weight":
            values.mul_(view.shape[-1] ** -0.5)
        view.copy_(values)

    return build_weights(shape, dtype, device, fill)


def named_tensors(shape: ModelShape, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Every published tensor as a view of the merged ones, in checkpoint order."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", weights.embedding
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        q, k, v = layer.qkv.split((q_size, kv_size, kv_size))
        gate, up = layer.gate_up.chunk(2)
        yield at + "self_attn.q_proj.weight", q
        yield at + "self_attn.k_proj.weight", k
        yield at + "self_attn.v_proj.weight", v
        yield at + "self_attn.o_proj.weight", layer.o
        yield at + "mlp.gate_proj.weight", gate
        yield at + "mlp.up_proj.weight", up
        yield at + "mlp.down_proj.weight", layer.down
        for norm in (
            "input_layernorm",
            "input_layernorm_2",
            "post_attention_layernorm",
            "post_attention_layernorm_2",
        ):
            yield f"{at}{norm}.weight", getattr(layer, norm)
    yield "model.norm.weight", weights.norm
    yield "model.early_exit_gate.weight", weights.gate_weight
    yield "model.early_exit_gate.bias", weights.gate_bias
    yield "lm_head.weight", weights.lm_head


def _allocate(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Weights:
    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    hidden, inter, q_size = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    layers = tuple(
        LayerWeights(
            qkv=empty(q_size + 2 * shape.num_kv_heads * shape.head_dim, hidden),
            o=empty(hidden, q_size),
            gate_up=empty(2 * inter, hidden),
            down=empty(hidden, inter),
            input_layernorm=empty(hidden),
            input_layernorm_2=empty(hidden),
            post_attention_layernorm=empty(hidden),
            post_attention_layernorm_2=empty(hidden),
        )
        for _ in range(shape.num_layers)
    )
    return Weights(
        embedding=empty(shape.vocab_size, hidden),
        layers=layers,
        norm=empty(hidden),
        gate_weight=empty(1, hidden),
        gate_bias=empty(1),
        lm_head=empty(shape.vocab_size, hidden),
    )
