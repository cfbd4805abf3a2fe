"""From an `ExecutionBatch` to a packed metadata buffer: which rows are read from where, run at which depth, and written to where.

Knows the hidden pool's layout and the prompts; knows no kernel and launches nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from executor.kernels.meta import HostMeta
from executor.kernels.worklist import PackedBatch, Packer
from executor.pools import Pools
from policies.core.batch import PROMPT_STAGES, ExecutionBatch, ScheduledRange, Stage


@dataclass(slots=True)
class RunningRequest:
    """What the executor knows of a request: its ring, its prompt, its block groups."""

    request_id: int
    ring_id: int
    prompt: np.ndarray  # [prompt_tokens] int32
    block_groups: tuple[int, ...]


class BatchPacker:
    """Packs batches of one run. `num_loops` is the model's T."""

    def __init__(self, packer: Packer, pools: Pools, num_loops: int) -> None:
        self._packer = packer
        self._pools = pools
        self._num_loops = num_loops

    def pack(self, host: HostMeta, batch: ExecutionBatch, requests: Mapping[int, RunningRequest]) -> PackedBatch:
        """Fill `host` for `batch`; rows lie in batch order.

        A prompt range that ends its last depth leaves no hidden rows but the last prompt token's, which CODA reads from the
        request's decode row.
        """
        pools = self._pools
        segments = np.empty((len(batch.ranges), 6), dtype=np.int64)
        embedded: list[tuple[int, np.ndarray]] = []
        sampled: list[tuple[int, int]] = []
        kept: list[tuple[int, int]] = []
        row = 0
        for at, item in enumerate(batch.ranges):
            request = requests[item.request_id]
            ring_id = request.ring_id
            source = target = -1
            if item.stage in PROMPT_STAGES:
                first = self.prompt_row(ring_id, item)
                source = -1 if item.embeds else first
                if item.depth + batch.loop_count < self._num_loops:
                    target = first
                elif item.token_end == len(request.prompt):
                    kept.append((row + item.token_count - 1, pools.decode_row(ring_id)))
                if item.embeds:
                    embedded.append((row, request.prompt[item.token_start : item.token_end]))
            else:
                decode_row = pools.decode_row(ring_id)
                if item.stage is Stage.PRELUDE:
                    sampled.append((row, ring_id))
                    target = decode_row
                else:
                    source = decode_row
                    if item.stage is Stage.RECURRENT:
                        target = decode_row
                    else:
                        sampled.append((row, ring_id))
            segments[at] = (ring_id, item.depth, item.token_start, item.token_count, source, target)
            row += item.token_count
        packed = self._packer.pack(host, segments)
        for first, tokens in embedded:
            host.token_ids[first : first + len(tokens)] = tokens
        for first, ring_id in sampled:
            host.sampled_rows[first] = ring_id
        for first, decode_row in kept:
            host.target_rows[first] = decode_row
        return packed

    def prompt_row(self, ring_id: int, item: ScheduledRange) -> int:
        """Hidden row of a prompt range's first token: `prefill_hidden_row_offset`, or its place in the chunk when that is None."""
        hidden_row_offset = item.prefill_hidden_row_offset
        if hidden_row_offset is None:
            hidden_row_offset = item.token_start - item.chunk_start
        return self._pools.first_row(ring_id) + hidden_row_offset
