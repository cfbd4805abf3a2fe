"""Offline search behind the fixed launch configurations: checks bits, then times candidates on the device at hand.

`python -m executor.tune [bits] [linear] [attention] [rows]` prints one table per part. Nothing is written: the tables of
`executor.kernels.linear` and `executor.kernels.attention` are edited by hand and the run goes into `executor/NOTES.md`.
"""

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from executor.environment import prepare_environment
from executor.kernels import attention as attn
from executor.kernels.kv import KVPools
from executor.kernels.linear import linear_cublas
from executor.kernels.meta import BatchMeta, HostMeta, MetaLayout
from executor.kernels.product import ProductConfig, linear_triton, rope_product_triton, swiglu_product_triton
from executor.kernels.residual_norms import residual_norms_triton
from executor.kernels.rope_write import rope_table, rope_write_triton
from executor.kernels.swiglu import swiglu_triton
from executor.kernels.worklist import Packer
from policies.core.model import OURO_1_4B as SHAPE

LAYERS, BLOCK_SIZE, PLANES, CONTEXT = 24, 16, 4, 1024
HIDDEN, INTER = SHAPE.hidden_size, SHAPE.intermediate_size
PRODUCTS = {"rope": (3 * HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN), "swiglu": (2 * INTER, HIDDEN), "down": (HIDDEN, INTER)}
C = ProductConfig
NARROW = [C(16, 16, 256, 4, 4), C(16, 16, 128, 4, 8), C(16, 16, 256, 2, 4), C(64, 16, 128, 4, 4)]
PAIRED = [C(16, 32, 128, 4, 5), C(16, 32, 256, 4, 4), C(16, 64, 128, 4, 5), C(64, 32, 128, 4, 4)]
# fmt: off
CANDIDATES = {
    1: {"o": NARROW, "down": NARROW, "rope": PAIRED, "swiglu": PAIRED},
    8: {"o": NARROW[:2], "down": NARROW[:2], "rope": PAIRED[:2], "swiglu": PAIRED[:2]},
    64: {
        "o": [C(64, 16, 128, 4, 4), C(64, 32, 128, 4, 4), C(32, 16, 256, 4, 4)],
        "down": [C(64, 16, 128, 4, 4), C(64, 32, 128, 4, 4), C(32, 16, 256, 4, 4)],
        "rope": [C(64, 32, 128, 4, 4), C(64, 64, 128, 4, 3)],
        "swiglu": [C(64, 64, 128, 4, 3), C(64, 128, 64, 4, 4)],
    },
    256: {
        "o": [C(64, 64, 64, 4, 4), C(128, 32, 64, 4, 4), C(128, 64, 64, 4, 4)],
        "down": [C(64, 64, 64, 4, 4), C(128, 32, 64, 4, 4), C(128, 32, 128, 4, 3)],
        "rope": [C(128, 64, 64, 4, 4), C(128, 128, 64, 8, 4), C(64, 128, 64, 4, 4)],
        "swiglu": [C(128, 128, 64, 8, 4), C(256, 64, 64, 8, 4), C(128, 256, 64, 8, 3)],
    },
}
A = attn.AttentionConfig
ATTENTION = {
    16: [A(4, 5, 2), A(4, 3, 3), A(4, 7, 2), A(4, 5, 2, False)],
    64: [A(4, 5, 2, False), A(4, 5, 2, True), A(4, 3, 2, False)],
    128: [A(8, 5, 1, False), A(8, 7, 1, False), A(8, 3, 1, False), A(8, 5, 1, True)],
}
# fmt: on


