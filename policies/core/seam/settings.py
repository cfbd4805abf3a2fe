"""Scheduler and cache settings, as values. Reading and checking a config file is
`policies.config.runconfig`'s; these carry its result."""

from dataclasses import dataclass
from typing import Annotated, Literal

from policies.core.bounds import LARGEST, Within

MAX_INFLIGHT = 8
"""Two decode steps of PRELUDE, RECURRENT and CODA and some; beyond it a deeper queue only makes decisions
older."""
Amount = Annotated[int, Within(1, LARGEST)]


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Limits and orders of the scheduler.

    `prefill_chunk_size` None means the largest chunk the budget allows, `max_num_batched_tokens`. `decode`
    refill lets freshly embedded tokens join tokens already looping; no_refill holds a cohort until it drains.
    `inflight` is how many batches may be submitted before one is collected: at 1 the device waits for the
    host after every batch; more hide short batches (PRELUDE, CODA) better, and let a request that stops
    early, or an arrival, wait for more of what is already submitted. `min_coda_batch_size` states wait for
    one another at the LM head, but no longer than for as many batches as the model has loops.
    """

    max_num_seqs: Annotated[int, Within(1, 1_000_000)] = 8
    max_num_batched_tokens: Amount = 1024
    prefill_chunk_size: Amount | None = 16
    decode: Literal["refill", "no_refill"] = "refill"
    inflight: Annotated[int, Within(1, MAX_INFLIGHT)] = 4
    admission: Literal["fcfs", "priority"] = "fcfs"
    admission_scan_limit: Amount = 16
    max_admission_bypasses: Annotated[int, Within(0, LARGEST)] = 8
    max_prefill_batches_before_decode: Amount = 1
    min_coda_batch_size: Amount = 1

    @property
    def chunk_tokens(self) -> int:
        return self.prefill_chunk_size or self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV pool. `num_blocks` None means: as many as the device's memory holds (a backend fills it in
    before a run).

    Under `layout` last_exited a query at depth d reads the K/V of depth d; under shared there is one plane,
    in which a token's K/V are overwritten at every depth, so later tokens read its last ones. `allocation`
    full reserves at admission all that a request can ever need; incremental gives blocks step by step.
    `admit` then says when a request comes in, or back: when all that is known of it (prompt, and tokens that
    it made before it was preempted) has room, which it gets at once, or as soon as its first chunk has; in
    both cases the fraction `watermark` of the pool stays free for those who run. `preemption` says what
    becomes of the K/V of a request that is preempted: recompute forgets them, swap keeps them in host memory,
    `swap_blocks` blocks at most (None: no limit).
    """

    block_size: Amount = 16
    num_blocks: Amount | None = None
    layout: Literal["last_exited", "shared"] = "last_exited"
    prefix_caching: bool = False
    allocation: Literal["full", "incremental"] = "full"
    admit: Literal["whole_context", "first_chunk"] = "whole_context"
    preemption: Literal["off", "recompute", "swap"] = "off"
    watermark: Annotated[float, Within(0, lt=1)] = 0.01
    swap_blocks: Annotated[int, Within(0, LARGEST)] | None = None

    def planes(self, num_loops: int) -> int:
        """Depth planes of the K/V of a model with `num_loops` loops: one each, or one for all under
        `shared`."""
        return 1 if self.layout == "shared" else num_loops

    @property
    def may_recompute(self) -> bool:
        """Whether a request that is preempted may have its K/V computed again: under swap, when host memory
        has no room for them."""
        return self.preemption == "recompute" or (self.preemption == "swap" and self.swap_blocks is not None)
