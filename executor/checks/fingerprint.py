"""Exact fingerprints of what a run computed: every K/V element of every plane, and the final hidden state
behind every token.

Two runs are equal bit for bit exactly when their fingerprints are (up to a 64-bit checksum's chance).
Computed on the device, from the bits of the elements, so that a whole 1.4B run can be compared without
copying its K/V to the host.
"""

from dataclasses import dataclass, field

import torch

from executor.packing import RunningRequest
from executor.pools import Pools
from executor.runner import Launched, Runner
from policies.core.seam.batch import HEADS, ExecutionBatch, Stage

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407


@dataclass(slots=True)
class Fingerprint:
    """One request: a checksum of K and V in every plane over all its positions, and one of the hidden state
    behind each token."""

    kv: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)


class Fingerprints:
    """An observer that fingerprints every request of a run as it ends. Attach it, run, then call `finish`."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._runner: Runner | None = None
        self._kv: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, dict[int, torch.Tensor]] = {}

    def attach(self, runner: Runner) -> None:
        self._runner = runner

    def launching(self, batch: ExecutionBatch) -> None:
        """Before a CODA is enqueued, enqueue the checksum of the states it reads."""
        if batch.stage is not Stage.CODA:
            return
        assert self._runner is not None
        for item in batch.ranges:
            request = self._runner.requests[item.request_id]
            if item.stage not in HEADS:
                continue
            state = self._pools.hidden[self._pools.decode_row(request.ring_id, item.token_start)]
            self._hidden.setdefault(item.request_id, {})[item.token_start] = checksum(state)

    def collected(self, batch: ExecutionBatch, launched: Launched, stops: frozenset[int]) -> None:
        """Fingerprint the K/V of the requests that end, while their blocks are theirs; forget states behind
        surplus tokens."""
        assert self._runner is not None
        done: set[int] = set()
        ends = {item.request_id: item for item in batch.ranges if item.stage in HEADS}
        for item in batch.ranges:
            is_end = (item.request_id, item.token_start) in launched.refused or item is ends.get(
                item.request_id
            )
            if item.request_id in stops and item.request_id not in done and is_end:
                done.add(item.request_id)
                request = self._runner.requests[item.request_id]
                last = item.token_start
                self._kv[item.request_id] = self._kv_checksums(request, last + 1)
                states = self._hidden[item.request_id]
                self._hidden[item.request_id] = {
                    position: state for position, state in states.items() if position <= last
                }

    def finish(self) -> dict[int, Fingerprint]:
        """The fingerprints by request id; waits for the device."""
        return {
            request_id: Fingerprint(
                self._kv[request_id].tolist(), [int(state) for state in self._hidden[request_id].values()]
            )
            for request_id in sorted(self._kv)
        }

    def _kv_checksums(self, request: RunningRequest, num_positions: int) -> torch.Tensor:
        """[2 * planes] int64: K of every plane, then V. The last sampled token has no K/V, so positions end
        before it."""
        kv = self._pools.kv
        num_blocks = -(-num_positions // kv.block_size)
        groups = torch.tensor(request.block_groups[:num_blocks], device=kv.k.device)
        sums = []
        for pool in (kv.k, kv.v):
            for plane in range(kv.planes):
                blocks = pool[
                    :, groups * kv.planes + plane
                ]  # [layers, blocks, kv_heads, block_size, head_dim]
                by_position = blocks.permute(1, 3, 0, 2, 4).reshape(num_blocks * kv.block_size, -1)
                sums.append(checksum(by_position[:num_positions]))
        return torch.stack(sums)


def checksum(values: torch.Tensor) -> torch.Tensor:
    """A 64-bit checksum of the bits of `values` in order, as a scalar int64 tensor on the same device.

    Every element's bits are multiplied by a weight that depends on its index and added up modulo 2^64, which
    no order of addition can change. Weights are odd, so one flipped bit always changes the sum; several do up
    to a chance of about 2^-64.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.contiguous().view(-1).view(integer).long()
    weights = torch.arange(len(bits), device=values.device) * MULTIPLIER + INCREMENT
    return ((bits + 1) * ((weights ^ (weights >> 29)) | 1)).sum()
