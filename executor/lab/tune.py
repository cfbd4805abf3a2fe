"""Offline search behind the fixed launch configurations: checks bits, then times candidates on the device at
hand.

`python -m executor.lab.tune [bits] [linear] [layer] [attention] [rows]` prints one table per part. Nothing is
written: the tables of `executor.kernels.linear` and `executor.kernels.attention` are edited by hand and the
run goes into `executor/NOTES.md`.
"""

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from executor.environment import prepare_environment
from executor.kernels import attention as attn
from executor.kernels import worklist
from executor.kernels.kv import KVPools
from executor.kernels.lang import OVERLAP
from executor.kernels.linear import linear_cublas
from executor.kernels.meta import BatchMeta, HostMeta, MetaLayout
from executor.kernels.product import ProductConfig, rope_product_triton, swiglu_product_triton
from executor.kernels.residual_norms import residual_norms_triton
from executor.kernels.rope_write import rope_table, rope_write_triton
from executor.kernels.swiglu import swiglu_triton
from executor.kernels.worklist import Packer
from policies.core.models.shape import OURO_1_4B as SHAPE

LAYERS, BLOCK_SIZE, PLANES, CONTEXT = 24, 16, 4, 1024
HIDDEN, INTER = SHAPE.hidden_size, SHAPE.intermediate_size
PRODUCTS = {
    "rope": (3 * HIDDEN, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "swiglu": (2 * INTER, HIDDEN),
    "down": (HIDDEN, INTER),
}
C = ProductConfig
CANDIDATES = [
    C(16, 16, 256, 4, 4),
    C(16, 16, 256, 4, 3),
    C(16, 16, 128, 4, 6),
    C(16, 32, 256, 4, 3),
    C(64, 16, 128, 4, 3),
]
PRODUCT_ROWS = (1, 2, 8, 16)
A = attn.AttentionConfig
ATTENTION = {
    16: [A(4, 5, 2), A(4, 7, 2), A(8, 5, 2)],
    32: [A(4, 5, 2), A(4, 5, 2, is_flat=False)],
    64: [A(4, 5, 2, is_flat=False)],
    128: [A(8, 5, 1, is_flat=False), A(8, 7, 1, is_flat=False)],
}
SPLITS = (256, 512)


class Bench:
    """Device buffers for one process; `layers` copies of every weight, so that timings read memory and not
    the L2 cache."""

    def __init__(self, layers: int, requests: int = 8, context: int = 9216) -> None:
        self.layers = layers
        self.weights = {
            name: [torch.randn(n, k, device="cuda").mul_(k**-0.5).bfloat16() for _ in range(layers)]
            for name, (n, k) in PRODUCTS.items()
        }
        columns = context // BLOCK_SIZE
        self.kv = KVPools.allocate(
            SHAPE, requests * columns * PLANES, BLOCK_SIZE, PLANES, requests, columns, torch.bfloat16,
            torch.device("cuda")
        )  # fmt: skip
        self.groups = (
            np.random.default_rng(0)
            .permutation(requests * columns)
            .reshape(requests, columns)
            .astype(np.int32)
        )
        self.kv.groups.copy_(torch.from_numpy(self.groups))
        for pool in (self.kv.k, self.kv.v):
            for layer in pool[:layers]:
                layer.normal_()
        self.rope = rope_table(SHAPE, context, torch.device("cuda"))
        self.workspace = attn.Workspace.allocate(SHAPE, 8192, torch.device("cuda"))
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def product(
        self, name: str, rows: int, config: ProductConfig | None, seed: int = 0
    ) -> Callable[[int], torch.Tensor]:
        """A function of the layer that runs `name` (fused, or cuBLAS and the separate kernel) and returns
        what it wrote.

        o and down run on cuBLAS always.
        """
        n, k = PRODUCTS[name]
        generator = torch.Generator(device="cuda").manual_seed(seed)
        x = torch.randn(rows, k, device="cuda", generator=generator).bfloat16()
        merged, out = (
            torch.full((rows, width), float("nan"), device="cuda", dtype=torch.bfloat16)
            for width in (n, INTER)
        )
        positions = torch.arange(rows, device="cuda", dtype=torch.int32)
        slots = torch.arange(rows, device="cuda", dtype=torch.int32)

        def run(layer: int) -> torch.Tensor:
            weight, k_pool, v_pool = self.weights[name][layer], self.kv.k[layer], self.kv.v[layer]
            if name == "swiglu":
                if config:
                    swiglu_product_triton(x, weight, out, config)
                else:
                    linear_cublas(x, weight, merged)
                    swiglu_triton(merged, out)
                return out
            if name == "rope":
                if config:
                    rope_product_triton(
                        x, weight, self.rope, positions, slots, k_pool, v_pool, 0, merged, config
                    )
                else:
                    linear_cublas(x, weight, merged)
                    rope_write_triton(merged, self.rope, positions, slots, k_pool, v_pool, 0)
                return merged
            linear_cublas(x, weight, merged)
            return merged

        return run

    def attention(
        self,
        segments: Sequence[tuple[int, int, int, int]],
        tile_rows: int,
        slots: int = 264,
        launcher: Callable[..., None] | None = None,
    ) -> Callable[[int], None]:
        """A function of the layer: attention of `segments` (request, depth, start, rows), by the Triton
        kernel where no other `launcher` is given."""
        rows = sum(segment[3] for segment in segments)
        layout = MetaLayout.for_rows(rows)
        host, meta = HostMeta.allocate(layout, pin=False), BatchMeta.allocate(layout, torch.device("cuda"))
        packer = Packer(self.groups, PLANES, BLOCK_SIZE, SHAPE.num_heads, slots, (tile_rows,))
        packed = packer.pack(host, np.array([(*segment, -1, -1) for segment in segments]))
        meta.update(host, packed.num_words)
        q = torch.randn(rows, 3 * HIDDEN, device="cuda").bfloat16()
        out = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        attend = launcher or attn.AttentionLauncher(self.workspace, self.num_sms)
        return lambda layer: attend(q, self.kv, layer, meta, tile_rows, 0, out)

    def residual_norms(self, rows: int, launcher: Callable[..., None] | None = None) -> Callable[[int], None]:
        x, h, y = (torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(3))
        w = torch.ones(HIDDEN, device="cuda").bfloat16()
        return lambda layer: (launcher or residual_norms_triton)(x, h, w, w, 1e-6, h, y)

    def swiglu(self, rows: int) -> Callable[[int], None]:
        merged, act = (torch.randn(rows, width, device="cuda").bfloat16() for width in (2 * INTER, INTER))
        return lambda layer: swiglu_triton(merged, act)

    def rope_write(self, rows: int) -> Callable[[int], None]:
        qkv = torch.randn(rows, 3 * HIDDEN, device="cuda").bfloat16()
        index = torch.arange(rows, device="cuda", dtype=torch.int32)
        return lambda layer: rope_write_triton(
            qkv, self.rope, index, index, self.kv.k[layer], self.kv.v[layer], 0
        )

    def time_us(self, run: Callable[[int], object]) -> float:
        """Median microseconds of one call, from graphs of one call per layer."""
        run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(self.layers):
                run(layer)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(16)]
        for mark in marks:
            mark.record()
            graph.replay()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in list(pairwise(marks))[3:]) * 1000 / self.layers


