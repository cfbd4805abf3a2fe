"""Who is in: running requests with the blocks and rings they hold, whoever waits, and whoever was preempted.

Owns both ledgers and decides, before every selection, who grows, who is let in and who is preempted. Knows no
batch, no policy and no time; `policies.core.engine.scheduler` tells it what was scheduled and collected.

Under `allocation: incremental` blocks come step by step: a prompt's next chunk, a decoded token's next block.
The first in order is served first; when blocks run out, those after it are preempted, the last in order
first. So the first in order always makes progress, and no run comes to a halt. Order is (arrival, id), or
(priority, arrival, id) under priority admission.
"""

from collections.abc import Iterable, Sequence

from policies.core.errors import InvariantError
from policies.core.memory.admission import AdmissionQueue
from policies.core.memory.kv import BlockLedger
from policies.core.memory.plan import TransferPlan
from policies.core.memory.preempted import PreemptedRequests
from policies.core.memory.prefixes import Prefixes
from policies.core.memory.pressure import Need, choose
from policies.core.memory.ring import RingLedger
from policies.core.models.shape import ModelShape
from policies.core.progress.frontier import PromptProgress
from policies.core.progress.state import RequestState
from policies.core.seam.batch import NO_TRANSFERS, Allocation, Growth, Preemption, Transfers
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings


