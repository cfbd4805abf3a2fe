"""Attention of prompt ranges on a card: the bits of the CUDA kernel against Triton's, and times of both.

`python -m executor.lab.tall_rows [bits] [times]` prints one table per part.
"""

import sys

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


def main() -> None:
    prepare_environment()
    bench = Bench(LAYERS)
    base = AttentionLauncher(bench.workspace, bench.num_sms)
    ours = TallAttention.load(base, Module(nvrtc.compile_cubin(SOURCE, OPTIONS)))
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
