"""The fast path: Ouro over flat rows and paged K/V, as functions that only read and write buffers given to
them.

Nothing here looks at a tensor's value on the host or allocates on CUDA, so each function can be captured in a
CUDA graph. Which kernels run is the `Ops`'; what a row is (prompt token, decode token, padding) only the
metadata knows.
"""

from dataclasses import dataclass, fields

import torch

from executor.kernels.gate import GateRule
from executor.kernels.kv import KVPools
from executor.kernels.meta import BatchMeta
from executor.kernels.ops import Ops
from executor.kernels.rope_write import rope_table
from executor.model.weights import Weights
from policies.core.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LoopedModel:
    """Weights, the kernels that apply them, and the rotation table of every position that will be used."""

    shape: ModelShape
    weights: Weights
    ops: Ops
    rope: tuple[torch.Tensor, torch.Tensor]  # each [max_positions, head_dim / 2] float32

    @classmethod
    def assemble(cls, shape: ModelShape, weights: Weights, ops: Ops, max_positions: int) -> "LoopedModel":
        return cls(shape, weights, ops, rope_table(shape, max_positions, weights.embedding.device))


@dataclass(frozen=True, slots=True)
class Scratch:
    """Activations of one batch. `hidden` is what a loop reads and leaves; the rest holds nothing between
    loops."""

    hidden: torch.Tensor  # [rows, hidden]
    residual: torch.Tensor  # [rows, hidden]
    normed: torch.Tensor  # [rows, hidden]
    branch: torch.Tensor  # [rows, hidden]
    qkv: torch.Tensor  # [rows, (heads + 2 * kv_heads) * head_dim]
    attended: torch.Tensor  # [rows, heads * head_dim]
    gate_up: torch.Tensor  # [rows, 2 * intermediate]
    activated: torch.Tensor  # [rows, intermediate]

    @classmethod
    def allocate(
        cls, shape: ModelShape, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> "Scratch":
        def zeros(columns: int) -> torch.Tensor:
            return torch.zeros(max_rows, columns, dtype=dtype, device=device)

        hidden, q_size = shape.hidden_size, shape.num_heads * shape.head_dim
        return cls(
            hidden=zeros(hidden),
            residual=zeros(hidden),
            normed=zeros(hidden),
            branch=zeros(hidden),
            qkv=zeros(q_size + 2 * shape.num_kv_heads * shape.head_dim),
            attended=zeros(q_size),
            gate_up=zeros(2 * shape.intermediate_size),
            activated=zeros(shape.intermediate_size),
        )

    def rows(self, count: int) -> "Scratch":
        """The first `count` rows of every buffer: same memory, for a smaller bucket."""
        return Scratch(**{field.name: getattr(self, field.name)[:count] for field in fields(self)})


def load_rows(
    model: LoopedModel, meta: BatchMeta, hidden_pool: torch.Tensor, sampled: torch.Tensor, scratch: Scratch
) -> None:
    """Fill `scratch.hidden`: rows with a token from the embedding table, rows with a source from the hidden
    pool.

    hidden_pool [pool_rows, hidden]; sampled [n] int32, the last token of every ring. Padding rows keep what
    they hold.
    """
    embedding = model.weights.embedding
    model.ops.embed_rows(embedding, meta.token_ids, sampled, meta.sampled_rows, scratch.hidden)
    model.ops.gather_rows(hidden_pool, meta.source_rows, scratch.hidden)


def store_rows(model: LoopedModel, meta: BatchMeta, scratch: Scratch, hidden_pool: torch.Tensor) -> None:
    """Write the rows of `scratch.hidden` that have a target into the hidden pool."""
    model.ops.scatter_rows(scratch.hidden, meta.target_rows, hidden_pool)


def recurrent(
    model: LoopedModel, kv: KVPools, meta: BatchMeta, tile_rows: int, scratch: Scratch, depth_offset: int = 0
) -> None:
    """One loop: all physical layers and the final norm, `scratch.hidden` [rows, hidden] in place.

    Row i runs at the depth of its segment plus `depth_offset`: a batch of `loop_count` n calls this with
    offsets 0 .. n-1. K/V of the rows are written before attention reads them, layer by layer. 8 launches per
    layer where products are fused, 10 elsewhere.
    """
    ops, eps, layers = model.ops, model.shape.rms_norm_eps, model.weights.layers
    residual, plane_offset = scratch.hidden, kv.plane_offset(depth_offset)
    ops.rms_norm(residual, layers[0].input_layernorm, eps, scratch.normed)
    for i, layer in enumerate(layers):
        k, v = kv.k[i], kv.v[i]
        ops.linear_rope(
            scratch.normed, layer.qkv, model.rope, meta.positions, meta.slots, k, v, plane_offset, scratch.qkv
        )
        ops.attention(scratch.qkv, kv, i, meta, tile_rows, plane_offset, scratch.attended)
        ops.linear(scratch.attended, layer.o, scratch.branch)
        w_next = layer.post_attention_layernorm
        ops.residual_norms(
            scratch.branch, residual, layer.input_layernorm_2, w_next, eps, scratch.residual, scratch.normed
        )
        residual = scratch.residual
        ops.linear_swiglu(scratch.normed, layer.gate_up, scratch.gate_up, scratch.activated)
        ops.linear(scratch.activated, layer.down, scratch.branch)
        is_last = i + 1 == len(layers)
        w_next = model.weights.norm if is_last else layers[i + 1].input_layernorm
        normed = scratch.hidden if is_last else scratch.normed
        ops.residual_norms(
            scratch.branch, residual, layer.post_attention_layernorm_2, w_next, eps, residual, normed
        )


def lm_head(model: LoopedModel, hidden: torch.Tensor, logits: torch.Tensor) -> None:
    """hidden [rows, hidden] to logits [rows, vocab], the model's dtype."""
    model.ops.linear(hidden, model.weights.lm_head, logits)


def drop_left(model: LoopedModel, meta: BatchMeta, left: torch.Tensor) -> None:
    """Before rows are loaded: those of tokens that have left, `left` [num_rings] int32, will write
    nothing."""
    model.ops.drop_left(meta.gates, left, meta.slots, meta.target_rows, model.shape.num_loops)


def exit_gate(
    model: LoopedModel, meta: BatchMeta, hidden: torch.Tensor, survival: torch.Tensor, left: torch.Tensor,
    decisions: torch.Tensor, depth_offset: int, rule: GateRule,
) -> None:  # fmt: skip
    """After a loop: let the gate decide on the decode rows of `hidden` [rows, hidden]; see
    `executor.kernels.gate`."""
    weights = model.weights
    model.ops.gate(
        hidden, weights.gate_weight, weights.gate_bias, meta.gates, survival, left, decisions, depth_offset,
        rule
    )  # fmt: skip
