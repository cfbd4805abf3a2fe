"""The shape of a looped language model and what follows from it by arithmetic alone: bytes, FLOPs, KV size,
capabilities.

Owns no weights and knows no device. Constants are those published with the checkpoints
(`ByteDance/Ouro-1.4B`, `-2.6B`).
"""

from dataclasses import dataclass, replace
from typing import Annotated

from policies.core.bounds import Within

BF16_BYTES = 2
MAX_LOOPS = 1024
Size = Annotated[int, Within(1, 1 << 24)]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one looped decoder: `num_layers` physical layers applied `num_loops` times to every token.

    `atomic_prefill_only` is a capability: such a model cannot return to the scheduler between recurrent
    depths of a prompt. `dtype_bytes` is the width of weights, activations and KV elements.
    """

    name: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Annotated[int, Within(1, 10_000)]
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    num_loops: Annotated[int, Within(1, MAX_LOOPS)]
    max_context_tokens: Annotated[int, Within(1, 1 << 30)]
    rope_theta: Annotated[float, Within(gt=0, le=1e12)] = 1e6
    rms_norm_eps: Annotated[float, Within(gt=0, lt=1)] = 1e-6
    bos_token_id: Annotated[int, Within(0)] = 0
    eos_token_id: Annotated[int, Within(0)] = 0
    dtype_bytes: Annotated[int, Within(2, 4)] = BF16_BYTES
    atomic_prefill_only: bool = False

    @property
    def recurrent_params(self) -> int:
        """Weights of the linear layers read by one recurrent invocation (qkv, o, gate, up, down of every
        physical layer).

        Ouro-1.4B: 24 x (2048 x 6144 + 2048 x 2048 + 3 x 2048 x 5632) = 1,233,125,376 weights, 2.466 GB at 2 B
        each.
        """
        q_and_o = 2 * self.hidden_size * self.num_heads * self.head_dim
        k_and_v = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        return self.num_layers * (q_and_o + k_and_v + 3 * self.hidden_size * self.intermediate_size)

    @property
    def recurrent_weight_bytes(self) -> int:
        return self.recurrent_params * self.dtype_bytes

    @property
    def linear_flops_per_row(self) -> int:
        """Floating-point operations of the linear layers for one row and one depth (a multiply and an add per
        weight)."""
        return 2 * self.recurrent_params

    @property
    def kv_bytes_per_token_and_depth(self) -> int:
        """K and V of one token in one depth plane, all layers. Ouro-1.4B: 2 x 24 x 16 x 128 x 2 B = 196,608
        B."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def attention_flops_per_pair(self) -> int:
        """Floating-point operations for one (query, key) pair in one depth, all layers and heads: QK and PV,
        2 each."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def lm_head_bytes(self) -> int:
        return self.vocab_size * self.hidden_size * self.dtype_bytes

    @property
    def lm_head_flops_per_row(self) -> int:
        return 2 * self.vocab_size * self.hidden_size

    @property
    def hidden_bytes_per_row(self) -> int:
        return self.hidden_size * self.dtype_bytes

    @property
    def total_weight_bytes(self) -> int:
        """All weights in device memory: recurrent layers, embedding and LM head (norms and gate are below 0.1
        %)."""
        return self.recurrent_weight_bytes + 2 * self.lm_head_bytes


OURO_1_4B = ModelShape(
    name="ouro-1.4b",
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    num_loops=4,
    max_context_tokens=65536,
)
OURO_2_6B = replace(OURO_1_4B, name="ouro-2.6b", num_layers=48)
OURO_TINY = ModelShape(
    name="ouro-tiny",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    num_loops=4,
    max_context_tokens=65536,
    dtype_bytes=4,
)

HUGINN_LIKE = ModelShape(
    name="huginn-like",
    vocab_size=65536,
    hidden_size=5280,
    intermediate_size=17920,
    num_layers=4,
    num_heads=55,
    num_kv_heads=55,
    head_dim=96,
    num_loops=32,
    max_context_tokens=4096,
    atomic_prefill_only=True,
)
"""The recurrent block of a model like Huginn, for simulations: its few layers before and after the loop are
left out."""

SHIPPED_MODELS = {shape.name: shape for shape in (OURO_1_4B, OURO_2_6B, OURO_TINY, HUGINN_LIKE)}

HUB_MODELS = {
    f"ByteDance/Ouro-{size}{variant}": shape
    for size, shape in (("1.4B", OURO_1_4B), ("2.6B", OURO_2_6B))
    for variant in ("", "-Thinking")
}
"""Ids of published checkpoints whose shape is known without them."""
