"""Whether a batch's bits change when another stream's kernels run at the same time.

`python -m executor.lab.beside [REPLAYS]` replays one loop of few decode rows, alone and beside a prompt chunk
of 64 rows that has pools, scratch and workspace of its own, by the kernels for few rows with either attention
and by Triton and cuBLAS alone, with launches that overlap and without. It counts replays whose hidden rows
are not those of the first. Where anything but 0 differ, engines must not run side by side on a card.
"""

import sys
from collections.abc import Sequence

import numpy as np
import torch

from executor.cuda import driver
from executor.cuda.select import with_cuda
from executor.environment import prepare_environment
from executor.kernels.kv import KVPools
from executor.kernels.lang import OVERLAP
from executor.kernels.meta import MAX_PARTIALS, BatchMeta, HostMeta, MetaLayout
from executor.kernels.ops import Ops, select_ops
from executor.kernels.worklist import Packer
from executor.model.forward import LoopedModel, Scratch, recurrent
from executor.model.weights import Weights, random_weights
from policies.core.models.shape import OURO_1_4B as SHAPE

ROWS, CONTEXT, PROMPT, RINGS, COLUMNS, PLANES, BLOCK_SIZE = (1, 4, 8, 16), 300, (128, 64), 32, 64, 4, 16
Segments = Sequence[tuple[int, int, int, int]]


class Replays:
    """One loop over `segments` (ring, plane, first position, rows) as a graph."""

    def __init__(
        self, weights: Weights, ops: Ops, kv: KVPools, groups: np.ndarray, segments: Segments
    ) -> None:
        model = LoopedModel.assemble(SHAPE, weights, ops, COLUMNS * BLOCK_SIZE)
        packer = Packer(
            groups, PLANES, BLOCK_SIZE, SHAPE.num_heads, ops.attention_slots, ops.tile_classes,
            ops.tall_margin,
        )  # fmt: skip
        rows, device = sum(segment[3] for segment in segments), weights.embedding.device
        layout = MetaLayout.for_rows(rows)
        host, meta = HostMeta.allocate(layout, pin=False), BatchMeta.allocate(layout, device)
        packed = packer.pack(host, np.array([(*segment, -1, -1) for segment in segments]))
        meta.update(host, packed.num_words)
        inputs = torch.randn(rows, SHAPE.hidden_size, device=device).bfloat16()
        scratch = Scratch.allocate(SHAPE, rows, torch.bfloat16, device)

        def run() -> None:
            scratch.hidden.copy_(inputs)
            recurrent(model, kv, meta, packed.tile_rows, scratch)

        run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()
        self.graph.replay()
        torch.cuda.synchronize()
        self.hidden, self._first = scratch.hidden, scratch.hidden.clone()
        # What the graph touches stays allocated: another's buffers in its place would be a difference too.
        self._held = model, meta, inputs, scratch

    def differing(self, other: "Replays | None", replays: int) -> int:
        """How many of `replays` differ from the first one, each begun beside two of `other`."""
        mine, theirs = torch.cuda.Stream(), torch.cuda.Stream()
        found = torch.zeros(1, dtype=torch.int64, device=self.hidden.device)
        torch.cuda.synchronize()
        for _ in range(replays):
            if other is not None:
                with torch.cuda.stream(theirs):
                    other.graph.replay()
                    other.graph.replay()
            with torch.cuda.stream(mine):
                self.graph.replay()
                found += (self.hidden != self._first).any()
        torch.cuda.synchronize()
        return int(found)


def set_overlap(overlaps: bool) -> None:
    """Whether kernels that are captured from now on may start before the one before them has ended."""
    OVERLAP.clear()
    if overlaps:
        OVERLAP["launch_pdl"] = True
    driver.PROGRAMMATIC_STREAM_SERIALIZATION = 6 if overlaps else 0


def main(replays: int) -> int:
    prepare_environment()
    device = torch.device("cuda")
    weights = random_weights(SHAPE, 0, torch.bfloat16, device)
    groups = np.random.default_rng(0).permutation(RINGS * COLUMNS).reshape(RINGS, COLUMNS).astype(np.int32)
    pools = []
    for _ in range(2):
        kv = KVPools.allocate(
            SHAPE, groups.size * PLANES, BLOCK_SIZE, PLANES, RINGS, COLUMNS, torch.bfloat16, device
        )
        kv.groups.copy_(torch.from_numpy(groups))
        for layer in (*kv.k, *kv.v):
            layer.normal_()
        pools.append(kv)
    plain = [select_ops(SHAPE, MAX_PARTIALS, device) for _ in range(2)]
    kinds = {name: with_cuda(plain[0], SHAPE, device, name) for name in ("auto", "triton")}
    first_ring = np.cumsum([0, *ROWS])
    worst = 0
    for overlaps in (True, False):
        set_overlap(overlaps)
        prompt = Replays(weights, plain[1], pools[1], groups, [(0, 0, *PROMPT)])
        for name, ops in (*kinds.items(), ("no CUDA C++", plain[0])):
            for rows, ring in zip(ROWS, first_ring, strict=False):
                segments = [(int(ring) + i, 0, CONTEXT - 1, 1) for i in range(rows)]
                batch = Replays(weights, ops, pools[0], groups, segments)
                alone, beside = batch.differing(None, replays // 4), batch.differing(prompt, replays)
                worst = max(worst, alone, beside)
                print(
                    f"attention {name}, overlapping launches {overlaps}, {rows} rows: {alone} of "
                    f"{replays // 4} alone, {beside} of {replays} beside a prompt",
                    flush=True,
                )
    return min(worst, 1)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
