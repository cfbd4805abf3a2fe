"""Who is in: running requests with the blocks and rings they hold, whoever waits, and whoever was preempted.

Owns both ledgers and moves what is held; who gets something, and from whom, is decided in `allocator.py`.
Knows no batch, no policy and no time; `policies.core.engine.scheduler` tells it what was scheduled and
collected.
"""

from collections.abc import Callable

from policies.core.errors import InvariantError
from policies.core.memory.admission import AdmissionQueue, ranking
from policies.core.memory.claims import Claim, Claims
from policies.core.memory.kv import BlockLedger
from policies.core.memory.plan import TransferPlan
from policies.core.memory.preempted import PreemptedRequests
from policies.core.memory.prefixes import Prefixes
from policies.core.memory.ring import RingLedger
from policies.core.models.shape import ModelShape
from policies.core.progress.frontier import PromptProgress
from policies.core.progress.state import RequestState
from policies.core.seam.batch import NO_TRANSFERS, Allocation, Preemption, Transfers
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import Phase, Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings


class Residents:
    """Running, waiting and preempted requests of one run, whose tokens are guessed by `guessing` (None: they
    are not), in the order of priority admission, where that is on, and `admission_rank`. `cache.num_blocks`
    must be set."""

    def __init__(
        self,
        model: ModelShape,
        settings: SchedulerSettings,
        cache: CacheSettings,
        slots_per_ring: int,
        guessing: ExitRule | None,
        admission_rank: Callable[[Request], int],
    ) -> None:
        assert cache.num_blocks is not None, "the backend sizes the KV pool before a run"
        planes = cache.planes(model.num_loops)
        self.blocks = BlockLedger(cache.num_blocks, cache.block_size, planes)
        self.prefixes = Prefixes(self.blocks, cache.prefix_caching)
        self.rings = RingLedger(settings.max_num_seqs, slots_per_ring)
        self.by_priority = settings.admission == "priority"
        self.rank_of = ranking(self.by_priority, admission_rank)
        self.waiting = AdmissionQueue(
            self.rank_of, settings.admission_scan_limit, settings.max_admission_bypasses
        )
        self.running: dict[int, RequestState] = {}
        self.order: tuple[RequestState, ...] = ()
        self.collected_seq = -1
        self.hidden_rows = 0
        self.swapped_bytes = 0
        self.surplus_rows = 0
        """Rows run for requests that had ended, tokens that had left the loop, and guesses that came to
        nothing."""
        self.yields_to_priority = self.by_priority and cache.preemption != "off"
        self.may_admit = False
        """Whether something has happened since nobody more could be let in that may let somebody in."""
        self._chunk_tokens = settings.chunk_tokens
        self._num_loops = model.num_loops
        self._max_context_tokens = model.max_context_tokens
        self._preempted = PreemptedRequests(
            model, cache, planes, 1 if guessing is None else 1 + guessing.max_guesses
        )
        self._guessing = guessing
        self.claims = Claims(cache, settings.chunk_tokens, self.blocks, self.prefixes, self._preempted)
        self.draining: list[RequestState] = []
        """Requests that have ended, whose blocks and rings a submitted batch may still touch."""
        self._released: list[int] = []
        self._unannounced: set[int] = set()
        """Requests that came in and that no batch has told a backend of."""

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
        self.may_admit = True

    @property
    def is_settled(self) -> bool:
        """Whether nobody can be let in, or goes, before somebody arrives or ends."""
        may_let_in = (self.may_admit or self.yields_to_priority) and len(self.waiting) > 0
        return not (may_let_in or self.draining)

    def preempt(self, plan: TransferPlan, state: RequestState) -> None:
        """Take everything from a request and put it back among the waiting, with its generated tokens kept.

        Its unfinished chunks are begun again in any case. Under `swap` the rest of its K/V goes to host
        memory, or is computed again when there is no room for it.
        """
        self.hidden_rows -= state.prompt.num_resident_rows
        state.prompt.rewind()
        self.surplus_rows += state.guesses_dropped()
        count = self.blocks.groups_for(state.num_stored_positions)
        # What goes comes before what comes back with the same batch: its room is not free yet.
        coming_back = sum([item.num_swapped_groups for item in plan.allocations])
        swaps = self._preempted.can_swap(count + coming_back)
        groups = tuple(state.block_groups[:count]) if swaps else ()
        if swaps:
            plan.swapped_bytes += self._preempted.swap_bytes(count)
        else:
            state.start_again(self._prompt_progress(state.request.prompt_tokens + state.num_output_tokens, 0))
        state.preempted()
        plan.preemptions.append(Preemption(state.request_id, state.ring_id, swaps, groups))
        self._preempted.add(state, count if swaps else None)
        self._give_back(state)
        self.waiting.push(state.request)
        self.may_admit = True

    def start(self, plan: TransferPlan, claim: Claim) -> None:
        """Give a waiting request its blocks and a ring, and let it run from its beginning or from where it
        was preempted."""
        request = claim.request
        state, swapped, num_reused = claim.state, claim.num_swapped_groups, len(claim.reused)
        self._preempted.take(request.request_id)
        if state is None or swapped is None:
            prompt = self._prompt_progress(claim.prompt_tokens, num_reused * self.blocks.block_size)
            if state is None:
                state = RequestState(request, prompt, self.rank_of(request), self._guessing)
            else:
                state.start_again(prompt)
            self.prefixes.started(state, num_reused, claim.state is not None)
        else:
            state.published(0)
            plan.swapped_bytes += self._preempted.swap_bytes(swapped)
        groups = self.blocks.allocate(request.request_id, claim.num_positions, claim.reused)
        state.placed(self.rings.allocate(), list(groups))
        self.running[request.request_id] = state
        self._unannounced.add(request.request_id)
        kept_tokens = state.prompt_tokens - request.prompt_tokens
        plan.allocations.append(
            Allocation(
                request,
                groups,
                state.ring_id,
                claim.state is not None,
                kept_tokens,
                swapped or 0,
                num_reused,
            )
        )

    def _prompt_progress(self, prompt_tokens: int, origin: int) -> PromptProgress:
        return PromptProgress(
            prompt_tokens, self._chunk_tokens, self._num_loops, self.rings.slots_per_ring, origin
        )

    def publish(self, state: RequestState, end: int) -> None:
        """The prompt of `state` has been through all depths up to `end`, and that is collected."""
        if self.prefixes.publish(state, end) and len(self.waiting):
            self.may_admit = True

    def cancel(self, request_id: int) -> RequestState | None:
        """End a waiting, preempted or running request; return its state, None when it never ran."""
        state = self.running.get(request_id)
        if state is not None:
            self.end(state)
            self.release_drained()
            return state
        self.waiting.withdraw(request_id)
        self.may_admit = True
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
        if self.yields_to_priority and len(self.waiting):
            self.may_admit = True

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
            self.may_admit = True
        if len(remaining) < len(self.draining):
            self.reorder()
            self.check_counts()
        self.draining = remaining

    def transfers(self, plan: TransferPlan | None) -> Transfers:
        """What was transferred since the batch before, for the batch that is formed now after `plan`."""
        if plan is None and not self._released:
            return NO_TRANSFERS
        released = tuple(self._released)
        self._released.clear()
        self._unannounced.clear()
        if plan is None:
            return Transfers(released=released)
        return Transfers(
            tuple(plan.preemptions),
            tuple(plan.allocations),
            tuple(plan.growths),
            released,
            plan.swapped_bytes,
        )

    def may_be_preempted(self, state: RequestState) -> bool:
        """Whether a backend knows of it, and no other engine counts on what it holds."""
        is_known = state.request_id not in self._unannounced
        return is_known and not state.is_ended and state.phase is not Phase.TRANSFER

    def _forget(self, request_id: int) -> None:
        if request_id in self._unannounced:
            self._unannounced.discard(request_id)
        else:
            self._released.append(request_id)
        self.prefixes.forget(request_id)

    def _give_back(self, state: RequestState) -> None:
        self.blocks.release(state.request_id)
        self.rings.release(state.ring_id)
        state.released()
        del self.running[state.request_id]

    def reorder(self) -> None:
        """Put those who run in order again: somebody came in or went."""
        self.order = tuple(sorted(self.running.values(), key=lambda state: state.rank))

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
