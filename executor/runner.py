"""Runs batches on the device, in order, and says what came of them. Never waits for the device except when
asked to collect.

What is transferred comes first (`transfer`): K/V to host memory, block tables, K/V from host memory. One
`launch` is: pack metadata into a free host buffer, one copy, one graph (or eager program), for CODA a copy of
the tokens back. Sampled tokens stay on the device for the next prelude; the host reads them when the batch is
collected.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from executor.checks.audit import AddressAudit
from executor.kernels.gate import GateRule
from executor.kernels.worklist import Packer
from executor.model.forward import LoopedModel
from executor.model.sampling import row_seed
from executor.packing import NO_TOKENS, BatchPacker, RunningRequest
from executor.pools import Pools
from executor.programs import Programs
from executor.swap import SwapSpace
from executor.timeline import Mark, Timeline
from policies.core.seam.batch import Stage, Transfers, Work
from workloads.asked import Sampling

GREEDY = Sampling()


@dataclass(slots=True)
class Launched:
    """A batch that has been handed to the device. `tokens` is its CODA output on the host, `decisions` what
    an exit gate said of each row, or whether a CODA row's token is the one that was guessed for its place;
    both are valid once `end` has passed. `refused` are the guesses of it that are known to be wrong.
    `swapped` is where copies from and to host memory, which it begins with, end."""

    work: Work
    start: Mark
    swapped: Mark | None
    end: Mark
    tokens: torch.Tensor | None
    decisions: torch.Tensor | None
    refused: frozenset[tuple[int, int]] = frozenset()


class Runner:
    """Owns the launch order of one run.

    `gate` decides after every loop which tokens leave early (None: no gate is asked); `swap` is where
    requests that are preempted go (None: none is swapped); `sampling` says how a request's tokens are drawn.
    """

    def __init__(
        self,
        model: LoopedModel,
        pools: Pools,
        programs: Programs,
        timeline: Timeline,
        seed: int,
        audit: AddressAudit | None = None,
        gate: GateRule | None = None,
        swap: SwapSpace | None = None,
        sampling: Callable[[int], Sampling] = lambda request_id: GREEDY,
    ) -> None:
        self._model = model
        self.pools = pools
        self._programs = programs
        self._timeline = timeline
        self._seed = seed
        self._audit = audit
        self._gate = gate
        self._swap = swap
        self._sampling = sampling
        if swap is not None:
            swap.clear()
        ops = model.ops
        shape = model.shape
        self._packer = BatchPacker(
            Packer(
                pools.host_groups,
                pools.kv.planes,
                pools.kv.block_size,
                shape.num_heads,
                ops.attention_slots,
                ops.tile_classes,
                ops.tall_margin,
            ),
            pools,
            shape.num_loops,
            gate is not None,
        )
        self.requests: dict[int, RunningRequest] = {}
        self.launched: deque[Launched] = deque()
        self.swap_ns = 0
        """Device time of collected batches that went to copies from and to host memory."""
        self._swap_marks: tuple[Mark, Mark] | None = None
        self._rows = self._padded_rows = 0

    def transfer(self, transfers: Transfers, prompts: Mapping[int, np.ndarray]) -> None:
        """Enqueue what is transferred before the batch that is launched next.

        `prompts` has the tokens that each admitted request runs as its prompt: kept output tokens are its
        end.
        """
        for request_id in (*transfers.released, *(item.request_id for item in transfers.preemptions)):
            self.requests.pop(request_id, None)
        if self._audit is not None:
            self._audit.transfer(transfers, prompts)
        start = self._timeline.mark() if transfers.swapped_bytes else None
        if self._swap is not None:
            self._swap_out(self._swap, transfers)
        for allocation in transfers.allocations:
            request_id, ring_id, groups = allocation.request_id, allocation.ring_id, allocation.block_groups
            self.requests[request_id] = RunningRequest(request_id, ring_id, prompts[request_id], groups)
            self.pools.admit(allocation)
        for growth in transfers.growths:
            request = self.requests[growth.request_id]
            request.block_groups += growth.block_groups
            self.pools.write_groups(request.ring_id, growth.first_group, growth.block_groups)
        if self._swap is not None:
            for allocation in transfers.allocations:
                if allocation.request_id in self._swap:
                    self._swap.bring_back(allocation.request_id, allocation.ring_id)
        self._swap_marks = (start, self._timeline.mark()) if start is not None else None

    def _swap_out(self, swap: SwapSpace, transfers: Transfers) -> None:
        for request_id in transfers.released:
            swap.forget(request_id)
        for item in transfers.preemptions:
            if item.is_swapped:
                swap.take_out(item.request_id, item.ring_id, len(item.block_groups))

    def launch(
        self,
        work: Work,
        surplus: frozenset[int] = frozenset(),
        known: Mapping[tuple[int, int], int] = NO_TOKENS,
    ) -> None:
        """Hand `work` to the device, after its `transfer`; decode rows of the requests in `surplus` are
        known to have left the loop and leave no trace, and `known` tokens are embedded as the host knows
        them."""
        bucket = self._programs.bucket_for(work.rows)
        host = bucket.next_host()
        packed = self._packer.pack(host, work, self.requests, surplus, known)
        if self._audit is not None:
            self._audit.check(work, host, surplus, known)
        is_coda = work.stage is Stage.CODA
        gate = self._gate if work.stage is Stage.RECURRENT else None
        is_random = is_coda and self._set_sampling(work)
        start, swapped = self._swap_marks or (self._timeline.mark(), None)
        bucket.meta.update(host, packed.num_words)
        self._programs.run(work, bucket, packed.tile_rows, gate, is_random)
        if self._audit is not None:
            self._audit.check_copies(work)
        tokens = self._programs.copy_tokens(work.rows) if is_coda else None
        decides = gate is not None or (is_coda and any([item.stage is Stage.VERIFY for item in work.ranges]))
        decisions = self._programs.copy_decisions(work.rows) if decides else None
        end = self._timeline.mark()
        self._rows += work.rows
        self._padded_rows += bucket.meta.layout.max_rows
        self.launched.append(Launched(work, start, swapped, end, tokens, decisions))

    def _set_sampling(self, work: Work) -> bool:
        """Say how the tokens of a CODA are drawn; return whether any is. The noise follows from a request's
        own seed and the position where it has one, else from the run's seed, its id and the position."""
        asked = [self._sampling(item.request_id) for item in work.ranges]
        if not any([item.temperature > 0 for item in asked]):
            return False
        rows = []
        for item, how in zip(work.ranges, asked, strict=True):
            seed, stream = (self._seed, item.request_id) if how.seed is None else (how.seed, 0)
            noise = row_seed(seed, stream, item.token_start)
            rows.append((how.temperature, how.top_k, how.top_p, noise))
        self._programs.set_sampling(rows)
        return True

    def oldest_is_done(self) -> bool:
        """Whether the oldest launched batch has left the device."""
        return bool(self.launched) and self.launched[0].end.query()

    def collect(self) -> tuple[Launched, int, int]:
        """The oldest batch, which must be done, and its device times (started_ns, finished_ns)."""
        launched = self.launched.popleft()
        started_ns = self._timeline.time_of(launched.start)
        if launched.swapped is not None:
            self.swap_ns += self._timeline.time_of(launched.swapped) - started_ns
        return launched, started_ns, self._timeline.time_of(launched.end)

    def padded_row_fraction(self) -> float:
        """Of all rows that the device ran, the part that was padding up to a bucket."""
        return 1 - self._rows / self._padded_rows if self._padded_rows else 0.0
