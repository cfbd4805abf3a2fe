"""What the device runs for one batch, as programs over static buffers of a row bucket: eagerly, or captured
once as CUDA graphs.

A program is one of these kinds: rows through some recurrent loops, rows to the hidden pool only (prelude), or
rows to tokens (coda, and coda-exits when some of them left early). Its key is all in which two batches that
share a graph must agree: kind, bucket, query-tile class, loops, exit gate. The metadata buffer holds the
rest.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from executor.kernels.gate import GateRule
from executor.kernels.meta import BatchMeta, HostMeta, MetaLayout
from executor.model.forward import (
    LoopedModel,
    Scratch,
    drop_left,
    exit_gate,
    lm_head,
    load_rows,
    recurrent,
    store_rows,
)
from executor.model.sampling import SAMPLING_DTYPES, SamplingRows, greedy, sample
from executor.pools import Pools
from policies.core.seam.batch import Stage, Work
from policies.core.seam.exits import ExitRule

BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896,
    1024, 1280, 1536, 1792, 2048,
)  # fmt: skip
"""Row counts that batches are padded to. Dense where a step of the linear layers costs time, multiples of
their tiles above."""

EAGER_USES = 16
"""A capture stops a run for 40 to 110 ms on an H200, an eager batch takes 3 to 10 ms more than a graph: by
then they are even."""


class ProgramKey(NamedTuple):
    """Batches with equal keys run the same kernels over the same addresses."""

    kind: str
    bucket: int
    tile_rows: int
    loops: int
    gate: GateRule | None = None
    is_random: bool = False


@dataclass(slots=True)
class Bucket:
    """Static buffers of one row count."""

    meta: BatchMeta
    hosts: tuple[HostMeta, ...]
    scratch: Scratch
    uses: int = 0

    def next_host(self) -> HostMeta:
        self.uses += 1
        return self.hosts[self.uses % len(self.hosts)]


class Programs:
    """Builds and runs the programs of one model over one set of pools.

    `inflight` batches may be enqueued before one is collected: host buffers are one more, used in turn, so
    the next is always free. `use_graphs` captures programs (CUDA only): those of `warm_up` at once, any other
    once it has run eagerly `eager_uses` times. One that there is no memory to capture runs eagerly for good.
    `after_loop(depth_offset, hidden)` is called after every loop, which only eager programs can do: for
    diagnostics.
    """

    def __init__(
        self,
        model: LoopedModel,
        pools: Pools,
        max_rows: int,
        max_requests: int,
        inflight: int,
        use_graphs: bool,
        after_loop: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        weights = model.weights
        self._model = model
        self._pools = pools
        self._device = weights.embedding.device
        self._num_hosts = inflight + 1
        self._scratch = Scratch.allocate(model.shape, max_rows, weights.embedding.dtype, self._device)
        self._sizes = [size for size in BUCKETS if size < max_rows] + [max_rows]
        max_logit_rows = next((size for size in self._sizes if size >= max_requests), max_rows)
        self._logits = torch.zeros(
            (max_logit_rows, model.shape.vocab_size), dtype=weights.embedding.dtype, device=self._device
        )
        self._tokens = torch.zeros(max_logit_rows, dtype=torch.int32, device=self._device)
        pin = self._device.type == "cuda"
        self._host_tokens = torch.zeros((self._num_hosts, max_logit_rows), dtype=torch.int32, pin_memory=pin)
        self._host_settings = [
            SamplingRows(
                *(torch.zeros(max_logit_rows, dtype=kind, pin_memory=pin) for kind in SAMPLING_DTYPES)
            )
            for _ in range(self._num_hosts)
        ]
        self._num_codas = 0
        self._decisions = torch.zeros(max_rows, dtype=torch.int32, device=self._device)
        self._host_decisions = torch.zeros((self._num_hosts, max_rows), dtype=torch.int32, pin_memory=pin)
        self._num_gated = 0
        self._settings = SamplingRows(
            *(torch.zeros(max_logit_rows, dtype=dtype, device=self._device) for dtype in SAMPLING_DTYPES)
        )
        self._buckets: dict[int, Bucket] = {}
        self._graphs: dict[ProgramKey, torch.cuda.CUDAGraph] = {}
        self.use_graphs = use_graphs
        """May be taken back where eager launches are to be timed."""
        self._after_loop = after_loop
        self.eager_uses = EAGER_USES
        """Set to 0 where only graphs are to be timed."""
        self._times_run: Counter[ProgramKey] = Counter()
        self.uncaptured: set[ProgramKey] = set()
        """Programs that run eagerly, because there was no memory to capture them."""
        self.graph_hits = self.graph_captures = self.eager_runs = 0

    def bucket_for(self, rows: int) -> Bucket:
        """The smallest bucket that holds `rows` rows; its buffers are made on first use."""
        size = self._sizes[bisect_left(self._sizes, rows)]
        bucket = self._buckets.get(size)
        if bucket is None:
            layout = MetaLayout.for_rows(size)
            pin = self._device.type == "cuda"
            hosts = tuple(HostMeta.allocate(layout, pin) for _ in range(self._num_hosts))
            bucket = self._buckets[size] = Bucket(
                BatchMeta.allocate(layout, self._device), hosts, self._scratch.rows(size)
            )
        return bucket

    def run(
        self,
        work: Work,
        bucket: Bucket,
        tile_rows: int,
        gate: GateRule | None = None,
        is_random: bool = False,
    ) -> None:
        """Enqueue the program of `work`, whose metadata copy has been enqueued before; `gate` decides on its
        decode rows. Where it `is_random`, `set_sampling` has said how its tokens are drawn."""
        rows = bucket.meta.layout.max_rows
        if work.loop_count:
            key = ProgramKey("recurrent", rows, tile_rows, work.loop_count, gate)
        elif work.stage is Stage.CODA:
            key = ProgramKey("coda-exits" if work.exit_depths else "coda", rows, 0, 0, None, is_random)
        else:
            key = ProgramKey("prelude", rows, 0, 0)
        graph = self._graph_of(key)
        if graph is None:
            self.eager_runs += 1
            self._body(key, bucket)
        else:
            graph.replay()

    def _graph_of(self, key: ProgramKey) -> torch.cuda.CUDAGraph | None:
        """The graph to replay for `key`, captured when it has earned it; None when it must run eagerly."""
        if not self.use_graphs:
            return None
        graph = self._graphs.get(key)
        if graph is not None:
            self.graph_hits += 1
            return graph
        self._times_run[key] += 1
        return self._try_capture(key) if self._times_run[key] > self.eager_uses else None

    def _try_capture(self, key: ProgramKey) -> torch.cuda.CUDAGraph | None:
        """The new graph of `key`; None when there is no memory for it, now or an earlier time."""
        if key in self.uncaptured:
            return None
        try:
            return self._capture(key, self.bucket_for(key.bucket))
        except torch.OutOfMemoryError:
            self.uncaptured.add(key)
            return None

    def _capture(self, key: ProgramKey, bucket: Bucket) -> torch.cuda.CUDAGraph:
        """Capture `key` without running it. Triton compiles on a first eager run, over metadata that names no
        rows."""
        torch.cuda.synchronize(self._device)
        held = bucket.meta.buffer.clone()
        bucket.meta.buffer.copy_(self._no_rows(bucket))
        try:
            self._body(key, bucket)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._body(key, bucket)
        finally:
            bucket.meta.buffer.copy_(held)
        self._graphs[key] = graph
        self.graph_captures += 1
        return graph

    def _no_rows(self, bucket: Bucket) -> torch.Tensor:
        """Metadata of a batch without rows: every row is padding, no attention work."""
        layout = bucket.meta.layout
        words = torch.zeros(layout.num_words, dtype=torch.int32)
        views = layout.views(words)
        for name in ("slots", "token_ids", "sampled_rows", "source_rows", "target_rows", "gates"):
            views[name].fill_(-1)
        return words

    def _body(self, key: ProgramKey, bucket: Bucket) -> None:
        model, pools, meta, scratch = self._model, self._pools, bucket.meta, bucket.scratch
        if key.kind == "coda-exits":
            model.ops.exit_copy(pools.kv.k, pools.kv.v, meta.slots, pools.kv.planes)
        if key.kind.startswith("coda"):
            self._coda(meta, scratch, key.bucket, key.is_random)
            return
        if key.gate is not None:
            drop_left(model, meta, pools.left)
        load_rows(model, meta, pools.hidden, pools.sampled, scratch)
        for depth_offset in range(key.loops):
            recurrent(model, pools.kv, meta, key.tile_rows, scratch, depth_offset)
            if key.gate is not None:
                exit_gate(
                    model, meta, scratch.hidden, pools.survival, pools.left, self._decisions, depth_offset,
                    key.gate
                )  # fmt: skip
            if self._after_loop is not None:
                self._after_loop(depth_offset, scratch.hidden)
        store_rows(model, meta, scratch, pools.hidden)

    def _coda(self, meta: BatchMeta, scratch: Scratch, rows: int, is_random: bool) -> None:
        """Hidden rows to tokens; each takes its place among its ring's, where one that was guessed may be:
        whether they are equal is decided here, and nothing waits for it."""
        model, pools = self._model, self._pools
        logits, tokens = self._logits[:rows], self._tokens[:rows]
        model.ops.gather_rows(pools.hidden, meta.source_rows, scratch.hidden)
        lm_head(model, scratch.hidden, logits)
        if is_random:
            sample(logits, self._settings.first(rows), tokens)
        else:
            greedy(logits, tokens)
        places = meta.sampled_rows
        places = torch.where(places < 0, len(pools.sampled) - 1, places).long()
        if pools.decode_rows > 1:
            self._decisions[:rows].copy_(pools.sampled[places] == tokens)
        pools.sampled.index_copy_(0, places, tokens)

    def set_sampling(self, rows: Sequence[tuple[float, int, float, int]]) -> None:
        """Enqueue how the next coda's tokens are drawn: temperature, top_k, top_p and seed of every row. What
        it pads them with is greedy."""
        hosts = self._host_settings[self._num_codas % self._num_hosts]
        columns = zip(*rows, strict=True)
        for host, settings, values in zip(hosts.tensors(), self._settings.tensors(), columns, strict=True):
            host.numpy()[: len(rows)] = values
            host.numpy()[len(rows) :] = 1 if host is hosts.top_p else 0
            settings.copy_(host, non_blocking=True)

    def copy_tokens(self, rows: int) -> torch.Tensor:
        """Enqueue a copy of the last coda's tokens to a host buffer: [rows] int32, valid from when the device
        is past it until `inflight` codas later."""
        host = self._host_tokens[self._num_codas % self._num_hosts, :rows]
        self._num_codas += 1
        host.copy_(self._tokens[:rows], non_blocking=True)
        return host

    def copy_decisions(self, rows: int) -> torch.Tensor:
        """Enqueue a copy of the last gated batch's decisions to a host buffer: [rows] int32, valid like
        `copy_tokens`' result."""
        host = self._host_decisions[self._num_gated % self._num_hosts, :rows]
        self._num_gated += 1
        host.copy_(self._decisions[:rows], non_blocking=True)
        return host

    def warm_up(
        self, longest_range: int, exits: ExitRule, gate: GateRule | None, is_random: bool = False
    ) -> None:
        """Make the programs that batches of ranges up to `longest_range` rows commonly need, for every
        bucket: one loop, all, and as many as decode rows run before they may leave. Decode rows alone may
        have any number of loops left. Where it `is_random`, tokens are drawn."""
        num_loops, decode_loops = self._model.shape.num_loops, exits.boundary(0)
        classes = self._model.ops.tile_classes
        largest = next((rows for rows in classes if rows >= longest_range), classes[-1])
        for size in self._sizes if self._device.type == "cuda" else self._sizes[:1]:
            bucket = self.bucket_for(size)
            tiles = [tile for tile in classes if tile <= largest]
            keys = [
                ProgramKey("recurrent", size, tile, loops)
                for tile in tiles
                for loops in sorted({1, num_loops})
            ]
            keys += [ProgramKey("recurrent", size, tile, 1, gate) for tile in tiles]
            keys += [
                ProgramKey("recurrent", size, tiles[0], decode_loops, gate),
                ProgramKey("prelude", size, 0, 0),
            ]
            if size <= len(self._tokens):
                codas = ["coda"]
                keys += [ProgramKey("recurrent", size, tiles[0], loops) for loops in range(2, num_loops)]
                if exits.min_loops < num_loops and self._pools.kv.planes > 1:
                    codas.append("coda-exits")
                keys += [
                    ProgramKey(kind, size, 0, 0, None, is_drawn)
                    for kind in codas
                    for is_drawn in sorted({False, is_random})
                ]
            for key in dict.fromkeys(keys):
                if self.use_graphs and key not in self._graphs:
                    self._try_capture(key)
                elif not self.use_graphs:
                    bucket.meta.buffer.copy_(self._no_rows(bucket))
                    self._body(key, bucket)

    def notes(self) -> list[str]:
        """A sentence for the user when programs run slower than they should."""
        if not self.uncaptured:
            return []
        found = (
            f"{len(self.uncaptured)} programs run eagerly, there was no memory to capture their CUDA graphs"
        )
        return [f"{found}; lower cache.num_blocks or scheduler.max_num_batched_tokens"]

    def counters(self) -> dict[str, int]:
        """How batches ran so far: replayed graphs, graphs captured, eager programs."""
        return {
            "graph_hits": self.graph_hits,
            "graph_captures": self.graph_captures,
            "eager_batches": self.eager_runs,
        }