def check_bits(bench: Bench) -> None:
    """Every candidate against cuBLAS and the separate kernel, bit for bit, at several row counts."""
    for name in ("rope", "swiglu"):
        for config in CANDIDATES:
            for rows in (1, 2, 7, 16, 33, 200):
                results = []
                for variant in (None, config):
                    for pool in (bench.kv.k, bench.kv.v):
                        pool[0, :64].fill_(float("nan"))
                    out = bench.product(name, rows, variant, seed=rows)(0)[
                        :, : HIDDEN if name == "rope" else INTER
                    ]
                    results.append([out.clone(), bench.kv.k[0, :64].clone(), bench.kv.v[0, :64].clone()])
                if not all(
                    torch.equal(a.view(torch.int16), b.view(torch.int16))
                    for a, b in zip(*results, strict=True)
                ):
                    print(f"bits differ: {name} {config} at {rows} rows")
    print("bits checked", flush=True)


def tune_linear(bench: Bench) -> None:
    for rows in PRODUCT_ROWS:
        for name in ("rope", "swiglu"):
            limit = PRODUCTS[name][0] * PRODUCTS[name][1] * 2 / 4.22e6
            times = [bench.time_us(bench.product(name, rows, config)) for config in (None, *CANDIDATES)]
            labels = ["cuBLAS"] + [f"{c.block_m}x{c.block_n}x{c.block_k}s{c.num_stages}" for c in CANDIDATES]
            shown = "  ".join(f"{label} {value:.2f}" for label, value in zip(labels, times, strict=True))
            print(f"{rows:4d} {name:7s} limit {limit:5.2f} | {shown}", flush=True)


