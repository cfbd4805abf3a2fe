"""Whether the CUDA kernels give the bits of cuBLAS and the Triton kernels on the card at hand."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from executor.cuda.attention import Attention
from executor.cuda.norms import ResidualNorms
from executor.cuda.plan import SERVED_ROWS, ProductPlan
from executor.cuda.products import Products
from executor.cuda.tall_attention import TILE_ROWS, TallAttention
from executor.kernels.attention import AttentionLauncher
from executor.kernels.kv import KVPools
from executor.kernels.linear import linear_cublas, linear_rope, linear_swiglu
from executor.kernels.meta import BatchMeta, HostMeta, MetaLayout
from executor.kernels.residual_norms import residual_norms_triton
from executor.kernels.rope_write import rope_table
from executor.kernels.worklist import SHORT_ROWS, Packer
from policies.core.models.shape import ModelShape

BLOCK_SIZE = 16
SLOTS = 4 * BLOCK_SIZE
ROWS = (1, 2, 5, SERVED_ROWS)


def differing(
    products: Products, plans: Mapping[str, ProductPlan], shape: ModelShape, rows_tried: Sequence[int] = ROWS
) -> list[str]:
    """`name at n rows` of every product whose outputs differ in a bit; random rows and weights."""
    generator = torch.Generator(device="cuda").manual_seed(16)
    found = []
    for name, plan in plans.items():
        weight = _random((plan.columns, plan.size_in), generator).mul_(plan.size_in**-0.5)
        for rows in rows_tried:
            x = _random((rows, plan.size_in), generator)
            results = [_outputs(name, ops, plan, shape, x, weight) for ops in (SEPARATE, products)]
            pairs = zip(*results, strict=True)
            if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs):
                found.append(f"{name} at {rows} rows")
    return found


class Separate(NamedTuple):
    """The operations that `Products` replaces, by the same names."""

    linear: Callable[..., None] = linear_cublas
    linear_rope: Callable[..., None] = linear_rope
    linear_swiglu: Callable[..., None] = linear_swiglu


SEPARATE = Separate()


def _outputs(
    name: str, ops: Products | Separate, plan: ProductPlan, shape: ModelShape, x: torch.Tensor,
    weight: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """What one product writes, in buffers of NaN. The first row has no K/V address."""
    rows = len(x)
    merged, out = _empty(rows, plan.columns), _empty(rows, plan.columns // 2)
    if name == "rope":
        positions = torch.arange(rows, dtype=torch.int32, device="cuda") * 3 + 1
        slots = torch.arange(rows, dtype=torch.int32, device="cuda") * 2 - 2
        slots[0] = -1
        size = (SLOTS // BLOCK_SIZE, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        k, v = _empty(*size), _empty(*size)
        table = rope_table(shape, SLOTS, torch.device("cuda"))
        ops.linear_rope(x, weight, table, positions, slots, k, v, 1, merged)
        return [merged[:, : shape.num_heads * shape.head_dim].contiguous(), k, v]
    if name == "swiglu":
        ops.linear_swiglu(x, weight, merged, out)
        return [out]
    ops.linear(x, weight, merged)
    return [merged]


def _empty(*size: int) -> torch.Tensor:
    return torch.full(size, float("nan"), dtype=torch.bfloat16, device="cuda")


def _random(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=generator, device="cuda").bfloat16()


SPANS = (
    ((0, 1), (62, 1), (63, 1), (511, 1), (512, 1), (1337, 1)),
    ((0, 16), (1, 16)),
    ((500, 16), (2030, 5)),
    ((3000, 1),),
    ((1023, 1),) * 8,
)
"""(first position, rows) of the segments of the batches that attention of few rows is compared on."""
TALL_SPANS = (
    ((0, 128), (0, 65), (0, 1)),
    ((1, 128), (63, 100), (64, 127)),
    ((448, 64), (511, 130), (512, 256)),
    ((2000, 48), (1990, 16), (1337, 1), (3000, 333)),
    ((3968, 128), (1024, 512)),
)
"""The same of taller tiles."""


def differing_attention(ours: Attention, shape: ModelShape) -> list[str]:
    """`attention of SPANS` of every batch whose outputs differ in a bit, cut into splits and whole."""
    ours = dataclasses.replace(ours, max_rows=max(sum(count for _, count in spans) for spans in SPANS))
    return _differing(ours, ours.base, shape, SPANS, SHORT_ROWS)


def differing_tall(ours: TallAttention, shape: ModelShape) -> list[str]:
    """The same of TALL_SPANS."""
    return _differing(ours, ours.base, shape, TALL_SPANS, TILE_ROWS)


def _differing(
    ours: Callable[..., None], base: AttentionLauncher, shape: ModelShape,
    batches: Sequence[Sequence[tuple[int, int]]], tile_rows: int,
) -> list[str]:  # fmt: skip
    generator = torch.Generator(device="cuda").manual_seed(16)
    longest = max(start + count for spans in batches for start, count in spans)
    columns, rings = -(-longest // BLOCK_SIZE), max(map(len, batches))
    device = torch.device("cuda")
    one_layer = dataclasses.replace(shape, num_layers=1)
    kv = KVPools.allocate(
        one_layer, 2 * rings * columns, BLOCK_SIZE, 2, rings, columns, torch.bfloat16, device
    )
    groups = np.random.default_rng(16).permutation(rings * columns).reshape(rings, columns).astype(np.int32)
    kv.groups.copy_(torch.from_numpy(groups))
    kv.k.normal_(generator=generator)
    kv.v.normal_(generator=generator)
    found = []
    for spans in batches:
        rows = sum(count for _, count in spans)
        layout = MetaLayout.for_rows(rows)
        host, meta = HostMeta.allocate(layout, pin=False), BatchMeta.allocate(layout, device)
        segments = [(ring, 0, start, count, -1, -1) for ring, (start, count) in enumerate(spans)]
        q = _random((rows, 3 * shape.num_heads * shape.head_dim), generator)
        for slots in (1, 2 * base.num_sms):
            packer = Packer(groups, 2, BLOCK_SIZE, shape.num_heads, slots, (tile_rows,))
            meta.update(host, packer.pack(host, np.array(segments, dtype=np.int64)).num_words)
            outputs = []
            for attention in (base, ours):
                out = torch.full(
                    (rows, shape.num_heads * shape.head_dim),
                    float("nan"),
                    dtype=torch.bfloat16,
                    device=device,
                )
                attention(q, kv, 0, meta, tile_rows, 1, out)
                outputs.append(out.view(torch.int16))
            if not torch.equal(*outputs):
                found.append(f"attention of {spans} in tiles of {tile_rows}, {slots} slots")
    return found


def differing_norms(ours: ResidualNorms, shape: ModelShape) -> list[str]:
    """`residual norms at n rows` where one of the outputs differs in a bit."""
    generator = torch.Generator(device="cuda").manual_seed(16)
    found = []
    for rows in (1, SERVED_ROWS):
        x, h = (_random((rows, shape.hidden_size), generator) for _ in range(2))
        w_post, w_next = (_random((shape.hidden_size,), generator) for _ in range(2))
        results = []
        for norms in (residual_norms_triton, ours):
            h_out, y = torch.empty_like(h), torch.empty_like(h)
            norms(x, h, w_post, w_next, shape.rms_norm_eps, h_out, y)
            results.append(torch.cat((h_out, y)).view(torch.int16))
        if not torch.equal(*results):
            found.append(f"residual norms at {rows} rows")
    return found
