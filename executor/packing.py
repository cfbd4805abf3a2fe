"""From `Work` to a packed metadata buffer: which rows are read from where, run at which depth,
and written to where.

Knows the hidden pool's layout and the prompts; knows no kernel and launches nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from executor.kernels.meta import HostMeta
from executor.kernels.worklist import PackedBatch, Packer
from executor.pools import Pools
from policies.core.seam.batch import PROMPT_STAGES, ScheduledRange, Stage, Work

NO_TOKENS: Mapping[tuple[int, int], int] = {}


@dataclass(slots=True)
class RunningRequest:
    """What the executor knows of a request: its ring, its prompt, its block groups."""

    request_id: int
    ring_id: int
    prompt: np.ndarray  # [prompt_tokens] int32
    block_groups: tuple[int, ...]


class BatchPacker:
    """Packs batches of one run. `num_loops` is the model's T, `has_gate` whether an exit gate must know the
    decode rows."""

    def __init__(self, packer: Packer, pools: Pools, num_loops: int, has_gate: bool = False) -> None:
        self._packer = packer
        self._pools = pools
        self._rows_per_ring = pools.rows_per_ring
        self._num_loops = num_loops
        self._has_gate = has_gate
        self._planes = pools.kv.planes
        self._block_size = pools.kv.block_size

    def pack(
        self,
        host: HostMeta,
        work: Work,
        requests: Mapping[int, RunningRequest],
        surplus: frozenset[int] = frozenset(),
        known: Mapping[tuple[int, int], int] = NO_TOKENS,
    ) -> PackedBatch:
        """Fill `host` for `work`; rows lie in batch order. Decode rows of the requests in `surplus` write
        nothing. `known` are tokens by (request, position) that decode rows embed and the host knows.

        Where no depth runs only a token that left early has a K/V address: the one that CODA copies from.
        """
        if work.loop_count:
            return self._pack_depths(host, work, requests, surplus, known)
        host.row_fields[1:] = -1
        if work.stage is Stage.PREFILLING_PRELUDE:
            self._pack_staging(host, work, requests)
        else:
            # PRELUDE embeds the token at its position, CODA makes the one behind it.
            is_prelude = work.stage is Stage.PRELUDE
            ends, ahead = (host.target_rows, 0) if is_prelude else (host.source_rows, 1)
            for row, item in enumerate(work.ranges):
                ring_id, position = requests[item.request_id].ring_id, item.token_start
                host.sampled_rows[row] = self._pools.sampled_row(ring_id, position + ahead)
                ends[row] = self._pools.decode_row(ring_id, position)
                if item.depth and work.has_planes and item.stage is Stage.CODA:
                    host.slots[row] = self._exit_slot(requests[item.request_id], item)
        return PackedBatch(work.rows, 0, host.layout.combine_offset)

    def _pack_staging(self, host: HostMeta, work: Work, requests: Mapping[int, RunningRequest]) -> None:
        """Prompt tokens to their places in the hidden rings."""
        row = 0
        for item in work.ranges:
            request, end = requests[item.request_id], row + item.token_count
            first = self._prompt_row(request.ring_id, item)
            host.token_ids[row:end] = request.prompt[item.token_start : item.token_end]
            host.target_rows[row:end] = np.arange(first, first + item.token_count)
            row = end

    def _exit_slot(self, request: RunningRequest, item: ScheduledRange) -> int:
        """Slot of a CODA row's token in the plane of its last loop; `item.depth` is the first that it
        skipped."""
        block = request.block_groups[item.token_start // self._block_size] * self._planes + item.depth - 1
        return block * self._block_size + item.token_start % self._block_size

    def _pack_depths(
        self,
        host: HostMeta,
        work: Work,
        requests: Mapping[int, RunningRequest],
        surplus: frozenset[int],
        known: Mapping[tuple[int, int], int],
    ) -> PackedBatch:
        """A prompt range that ends its last depth leaves no hidden rows but the last prompt token's, which
        CODA reads from the request's decode row."""
        columns: list[int] = []
        embedded: list[tuple[int, np.ndarray]] = []
        drawn: list[tuple[int, int, int]] = []
        kept: list[tuple[int, int]] = []
        decoded: list[tuple[int, int]] = []
        silent: list[int] = []
        last_start = self._num_loops - work.loop_count
        row = 0
        for item in work.ranges:
            request_id, depth = item.request_id, item.depth
            start, count = item.token_start, item.token_count
            request = requests[request_id]
            ring_id = request.ring_id
            decode_row = self._pools.decode_row(ring_id, start + count - 1)
            plane = depth if self._planes > 1 else 0
            if item.stage in PROMPT_STAGES:
                first = self._prompt_row(ring_id, item)
                target = first if depth < last_start else -1
                if target < 0 and start + count == len(request.prompt):
                    kept.append((row + count - 1, decode_row))
                if item.embeds:
                    embedded.append((row, request.prompt[start : start + count]))
                    first = -1
                columns += (ring_id, plane, start, count, first, target)
            else:
                columns += (ring_id, plane, start, 1, -1 if item.embeds else decode_row, decode_row)
                if item.embeds:
                    place = self._pools.sampled_row(ring_id, start)
                    drawn.append((row, place, known.get((request_id, start), -1)))
                if self._has_gate:
                    decoded.append((row, ring_id * self._num_loops + depth))
                if request_id in surplus:
                    silent.append(row)
            row += count
        packed = self._packer.pack(host, np.array(columns, dtype=np.int64).reshape(-1, 6))
        for first, tokens in embedded:
            host.token_ids[first : first + len(tokens)] = tokens
        for at, place, token in drawn:
            host.sampled_rows[at], host.token_ids[at] = place, token
        for at, decode_row in kept:
            host.target_rows[at] = decode_row
        if decoded:
            rows, gates = np.array(decoded).T
            host.gates[rows] = gates
        host.slots[silent] = host.target_rows[silent] = -1
        return packed

    def _prompt_row(self, ring_id: int, item: ScheduledRange) -> int:
        """Hidden row of a prompt range's first token: `prefill_hidden_row_offset`, or its place in the chunk
        when that is None."""
        hidden_row_offset = item.prefill_hidden_row_offset
        if hidden_row_offset is None:
            hidden_row_offset = item.token_start - item.chunk_start
        return ring_id * self._rows_per_ring + hidden_row_offset