class Residents:
    """Running, waiting and preempted requests of one run. `cache.num_blocks` must be set."""

    def __init__(
        self, model: ModelShape, settings: SchedulerSettings, cache: CacheSettings, slots_per_ring: int
    ) -> None:
        assert cache.num_blocks is not None, "the backend sizes the KV pool before a run"
        planes = cache.planes(model.num_loops)
        self.blocks = BlockLedger(cache.num_blocks, cache.block_size, planes)
        self.prefixes = Prefixes(self.blocks, cache.prefix_caching)
        self.rings = RingLedger(settings.max_num_seqs, slots_per_ring)
        self.waiting = AdmissionQueue(
            settings.admission, settings.admission_scan_limit, settings.max_admission_bypasses
        )
        self.running: dict[int, RequestState] = {}
        self.order: tuple[RequestState, ...] = ()
        self.collected_seq = -1
        self.hidden_rows = 0
        self.swapped_bytes = 0
        self._settings = settings
        self._num_loops = model.num_loops
        self._max_context_tokens = model.max_context_tokens
        self._by_priority = settings.admission == "priority"
        self._grows = cache.allocation == "incremental"
        self._yields_to_priority = self._by_priority and cache.preemption != "off"
        self._watermark_groups = int(cache.watermark * self.blocks.num_groups) if self._grows else 0
        self._preempted = PreemptedRequests(model, cache, planes)
        self.draining: list[RequestState] = []
        """Requests that have ended, whose blocks and rings a submitted batch may still touch."""
        self._released: list[int] = []
        self._may_admit = False

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never run, with the numbers, or None."""
        total = request.prompt_tokens + request.max_tokens
        if total > self._max_context_tokens:
            return (
                f"prompt {request.prompt_tokens} + max_tokens {request.max_tokens} = {total} tokens, "
                f"the context holds {self._max_context_tokens}"
            )
        if not self.blocks.can_ever_hold(request.num_kv_positions):
            needed = self.blocks.groups_for(request.num_kv_positions) * self.blocks.planes
            return (
                f"it needs {needed} KV blocks ({request.num_kv_positions} positions), the pool has "
                f"{self.blocks.total_blocks}"
            )
        return None

    def enqueue(self, request: Request) -> None:
        """Put a request that `refusal` accepts into the waiting queue."""
        self.waiting.push(request)
        self._may_admit = True

    def allocate(self) -> TransferPlan | None:
        """Give out blocks and places before a selection: to those who run first, then to those who wait; None
        when nothing changes.

        Whatever changes here leaves somebody with work to schedule, so a batch is formed after it.
        """
        if not (self._grows or self._may_admit):
            return None
        plan = TransferPlan()
        if self._grows:
            self._grow(plan)
        if self._may_admit and not (plan.is_short or plan.preemptions):
            self._admit(plan)
        if plan.allocations or plan.preemptions:
            self._reorder()
        self.swapped_bytes += plan.swapped_bytes
        return plan

    def _grow(self, plan: TransferPlan) -> None:
        """Blocks for the next step of everyone who runs, first in order first."""
        blocks = self.blocks
        for at, state in enumerate(self.order):
            missing = blocks.groups_for(state.next_kv_positions) - len(state.block_groups)
            if missing <= 0 or state.request_id not in self.running:
                continue
            later = self.order[:at:-1]  # those after it, the last in order first
            if plan.is_short or (
                missing > blocks.free_groups
                and not self._make_room(plan, Need(missing - blocks.free_groups), later)
            ):
                plan.is_short = True
                plan.withheld.add(state.request_id)
                continue
            first_group = len(state.block_groups)
            groups = blocks.allocate(state.request_id, state.next_kv_positions)
            state.block_groups.extend(groups)
            plan.growths.append(Growth(state.request_id, first_group, groups))

    def _admit(self, plan: TransferPlan) -> None:
        """Let waiting requests in while places, rings and blocks last."""
        while True:
            if self._yields_to_priority and not self._make_room_for_head(plan):
                return
            if len(self.running) == self._settings.max_num_seqs:
                break
            request = self.waiting.pop_admissible(self._fits)
            if request is None:
                break
            self._start(plan, request)
            if plan.preemptions:
                return
        self._may_admit = False

    def _fits(self, request: Request) -> bool:
        return self._missing_to_start(request, self._reusable(request)) <= 0

    @property
    def _reserve(self) -> int:
        """Groups that an admission leaves free, so that those who run can grow: none when nobody does."""
        return self._watermark_groups if self.running else 0

    def _missing_to_start(self, request: Request, reused: Sequence[int]) -> int:
        """Groups that must become free before `request` can be let in, beside those that it reuses; 0 or less
        when it can now.

        It gets all it can ever need, or what its first step and its swapped K/V need. A group that it reuses
        and nobody holds is free now and will not be.
        """
        blocks = self.blocks
        preempted = self._preempted.get(request.request_id)
        if not self._grows:
            groups = blocks.groups_for(request.num_kv_positions)
        elif preempted is not None and preempted.num_swapped_groups is not None:
            groups = max(blocks.groups_for(preempted.state.next_kv_positions), preempted.num_swapped_groups)
        else:
            prompt_tokens = request.prompt_tokens if preempted is None else preempted.state.prompt_tokens
            groups = blocks.groups_for(
                min(len(reused) * blocks.block_size + self._settings.chunk_tokens, prompt_tokens)
            )
        taken = groups - sum(1 for group in reused if blocks.references(group))
        return taken + self._reserve - blocks.free_groups

    def _reusable(self, request: Request) -> Sequence[int]:
        """Published groups that `request` begins with when it is let in: none when its own K/V come back from
        host memory."""
        preempted = self._preempted.get(request.request_id)
        if preempted is None:
            return self.prefixes.reusable(request, request.prompt_tokens)
        return (
            self.prefixes.reusable(request, preempted.state.prompt_tokens)
            if preempted.num_swapped_groups is None
            else ()
        )

    def _make_room_for_head(self, plan: TransferPlan) -> bool:
        """Preempt requests of strictly lower priority for the first that waits; False when it has to wait for
        them."""
        head = self.waiting.head()
        if head is None:
            return True
        places = 1 if len(self.running) == self._settings.max_num_seqs else 0
        reused = self._reusable(head)
        groups = self._missing_to_start(head, reused)
        if places or groups > 0:
            lower = [state for state in reversed(self.order) if state.priority > head.priority]
            self._make_room(plan, Need(groups, places, frozenset(reused)), lower)
        return not plan.withheld

    def _make_room(self, plan: TransferPlan, need: Need, candidates: Iterable[RequestState]) -> bool:
        """Preempt `candidates`, in their order, until `need` is met; False when it is not yet, or never by
        them.

        Who has just got blocks, or waits for some, keeps what it has.
        """
        kept = plan.withheld.union(growth.request_id for growth in plan.growths)
        candidates = [
            c
            for c in candidates
            if c.request_id in self.running and c.request_id not in kept and not c.is_ended
        ]
        choice = choose(need, self.draining, candidates, self.collected_seq, self.blocks)
        for state in choice.victims:
            self._preempt(plan, state)
        plan.withheld.update(state.request_id for state in choice.withheld)
        return bool(choice.victims)

    def _preempt(self, plan: TransferPlan, state: RequestState) -> None:
        """Take everything from a request and put it back among the waiting, with its generated tokens kept.

        Its unfinished chunks are begun again in any case. Under `swap` the rest of its K/V goes to host
        memory, or is computed again when there is no room for it.
        """
        self.hidden_rows -= state.prompt.num_resident_rows
        state.prompt.rewind()
        count = self.blocks.groups_for(state.num_stored_positions)
        swaps = self._preempted.can_swap(count)
        groups = tuple(state.block_groups[:count]) if swaps else ()
        if swaps:
            plan.swapped_bytes += self._preempted.swap_bytes(count)
        else:
            state.start_again(self._prompt_progress(state.request.prompt_tokens + state.num_output_tokens, 0))
        plan.preemptions.append(Preemption(state.request_id, state.ring_id, swaps, groups))
        self._preempted.add(state, count if swaps else None)
        self._give_back(state)
        self.waiting.push(state.request)
        self._may_admit = True

    def _start(self, plan: TransferPlan, request: Request) -> None:
        """Give `request` its blocks and a ring, and let it run from its beginning or from where it was
        preempted."""
        reused = self._reusable(request)
        preempted = self._preempted.take(request.request_id)
        positions = request.num_kv_positions
        swapped = 0
        if preempted is not None and preempted.num_swapped_groups is not None:
            state = preempted.state
            swapped = preempted.num_swapped_groups
            state.published(0)
            plan.swapped_bytes += self._preempted.swap_bytes(swapped)
        else:
            prompt_tokens = request.prompt_tokens if preempted is None else preempted.state.prompt_tokens
            prompt = self._prompt_progress(prompt_tokens, len(reused) * self.blocks.block_size)
            if preempted is None:
                state = RequestState(request, prompt)
            else:
                state = preempted.state
                state.start_again(prompt)
            self.prefixes.started(state, len(reused))
        if self._grows:
            positions = max(state.next_kv_positions, swapped * self.blocks.block_size)
        groups = self.blocks.allocate(request.request_id, positions, reused)
        state.placed(self.rings.allocate(), list(groups))
        self.running[request.request_id] = state
        kept_tokens = state.prompt_tokens - request.prompt_tokens
        plan.allocations.append(
            Allocation(
                request,
                groups,
                state.ring_id,
                preempted is not None,
                kept_tokens,
                swapped,
                len(reused),
            )
        )

    def _prompt_progress(self, prompt_tokens: int, origin: int) -> PromptProgress:
        chunk_tokens, num_slots = self._settings.chunk_tokens, self.rings.slots_per_ring
        return PromptProgress(prompt_tokens, chunk_tokens, self._num_loops, num_slots, origin)

    def publish(self, state: RequestState, end: int) -> None:
        """The prompt of `state` has been through all depths up to `end`, and that is collected."""
        if self.prefixes.publish(state, end) and len(self.waiting):
            self._may_admit = True

    def cancel(self, request_id: int) -> RequestState | None:
        """End a waiting, preempted or running request; return its state, None when it never ran."""
        state = self.running.get(request_id)
        if state is not None:
            self.end(state)
            self.release_drained()
            return state
        self.waiting.withdraw(request_id)
        self._may_admit = True
        preempted = self._preempted.take(request_id)
        if preempted is None:
            self.prefixes.forget(request_id)
            return None
        self._forget(request_id)
        return preempted.state

    def end(self, state: RequestState) -> None:
        """Nothing of `state` is scheduled any more; it drains."""
        state.ended()
        self.draining.append(state)

    def collected(self, seq: int) -> None:
        """Batch `seq` is collected: whoever it touched last may be preempted now."""
        self.collected_seq = seq
        if self._yields_to_priority and len(self.waiting):
            self._may_admit = True

    def release_drained(self) -> None:
        """Take back what ended requests hold, of those that no submitted batch touches any more."""
        remaining = []
        for state in self.draining:
            if state.last_seq > self.collected_seq:
                remaining.append(state)
                continue
            self.hidden_rows -= state.prompt.num_resident_rows
            self._give_back(state)
            self._forget(state.request_id)
            self._may_admit = True
        if len(remaining) < len(self.draining):
            self._reorder()
            self.check_counts()
        self.draining = remaining

    def transfers(self, plan: TransferPlan | None) -> Transfers:
        """What was transferred since the batch before, for the batch that is formed now after `plan`."""
        if plan is None and not self._released:
            return NO_TRANSFERS
        released = tuple(self._released)
        self._released.clear()
        if plan is None:
            return Transfers(released=released)
        return Transfers(
            tuple(plan.preemptions),
            tuple(plan.allocations),
            tuple(plan.growths),
            released,
            plan.swapped_bytes,
        )

    def _forget(self, request_id: int) -> None:
        self._released.append(request_id)
        self.prefixes.forget(request_id)

    def _give_back(self, state: RequestState) -> None:
        self.blocks.release(state.request_id)
        self.rings.release(state.ring_id)
        state.released()
        del self.running[state.request_id]

    def _reorder(self) -> None:
        self.order = tuple(
            sorted(
                self.running.values(),
                key=lambda state: (state.priority if self._by_priority else 0, state.order),
            )
        )

    def check_integrity(self) -> None:
        """Raise `InvariantError` unless blocks, rings and running requests account for one another, id by
        id."""
        self.blocks.check_integrity()
        self.rings.check_integrity()
        self.check_counts()

    def check_counts(self) -> None:
        """Invariant 4 by numbers only: cheap enough for every release."""
        held = sum(len(state.block_groups) for state in self.running.values())
        counted = self.blocks.num_references
        if held != counted:
            planes = self.blocks.planes
            raise InvariantError(
                f"invariant 4: running requests hold {held * planes} blocks, the ledger counts "
                f"{counted * planes}"
            )

    def leftovers(self, num_in_flight: int) -> dict[str, int]:
        """What is still held, waiting or submitted, by name: all zero at the end of a run."""
        return {
            "requests running": len(self.running),
            "requests waiting": len(self.waiting),
            "requests preempted": len(self._preempted),
            "batches in flight": num_in_flight,
            "blocks held": self.blocks.used_blocks,
            "ring slots held": self.rings.used_slots,
            "hidden rows held": self.hidden_rows,
            "groups in host memory": self._preempted.num_swapped_groups,
        }