def set_split(split: int) -> None:
    worklist.SPLIT_KEYS, worklist.TILES_PER_SPLIT = split, split // worklist.TILE_KEYS
    attn.TILES_PER_SPLIT = worklist.TILES_PER_SPLIT


LAYERS_TRIED = (
    (512, "", True), (512, "", False), (256, "", True), (512, "rope", True), (512, "swiglu", True),
    (512, "rope swiglu", True),
)  # fmt: skip
"""Split size, fused products, overlapping launches."""


def layer_us(bench: Bench, rows: int, context: int, split: int, fused: str, overlap: bool) -> float:
    """Microseconds of one whole layer for `rows` decode rows (up to 16) or 16-row prompt ranges at
    `context`."""
    kept = dict(OVERLAP), worklist.SPLIT_KEYS
    set_split(split)
    if not overlap:
        OVERLAP.clear()
    length = 1 if rows <= 16 else 16
    attention = bench.attention([(i % 8, 0, context - length, length) for i in range(rows // length)], 16)
    rope, o, swiglu, down = (
        bench.product(name, rows, CANDIDATES[0] if name in fused.split() else None) for name in PRODUCTS
    )
    norms = bench.residual_norms(rows)

    def run(layer: int) -> None:
        for step in (rope, attention, o, norms, swiglu, down, norms):
            step(layer)

    result = bench.time_us(run)
    OVERLAP.update(kept[0])
    set_split(kept[1])
    return result


def tune_layer(bench: Bench) -> None:
    """Whole layers in order, the figure that counts: kernels overlap with their neighbours."""
    for rows, context in ((1, 512), (2, 512), (8, 1024), (16, 512), (64, 1024)):
        shown = []
        for split, fused, overlap in LAYERS_TRIED:
            if not fused or rows <= 16:
                label = f"split {split}{' fused ' + fused if fused else ''}{'' if overlap else ' no overlap'}"
                shown.append(f"{label} {layer_us(bench, rows, context, split, fused, overlap):.2f}")
        print(f"{rows} rows at {context}, layer us: {' | '.join(shown)}", flush=True)


def attention_cases() -> dict[str, list[tuple[int, int, int, int]]]:
    def wavefront(requests: int, chunk: int, context: int) -> list[tuple[int, int, int, int]]:
        return [
            (r, d, context + (3 - d) * chunk - chunk, chunk)
            for r in range(requests)
            for d in range(3, -1, -1)
        ]

    return {
        "1 decode 64": [(0, 0, 63, 1)],
        "1 decode 256": [(0, 0, 255, 1)],
        "1 decode 512": [(0, 0, 511, 1)],
        "8 decode 1024": [(r, 0, 1023, 1) for r in range(8)],
        "8 decode 8192": [(r, 0, 8191, 1) for r in range(8)],
        "4x4x16 1024": wavefront(4, 16, 1024),
        "4x4x16 4096": wavefront(4, 16, 4096),
        "1x4x16 1024": wavefront(1, 16, 1024),
        "4x4x32 4096": wavefront(4, 32, 4096),
        "4x128 4096": [(r, 0, 4096 - 128, 128) for r in range(4)],
        "8x128 1024": [(r, 0, 1024 - 128, 128) for r in range(8)],
        "1x1024": [(0, 0, 0, 1024)],
        "2x4x128 4096": wavefront(2, 128, 4096),
    }


def tune_attention(bench: Bench) -> None:
    kept = dict(attn.CONFIGS), worklist.SPLIT_KEYS
    for name, segments in attention_cases().items():
        rows = sum(segment[3] for segment in segments)
        planes = {(ring, depth): start + count for ring, depth, start, count in segments}
        limit_bytes = sum(planes.values()) * 2 * HIDDEN * 2 / 4.22e6
        limit_flops = sum(count * (start + count / 2) for _, _, start, count in segments) * 4 * HIDDEN / 768e6
        longest = rows // len(segments)
        shown = []
        for split in SPLITS:
            set_split(split)
            for tile in (16,) if longest <= 16 else (32,) if longest <= 32 else (64, 128):
                for config in ATTENTION[tile]:
                    attn.CONFIGS[torch.bfloat16, tile] = config
                    kind = "f" if config.is_flat else "n"
                    label = f"{split}/{tile}{kind}w{config.num_warps}s{config.num_stages}"
                    shown.append(f"{label} {bench.time_us(bench.attention(segments, tile)):.1f}")
        print(f"{name:14s} limit {max(limit_bytes, limit_flops):5.1f} | {'  '.join(shown)}", flush=True)
    attn.CONFIGS.update(kept[0])
    set_split(kept[1])


def tune_rows(bench: Bench) -> None:
    for rows in (1, 256, 1024):
        steps = {
            "residual": bench.residual_norms(rows),
            "swiglu": bench.swiglu(rows),
            "rope": bench.rope_write(rows),
        }
        print(
            f"{rows:4d} rows: {'  '.join(f'{name} {bench.time_us(run):.2f}' for name, run in steps.items())}",
            flush=True,
        )


def compile_all(parts: Sequence[str]) -> None:
    """Fill Triton's cache from several processes. Called before this process starts CUDA."""
    work: list[tuple[str, Any, Any]] = []
    if {"bits", "linear", "layer"} & set(parts):
        work += [(name, config, None) for name in ("rope", "swiglu") for config in CANDIDATES]
    if "attention" in parts:
        work += [
            ("attention", (tile, split), config)
            for tile, configs in ATTENTION.items()
            for config in configs
            for split in SPLITS
        ]
    processes = min(12, os.cpu_count() or 1)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_compile, args=(work[i::processes],)) for i in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join()


def _compile(work: list[tuple[str, Any, Any]]) -> None:
    bench = Bench(1, 1, CONTEXT)
    for kind, which, config in work:
        if kind == "attention":
            tile, split = which
            set_split(split)
            attn.CONFIGS[torch.bfloat16, tile] = config
            bench.attention([(0, 0, 0, 100)], tile)(0)
        else:
            bench.product(kind, 8, which)(0)
    torch.cuda.synchronize()


def main() -> None:
    parts = sys.argv[1:] or ["bits", "linear", "layer", "attention", "rows"]
    prepare_environment()
    began = time.time()
    compile_all(parts)
    print(f"compiled in {time.time() - began:.1f} s", flush=True)
    bench = Bench(LAYERS)
    for part, function in (
        ("bits", check_bits),
        ("linear", tune_linear),
        ("layer", tune_layer),
        ("attention", tune_attention),
        ("rows", tune_rows),
    ):
        if part in parts:
            function(bench)
            print(f"[{part} done at {time.time() - began:.1f} s]", flush=True)


if __name__ == "__main__":
    main()