class Bench:
    """Device buffers for one process; `layers` copies of every weight, so that timings read memory and not the L2 cache."""

    def __init__(self, layers: int, requests: int = 8, context: int = 9216) -> None:
        self.layers = layers
        self.weights = {
            name: [torch.randn(n, k, device="cuda").mul_(k**-0.5).bfloat16() for _ in range(layers)] for name, (n, k) in PRODUCTS.items()
        }
        columns = context // BLOCK_SIZE
        self.kv = KVPools.allocate(
            SHAPE, requests * columns * PLANES, BLOCK_SIZE, PLANES, requests, columns, torch.bfloat16, torch.device("cuda")
        )  # fmt: skip
        self.groups = np.random.default_rng(0).permutation(requests * columns).reshape(requests, columns).astype(np.int32)
        self.kv.groups.copy_(torch.from_numpy(self.groups))
        for pool in (self.kv.k, self.kv.v):
            for layer in pool[:layers]:
                layer.normal_()
        self.rope = rope_table(SHAPE, context, torch.device("cuda"))
        self.workspace = attn.Workspace.allocate(SHAPE, 8192, torch.device("cuda"))
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def product(self, name: str, rows: int, config: ProductConfig | None, seed: int = 0) -> Callable[[int], torch.Tensor]:
        """A function of the layer that runs `name` (fused, or cuBLAS and the separate kernel) and returns what it wrote."""
        n, k = PRODUCTS[name]
        generator = torch.Generator(device="cuda").manual_seed(seed)
        x = torch.randn(rows, k, device="cuda", generator=generator).bfloat16()
        merged, out = (torch.full((rows, width), float("nan"), device="cuda", dtype=torch.bfloat16) for width in (n, INTER))
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
                    rope_product_triton(x, weight, self.rope, positions, slots, k_pool, v_pool, 0, merged, config)
                else:
                    linear_cublas(x, weight, merged)
                    rope_write_triton(merged, self.rope, positions, slots, k_pool, v_pool, 0)
                return merged
            if config:
                linear_triton(x, weight, merged, config)
            else:
                linear_cublas(x, weight, merged)
            return merged

        return run

    def attention(self, segments: Sequence[tuple[int, int, int, int]], tile_rows: int, slots: int = 264) -> Callable[[int], None]:
        rows = sum(segment[3] for segment in segments)
        layout = MetaLayout.for_rows(rows)
        host, meta = HostMeta.allocate(layout, pin=False), BatchMeta.allocate(layout, torch.device("cuda"))
        packer = Packer(self.groups, PLANES, BLOCK_SIZE, SHAPE.num_heads, slots, (tile_rows,))
        packed = packer.pack(host, np.array([(*segment, -1, -1) for segment in segments]))
        meta.update(host, packed.num_words)
        q = torch.randn(rows, 3 * HIDDEN, device="cuda").bfloat16()
        out = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        launcher = attn.AttentionLauncher(self.workspace, self.num_sms)
        return lambda layer: launcher(q, self.kv, layer, meta, tile_rows, 0, out)

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


def candidates() -> Iterator[tuple[str, ProductConfig]]:
    for table in CANDIDATES.values():
        for name, configs in table.items():
            for config in configs:
                yield name, config


def check_bits(bench: Bench) -> None:
    """Every candidate against cuBLAS, bit for bit, at several row counts."""
    for name, config in dict.fromkeys(candidates()):
        wrong = []
        for rows in (1, 8, 17, 64, 200):
            results = []
            for variant in (None, config):
                for pool in (bench.kv.k, bench.kv.v):
                    pool[0].fill_(float("nan"))
                out = bench.product(name, rows, variant, seed=rows)(0)
                results.append([out[:, : HIDDEN if name == "rope" else out.shape[1]].clone(), bench.kv.k[0, :16].clone(), bench.kv.v[0, :16].clone()])
            same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(*results, strict=True)]
            if not all(same):
                difference = max(float((a.float() - b.float()).abs().nan_to_num(9.0).max()) for a, b in zip(*results, strict=True))
                wrong.append((rows, same, round(difference, 5)))
        if wrong:
            print(f"bits differ: {name} {config} {wrong}")
    print("bits checked", flush=True)


def tune_linear(bench: Bench) -> None:
    for rows, table in CANDIDATES.items():
        for name, configs in table.items():
            limit = PRODUCTS[name][0] * PRODUCTS[name][1] * 2 / 4.22e6
            times = [bench.time_us(bench.product(name, rows, config)) for config in (None, *configs)]
            labels = ["cuBLAS"] + [f"{c.block_m}x{c.block_n}x{c.block_k}w{c.num_warps}s{c.num_stages}" for c in configs]
            shown = "  ".join(f"{label} {value:.2f}" for label, value in zip(labels, times, strict=True))
            print(f"{rows:4d} {name:7s} limit {limit:5.2f} | {shown}", flush=True)


