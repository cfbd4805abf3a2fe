"""Kernels of few rows on a card: their bits against cuBLAS and Triton at every row count, attention alone,
and whole layers, beside cuBLAS and Triton. (`executor.lab.products` times products alone.)

`python -m executor.lab.few_rows [bits] [attention] [layers]` prints one table per part. Layers are those of
`executor.lab.tune`: 24 of them, one graph, each with weights of its own.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable

import torch

from executor.cuda import attention as attn
from executor.cuda import nvrtc, plan
from executor.cuda.check import differing, differing_attention, differing_norms
from executor.cuda.driver import Module
from executor.cuda.norms import SOURCE as NORMS_SOURCE
from executor.cuda.norms import ResidualNorms
from executor.cuda.products import OPTIONS, Products, source_of
from executor.environment import prepare_environment
from executor.kernels import linear
from executor.kernels.attention import AttentionLauncher
from executor.lab.tune import HIDDEN, INTER, LAYERS, SHAPE, Bench

CASES = ((1, 512), (2, 512), (4, 512), (8, 1024), (16, 512))
ATTENTION = (
    (1, 1, 64), (1, 1, 512), (1, 1, 2048), (4, 1, 1024), (8, 1, 1024), (16, 1, 512), (8, 1, 8192),
    (32, 1, 1024),
    (64, 16, 1024), (256, 16, 1024),
)  # fmt: skip
"""Rows, rows of a segment, context."""


def products() -> Products:
    """Compiled anew, up to the most rows that they can."""
    plans = plans_of()
    return Products(plans, Module(nvrtc.compile_cubin(source_of(plans), OPTIONS)), plan.MAX_ROWS)


def plans_of() -> dict[str, plan.ProductPlan]:
    plans = plan.plan_products(SHAPE)
    assert plans is not None
    return plans


def steps(bench: Bench, operations: object, rows: int) -> dict[str, Callable[[int], object]]:
    """The four products of layer `layer`, by name: `operations` is `executor.kernels.linear` or like it."""
    plain = getattr(operations, "linear", linear.linear_cublas)
    x, attended, branch = (_random(rows, HIDDEN) for _ in range(3))
    qkv, merged, activated = _random(rows, 3 * HIDDEN), _random(rows, 2 * INTER), _random(rows, INTER)
    index = torch.arange(rows, device="cuda", dtype=torch.int32)
    w, kv = bench.weights, bench.kv
    return {
        "rope": lambda i: operations.linear_rope(  # type: ignore[attr-defined]
            x, w["rope"][i], bench.rope, index, index, kv.k[i], kv.v[i], 0, qkv
        ),
        "o": lambda i: plain(attended, w["o"][i], branch),
        "swiglu": lambda i: operations.linear_swiglu(  # type: ignore[attr-defined]
            x, w["swiglu"][i], merged, activated
        ),
        "down": lambda i: plain(activated, w["down"][i], branch),
    }


def our_attention(bench: Bench) -> attn.Attention:
    base = AttentionLauncher(bench.workspace, bench.num_sms)
    return attn.Attention.load(base, Module(nvrtc.compile_cubin(attn.SOURCE, OPTIONS)))


@functools.cache
def our_norms() -> ResidualNorms:
    return ResidualNorms(Module(nvrtc.compile_cubin(NORMS_SOURCE, OPTIONS)))


def layer(
    bench: Bench,
    operations: object,
    rows: int,
    context: int,
    with_ours: attn.Attention | None = None,
    with_norms: bool = True,
) -> tuple[float, float]:
    """Microseconds of a whole layer of decode rows, and of one without attention."""
    attention = bench.attention(
        [(i % 8, i // 8, context - 1, 1) for i in range(rows)], 16, launcher=with_ours
    )
    of = steps(bench, operations, rows)
    norms = bench.residual_norms(rows, our_norms() if with_norms and operations is not linear else None)

    def run(i: int, with_attention: bool = True) -> None:
        of["rope"](i)
        if with_attention:
            attention(i)
        of["o"](i)
        norms(i)
        of["swiglu"](i)
        of["down"](i)
        norms(i)

    return bench.time_us(run), bench.time_us(lambda i: run(i, False))


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


def check_bits(bench: Bench, ours: Products) -> None:
    found = differing(ours, plans_of(), SHAPE, range(1, plan.MAX_ROWS + 1))
    found += differing_attention(our_attention(bench), SHAPE) + differing_norms(our_norms(), SHAPE)
    print(f"bits at 1 to {plan.MAX_ROWS} rows: {', '.join(found) or 'all equal'}", flush=True)


def time_attention(bench: Bench, ours: Products) -> None:
    made = dataclasses.replace(our_attention(bench), max_rows=1024)
    for rows, length, context in ATTENTION:
        segments = [(i % 8, i // 8 % 4, context - length, length) for i in range(rows // length)]
        was, is_now = (
            bench.time_us(bench.attention(segments, 16, launcher=launcher)) for launcher in (None, made)
        )
        print(
            f"attention, {rows // length} x {length} rows at {context}, us: {was:.2f} -> {is_now:.2f}",
            flush=True,
        )


def time_layers(bench: Bench, ours: Products) -> None:
    made = our_attention(bench)
    for rows, context in CASES:
        was, is_now = (layer(bench, operations, rows, context) for operations in (linear, ours))
        both = layer(bench, ours, rows, context, made)[0]
        apart = layer(bench, ours, rows, context, made, with_norms=False)[0]
        print(
            f"{rows:4d} rows at {context}, layer us: {was[0]:.2f} -> products {is_now[0]:.2f} -> attention "
            f"{both:.2f} (Triton's norms {apart:.2f}), without attention {was[1]:.2f} -> {is_now[1]:.2f}",
            flush=True,
        )


def main() -> None:
    prepare_environment()
    bench = Bench(LAYERS)
    parts = {
        "bits": check_bits,
        "attention": time_attention,
        "layers": time_layers,
    }
    ours = products()
    for name, part in parts.items():
        if name in sys.argv[1:] or not sys.argv[1:]:
            part(bench, ours)


if __name__ == "__main__":
    main()
