"""Attention of prompt ranges on a card: the bits of the CUDA kernel against Triton's, and times of both.

`python -m executor.lab.tall_rows [bits] [times]` prints one table per part.
"""

import gc
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from executor.cuda import nvrtc
from executor.cuda.check import differing_tall
from executor.cuda.driver import Module
from executor.cuda.products import OPTIONS
from executor.cuda.tall_attention import SOURCE, TILE_ROWS, TallAttention
from executor.environment import prepare_environment
from executor.kernels.attention import AttentionLauncher
from executor.lab.tune import HIDDEN, SHAPE, Bench

LAYERS = 8
CASES = (
    (8, 1, 128, 4096), (8, 1, 128, 1024), (4, 1, 128, 4096), (2, 1, 128, 4096), (1, 1, 128, 4096),
    (2, 4, 128, 4096), (1, 4, 128, 4096), (1, 1, 1024, 1024), (1, 1, 512, 4096), (1, 1, 256, 8192),
    (2, 1, 96, 2048), (4, 1, 64, 4096), (8, 1, 64, 1024), (1, 4, 64, 2048),
)  # fmt: skip
"""Requests, depths of a wavefront, rows of each range, context."""
BENCHED = ((8, 1, 128, 4096), (8, 1, 128, 1024), (4, 1, 128, 4096), (1, 1, 1024, 1024), (1, 1, 512, 4096))
"""Those that `compare` holds against torch."""
MIXED = ((60, 1200, 65), (60, 1200, 128), (16, 1200, 256), (4, 600, 512))
"""Decode rows, their context, rows of a prompt range beside them that ends at the same context."""
CUT, WHOLE = 264, 1
"""Work units to cut items for: those of the card, or so few that none is cut."""
PEAK_FLOPS = 989e12
"""Dense bf16 of the H200's data sheet."""


def segments_of(requests: int, depths: int, rows: int, context: int) -> list[tuple[int, int, int, int]]:
    """As `Bench.attention` takes them; the chunk at depth d ends d chunks before the context."""
    return [
        (request, depth, context - rows * (depth + 1), rows)
        for request in range(requests)
        for depth in range(depths)
    ]


def flops(segments: list[tuple[int, int, int, int]]) -> int:
    """Of both products over the keys that each row sees."""
    keys = sum(sum(range(start + 1, start + rows + 1)) for _, _, start, rows in segments)
    return 4 * HIDDEN * keys


def compare(cases: tuple[tuple[int, int, int, int], ...]) -> list[dict[str, object]]:
    """Microseconds of a layer: both kernels, and torch's FlashAttention on K/V that lie in one piece. Prints
    a line each."""
    prepare_environment()
    bench, base, ours = _kernels(max(context for *_, context in cases))
    found = []
    for requests, depths, rows, context in cases:
        name = f"{requests} x {rows} rows at {context}"
        segments = segments_of(requests, depths, rows, context)
        flash = bench.time_us(_flash(requests, rows, context))
        tiles = min(TILE_ROWS, rows)
        triton, cuda = (bench.time_us(bench.attention(segments, tiles, WHOLE, one)) for one in (base, ours))
        limit = flops(segments) / PEAK_FLOPS * 1e6
        share = f"{limit / cuda:.0%} of the peak"
        line = f"{name}, us: Triton {triton:.1f}, CUDA {cuda:.1f} ({share}), torch's flash {flash:.1f}"
        print(line, flush=True)
        found.append({"case": name, "triton_us": triton, "cuda_us": cuda, "flash_us": flash})
    del bench, base, ours
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _flash(requests: int, rows: int, context: int) -> Callable[[int], torch.Tensor]:
    size = (requests, SHAPE.num_heads, context, SHAPE.head_dim)
    keys, values = ([torch.randn(size, device="cuda").bfloat16() for _ in range(LAYERS)] for _ in range(2))
    q = torch.randn(*size[:2], rows, SHAPE.head_dim, device="cuda").bfloat16()
    mask = causal_lower_right(rows, context)

    def run(layer: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, keys[layer], values[layer], attn_mask=mask)

    return run


def _kernels(context: int = 9216) -> tuple[Bench, AttentionLauncher, TallAttention]:
    bench = Bench(LAYERS, context=context)
    base = AttentionLauncher(bench.workspace, bench.num_sms)
    return bench, base, TallAttention.load(base, Module(nvrtc.compile_cubin(SOURCE, OPTIONS)))


def main() -> None:
    prepare_environment()
    bench, base, ours = _kernels()
    parts = sys.argv[1:] or ["bits", "times"]
    if "bits" in parts:
        print(f"bits: {', '.join(differing_tall(ours, SHAPE)) or 'all equal'}", flush=True)
    if "times" in parts:
        for case in CASES:
            requests, depths, rows, context = case
            show(bench, base, ours, f"{requests} x {depths} x {rows} rows at {context}", segments_of(*case))
        for rows, context, chunk in MIXED:
            decoding = [(i % 7, i // 7 % 4, context - 1 - i // 28, 1) for i in range(rows)]
            segments = [*decoding, (7, 0, context - chunk, chunk)]
            show(bench, base, ours, f"{rows} x 1 + {chunk} rows at {context}", segments)


def show(
    bench: Bench, base: AttentionLauncher, ours: TallAttention, name: str,
    segments: list[tuple[int, int, int, int]],
) -> None:  # fmt: skip
    """One line: Triton in tiles of 64 and 128, both kernels in tiles of 128 cut and whole."""
    limit = flops(segments) / PEAK_FLOPS * 1e6
    lower = bench.time_us(bench.attention(segments, TILE_ROWS // 2, CUT, base))
    shown = [f"Triton in tiles of 64 {lower:.1f}"]
    for label, slots in (("cut", CUT), ("whole", WHOLE)):
        was, now = (bench.time_us(bench.attention(segments, TILE_ROWS, slots, one)) for one in (base, ours))
        shown.append(f"{label} {was:.1f} -> {now:.1f} ({limit / now:.0%})")
    print(f"{name}, us (of the peak): {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