def attention_cases() -> dict[str, list[tuple[int, int, int, int]]]:
    def wavefront(requests: int, chunk: int, context: int) -> list[tuple[int, int, int, int]]:
        return [(r, d, context + (3 - d) * chunk - chunk, chunk) for r in range(requests) for d in range(3, -1, -1)]

    return {
        "1 decode 512": [(0, 0, 511, 1)],
        "8 decode 1024": [(r, 0, 1023, 1) for r in range(8)],
        "8 decode 8192": [(r, 0, 8191, 1) for r in range(8)],
        "4x4x16 1024": wavefront(4, 16, 1024),
        "4x4x16 4096": wavefront(4, 16, 4096),
        "1x4x16 1024": wavefront(1, 16, 1024),
        "4x128 4096": [(r, 0, 4096 - 128, 128) for r in range(4)],
        "8x128 1024": [(r, 0, 1024 - 128, 128) for r in range(8)],
        "1x1024": [(0, 0, 0, 1024)],
        "2x4x128 4096": wavefront(2, 128, 4096),
    }


def tune_attention(bench: Bench) -> None:
    for name, segments in attention_cases().items():
        rows = sum(segment[3] for segment in segments)
        planes = {(ring, depth): start + count for ring, depth, start, count in segments}
        limit_bytes = sum(planes.values()) * 2 * HIDDEN * 2 / 4.22e6
        limit_flops = sum(count * (start + count / 2) for _, _, start, count in segments) * 4 * HIDDEN / 768e6
        shown = []
        for tile in (16,) if rows / len(segments) <= 16 else (64, 128):
            key = torch.bfloat16, tile
            kept = attn.CONFIGS[key]
            for config in ATTENTION[tile]:
                attn.CONFIGS[key] = config
                label = f"{tile}{'f' if config.is_flat else 'n'}s{config.num_stages}p{config.programs_per_sm}"
                shown.append(f"{label} {bench.time_us(bench.attention(segments, tile)):.1f}")
            attn.CONFIGS[key] = kept
        print(f"{name:14s} limit {max(limit_bytes, limit_flops):5.1f} | {'  '.join(shown)}", flush=True)


def tune_rows(bench: Bench) -> None:
    for rows in (1, 256, 1024):
        x, h, y = (torch.randn(rows, HIDDEN, device="cuda").bfloat16() for _ in range(3))
        w = torch.ones(HIDDEN, device="cuda").bfloat16()
        merged, act = torch.randn(rows, 2 * INTER, device="cuda").bfloat16(), torch.empty(rows, INTER, device="cuda").bfloat16()
        qkv = torch.randn(rows, 3 * HIDDEN, device="cuda").bfloat16()
        index = torch.arange(rows, device="cuda", dtype=torch.int32)
        shown = {
            "residual": bench.time_us(lambda i: residual_norms_triton(x, h, w, w, 1e-6, h, y)),
            "swiglu": bench.time_us(lambda i: swiglu_triton(merged, act)),
            "rope": bench.time_us(lambda i: rope_write_triton(qkv, bench.rope, index, index, bench.kv.k[i], bench.kv.v[i], 0)),
        }
        print(f"{rows:4d} rows: {'  '.join(f'{name} {value:.2f}' for name, value in shown.items())}", flush=True)


def compile_all(parts: Sequence[str]) -> None:
    """Fill Triton's cache from several processes. Called before this process starts CUDA."""
    work: list[tuple[str, object, object]] = []
    if "bits" in parts or "linear" in parts:
        work += [("product", name, config) for name, config in dict.fromkeys(candidates())]
    if "attention" in parts:
        work += [("attention", tile, config) for tile, configs in ATTENTION.items() for config in configs]
    work.sort(key=lambda item: item[0])
    processes = min(12, os.cpu_count() or 1)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_compile, args=(work[i::processes],)) for i in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join()


def _compile(work: list[tuple[str, object, object]]) -> None:
    bench = Bench(1, 1, CONTEXT)
    for kind, which, config in work:
        if kind == "product":
            assert isinstance(which, str) and isinstance(config, ProductConfig)
            bench.product(which, 8, config)(0)
        else:
            assert isinstance(which, int) and isinstance(config, attn.AttentionConfig)
            attn.CONFIGS[torch.bfloat16, which] = config
            bench.attention([(0, 0, 0, 100)], which)(0)
    torch.cuda.synchronize()


def main() -> None:
    parts = sys.argv[1:] or ["bits", "linear", "attention", "rows"]
    prepare_environment()
    began = time.time()
    compile_all(parts)
    print(f"compiled in {time.time() - began:.1f} s", flush=True)
    bench = Bench(LAYERS)
    for part, function in (("bits", check_bits), ("linear", tune_linear), ("attention", tune_attention), ("rows", tune_rows)):
        if part in parts:
            function(bench)
            print(f"[{part} done at {time.time() - began:.1f} s]", flush=True)


if __name__ == "__main__":
    main()
