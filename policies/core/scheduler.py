"""The scheduler: admits, asks the policy, validates its answer, commits it, and applies what the device reports back.

Owns every request's state and both ledgers. Plan, then commit: a selection is checked whole before anything moves, so a wrong
proposal leaves no trace. Knows no clock and no device; `policies.core.engine` drives it.
"""

from collections import deque

from policies.core.admission import AdmissionQueue
from policies.core.batch import Allocation, ExecutionBatch, ScheduledRange, Selection, Stage
from policies.core.errors import InputError, InvariantError, SelectionError, StuckError
from policies.core.events import Completion
from policies.core.exits import ExitSettings
from policies.core.frontier import PromptProgress
from policies.core.kv import BlockLedger
from policies.core.model import ModelShape
from policies.core.policy import Policy
from policies.core.request import Phase, Request, RequestState
from policies.core.ring import RingLedger
from policies.core.settings import CacheSettings, SchedulerSettings
from policies.core.validation import validate
from policies.core.view import View

NO_EARLY_EXIT = ExitSettings()


class Scheduler:
    """State of all waiting and running requests under one policy.

    `cache.num_blocks` must be set. Raises `InputError` at construction when policy, model and cache do not go together.
    """

    def __init__(
        self,
        policy: Policy,
        model: ModelShape,
        settings: SchedulerSettings,
        cache: CacheSettings,
        exits: ExitSettings = NO_EARLY_EXIT,
    ) -> None:
        policy.check(model, settings, cache)
        assert cache.num_blocks is not None, "the backend sizes the KV pool before a run"
        self.policy = policy
        self.settings = settings
        self.num_loops = model.num_loops
        self.exits = exits.rule(model.num_loops)
        if self.exits.has_decisions and settings.inflight > 2:
            raise InputError(
                f"scheduler.inflight: {settings.inflight} with early exits, expected 1 or 2: a third batch could already hold the "
                "successor of a token that has left"
            )
        self.max_context_tokens = model.max_context_tokens
        self.blocks = BlockLedger(cache.num_blocks, cache.block_size, model.num_loops if cache.layout == "last_exited" else 1)
        self.rings = RingLedger(settings.max_num_seqs, policy.resident_chunks(model.num_loops))
        self.waiting = AdmissionQueue(settings.admission, settings.admission_scan_limit, settings.max_admission_bypasses)
        self.running: dict[int, RequestState] = {}
        self.surplus_rows = 0
        self.peak_hidden_rows = 0
        self.tokens_by_loops = [0] * (model.num_loops + 1)
        self._hidden_rows = 0
        self._order: tuple[RequestState, ...] = ()
        self._draining: list[RequestState] = []
        self._next_seq = 0
        self._collected_seq = -1
        self._in_flight: deque[ExecutionBatch] = deque()
        self._surplus_until = -1
        self._may_admit = False
        self._view = View()
        self._view.limits = settings
        self._view.num_loops = model.num_loops
        self._view.exits = self.exits
        self._view.prompt_batches_since_decode = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never run, with the numbers, or None."""
        total = request.prompt_tokens + request.max_tokens
        if total > self.max_context_tokens:
            return (
                f"prompt {request.prompt_tokens} + max_tokens {request.max_tokens} = {total} tokens, "
                f"the context holds {self.max_context_tokens}"
            )
        if not self.blocks.can_ever_hold(request.num_kv_positions):
            needed = self.blocks.groups_for(request.num_kv_positions) * self.blocks.planes
            return f"it needs {needed} KV blocks ({request.num_kv_positions} positions), the pool has {self.blocks.total_blocks}"
        return None

    def enqueue(self, request: Request) -> None:
        """Put a request that `refusal` accepts into the waiting queue."""
        self.waiting.push(request)
        self._may_admit = True

    def cancel(self, request_id: int) -> RequestState | None:
        """End a waiting or running request whose client has hung up; return its state, None when it only waited.

        Nothing of it is scheduled any more. What it holds returns when no submitted batch touches it: now, or when the last one
        that does is collected.
        """
        state = self.running.get(request_id)
        if state is None:
            self.waiting.withdraw(request_id)
            self._may_admit = True
            return None
        self._end(state)
        self._release_drained()
        return state

    def form_batch(self, now_ns: int) -> ExecutionBatch | None:
        """Admit, select, validate, commit; None when no running request has anything left to schedule.

        Raises `SelectionError` for a wrong proposal and `StuckError` when the policy passes over ready work.
        """
        allocations = self._admit()
        if not self._order:
            return None
        view = self._view
        view.now_ns = now_ns
        view.bucket(self._order)
        view.free_blocks = self.blocks.free_blocks
        view.free_ring_slots = self.rings.free_slots
        selection = self.policy.select(view)
        if selection is None:
            stuck = [request for request in self._order if request.phase is not Phase.DRAINED]
            if stuck:
                raise StuckError(
                    f"invariant 9: policy {self.policy.name} formed no batch at {now_ns} ns with ready work of {len(stuck)} "
                    f"requests: {'; '.join(str(request) for request in stuck[:8])}"
                )
            return None
        try:
            rows, num_requests = validate(selection, self.running, self.settings, self.num_loops, self.exits)
        except SelectionError as error:
            raise SelectionError(f"policy {self.policy.name}: {error}") from None
        seq = self._next_seq
        self._next_seq = seq + 1
        self._commit(selection, seq, now_ns)
        batch = ExecutionBatch(
            seq,
            selection.stage,
            selection.loop_count,
            selection.ranges,
            rows,
            num_requests,
            now_ns,
            self._collected_seq,
            allocations,
        )
        self._in_flight.append(batch)
        return batch

    def _admit(self) -> tuple[Allocation, ...]:
        """Let waiting requests in while places, rings and blocks last."""
        if not self._may_admit:
            return ()
        allocations = []
        while len(self.running) < self.settings.max_num_seqs:
            request = self.waiting.pop_admissible(lambda candidate: self.blocks.can_allocate(candidate.num_kv_positions))
            if request is None:
                break
            groups = self.blocks.allocate(request.request_id, request.num_kv_positions)
            prompt = PromptProgress(request.prompt_tokens, self.settings.chunk_tokens, self.num_loops, self.rings.slots_per_ring)
            state = RequestState(request, prompt, groups, self.rings.allocate())
            self.running[request.request_id] = state
            allocations.append(Allocation(request.request_id, groups, state.ring_id))
        self._may_admit = False
        if allocations:
            self._reorder()
        return tuple(allocations)

    def _reorder(self) -> None:
        by_priority = self.settings.admission == "priority"
        self._order = tuple(
            sorted(self.running.values(), key=lambda request: (request.priority if by_priority else 0, request.order))
        )

    def _commit(self, selection: Selection, seq: int, now_ns: int) -> None:
        loops, max_loops, running = selection.loop_count, self.exits.max_loops, self.running
        has_prompt = has_decode = False
        for item in selection.ranges:
            state = running[item[0]]
            stage = item[1]
            if state.last_seq < 0:
                state.first_scheduled_ns = now_ns
            state.last_seq = seq
            if stage is Stage.RECURRENT:
                has_decode = True
                state.depth += loops
                if state.depth == max_loops:
                    state.phase = Phase.CODA
                    state.depth = max_loops % self.num_loops
            elif stage is Stage.CODA:
                state.num_scheduled_outputs += 1
                state.position += 1
                state.depth = 0
                state.phase = Phase.DRAINED if state.num_scheduled_outputs == state.max_tokens else Phase.PRELUDE
            elif stage is Stage.PRELUDE:
                state.phase = Phase.RECURRENT
            else:
                has_prompt = True
                self._commit_prompt(state, item, loops)
        if has_decode:
            self._view.prompt_batches_since_decode = 0
        elif has_prompt and loops:
            self._view.prompt_batches_since_decode += 1

    def _commit_prompt(self, state: RequestState, item: ScheduledRange, loops: int) -> None:
        prompt = state.prompt
        rows_before = prompt.num_resident_rows
        if item.stage is Stage.PREFILLING_PRELUDE:
            prompt.stage(item.token_count)
        else:
            prompt.advance(item.depth, item.token_count, loops, item.embeds)
        self._hidden_rows += prompt.num_resident_rows - rows_before
        self.peak_hidden_rows = max(self.peak_hidden_rows, self._hidden_rows)
        if not prompt.is_ordered():
            raise InvariantError(f"invariant 1: frontiers of request {item.request_id} out of order: {prompt}")
        self.rings.set_used(state.ring_id, prompt.num_resident_chunks)
        if prompt.is_complete:
            state.phase = Phase.CODA
            state.position = state.prompt_tokens - 1

    def collect(self, completion: Completion) -> list[tuple[RequestState, bool]]:
        """Apply what the device reports for the oldest submitted batch; return (request, has ended) for every token delivered.

        Raises `InvariantError` when completions come out of order. A token sampled for a request that has already ended is
        surplus: counted, never delivered. Blocks and rings return only when no submitted batch touches the request any more.
        """
        if not self._in_flight:
            raise InvariantError(f"invariant 6: batch {completion.seq} completed, none is in flight")
        batch = self._in_flight.popleft()
        if completion.seq != batch.seq:
            raise InvariantError(f"invariant 6: batch {completion.seq} completed, the oldest submitted one is {batch.seq}")
        self._collected_seq = batch.seq
        delivered = []
        if self._draining or batch.seq <= self._surplus_until:
            for item in batch.ranges:
                state = self.running[item.request_id]
                if state.is_ended or batch.seq <= state.surplus_until:
                    self.surplus_rows += item.token_count
        if completion.exits:
            self._apply_exits(batch, completion.exits)
        if batch.stage is Stage.CODA:
            for item in batch.ranges:
                state = self.running[item.request_id]
                if state.is_ended:
                    continue
                state.num_output_tokens += 1
                if item.token_start >= state.prompt_tokens:
                    self.tokens_by_loops[item.depth or self.num_loops] += 1
                has_ended = state.num_output_tokens == state.max_tokens or item.request_id in completion.stops
                if has_ended:
                    self._end(state)
                delivered.append((state, has_ended))
        if self._draining:
            self._release_drained()
        return delivered

    def _end(self, state: RequestState) -> None:
        state.is_ended = True
        state.phase = Phase.DRAINED
        self._draining.append(state)

    def _apply_exits(self, batch: ExecutionBatch, exits: frozenset[int]) -> None:
        """Send the tokens that have left on to CODA. A row of theirs that a later batch already holds is surplus.

        Raises `InvariantError` for an exit where the batch has no row that may leave.
        """
        found = 0
        for item in batch.ranges:
            if item.request_id not in exits:
                continue
            state, loops = self.running[item.request_id], item.depth + batch.loop_count
            may_leave = item.stage is Stage.RECURRENT and batch.seq > state.surplus_until
            if not (may_leave and self.exits.has_decisions and self.exits.min_loops <= loops < self.exits.max_loops):
                raise InvariantError(f"invariant 2: batch {batch.seq} reports an exit of {item}, which may not leave there")
            found += 1
            if state.is_ended:
                continue
            state.phase = Phase.CODA
            state.depth = loops
            if state.last_seq > batch.seq:
                state.surplus_until = self._surplus_until = state.last_seq
        if found < len(exits):
            raise InvariantError(f"invariant 2: batch {batch.seq} reports exits of {sorted(exits)}, it has rows of {found} of them")

    def _release_drained(self) -> None:
        remaining = []
        for state in self._draining:
            if state.last_seq > self._collected_seq:
                remaining.append(state)
                continue
            self.blocks.release(state.request_id)
            self.rings.release(state.ring_id)
            self._hidden_rows -= state.prompt.num_resident_rows
            del self.running[state.request_id]
            self._may_admit = True
        if len(remaining) < len(self._draining):
            self._reorder()
            self._check_counts()
        self._draining = remaining

    def check_integrity(self) -> None:
        """Raise `InvariantError` unless blocks, rings and running requests account for one another, id by id."""
        self.blocks.check_integrity()
        self.rings.check_integrity()
        self._check_counts()

    def _check_counts(self) -> None:
        """Invariant 4 by numbers only: cheap enough for every release."""
        held = sum(len(state.block_groups) for state in self.running.values()) * self.blocks.planes
        if held != self.blocks.used_blocks:
            raise InvariantError(f"invariant 4: running requests hold {held} blocks, the ledger counts {self.blocks.used_blocks}")

    def check_drained(self) -> None:
        """Raise `InvariantError` unless nothing is running, waiting, in flight or allocated: the state every run must end in."""
        self.check_integrity()
        left = {
            "requests running": len(self.running),
            "requests waiting": len(self.waiting),
            "batches in flight": len(self._in_flight),
            "blocks held": self.blocks.used_blocks,
            "ring slots held": self.rings.used_slots,
        }
        if any(left.values()):
            raise InvariantError(f"invariant 7: the run ended with {', '.join(f'{count} {what}' for what, count in left.items())}")
