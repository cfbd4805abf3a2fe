"""The scheduler: asks the policy, validates its answer, commits it, and applies what the device reports back.

Owns the progress of every request; who is in and holds what is the business of `policies.core.memory`. Plan,
then commit: a selection is checked whole before any frontier moves. Knows no clock and no device;
`policies.core.engine.engine` drives it.
"""

from collections import deque
from collections.abc import Sequence

from policies.core.engine.handover import Handover
from policies.core.engine.rhythm import Rhythm
from policies.core.engine.validation import derive
from policies.core.engine.walk import Moment
from policies.core.errors import InputError, InvariantError, SelectionError, StuckError
from policies.core.memory.allocator import Allocator
from policies.core.memory.plan import TransferPlan
from policies.core.memory.residents import Residents
from policies.core.models.shape import ModelShape
from policies.core.progress.guesses import GuessTotals
from policies.core.progress.rows import by_row
from policies.core.progress.state import RequestState
from policies.core.seam.batch import HEADS, PROMPT_STAGES, ExecutionBatch, ScheduledRange, Stage, Work
from policies.core.seam.events import Completion
from policies.core.seam.exits import ExitSettings
from policies.core.seam.guesses import NO_GUESSES, SpeculationSettings
from policies.core.seam.policy import Policy
from policies.core.seam.request import (
    CODA,
    GUESSING,
    PRELUDE,
    PROMPT,
    RECURRENT,
    Phase,
    Request,
    Role,
)  # fmt: skip
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.core.seam.view import ByPhase, Members, View, by_phase

NO_EARLY_EXIT = ExitSettings()
NOTHING_TO_SCHEDULE = (Phase.DRAINED, Phase.UNDECIDED, Phase.TRANSFER)


class Scheduler:
    """State of all waiting and running requests under one policy.

    `cache.num_blocks` must be set. Raises `InputError` at construction when policy, model and cache do not go
    together.
    """

    def __init__(
        self,
        policy: Policy,
        model: ModelShape,
        settings: SchedulerSettings,
        cache: CacheSettings,
        exits: ExitSettings = NO_EARLY_EXIT,
        role: Role = "whole",
        speculation: SpeculationSettings = NO_GUESSES,
    ) -> None:
        policy.check(model, settings, cache)
        self.policy = policy
        self.settings = settings
        self.num_loops = model.num_loops
        self.exits = speculation.rule(exits, model, policy, cache)
        if self.exits.min_loops < model.num_loops and cache.may_recompute:
            raise InputError(
                f"cache.preemption: {cache.preemption} may compute generated tokens again at full depth, so "
                f"their K/V would not be those of exit.mode {exits.mode}; expected swap without "
                "cache.swap_blocks, off, or exit.mode fixed"
            )
        self.max_context_tokens = model.max_context_tokens
        chunks = policy.resident_chunks(model.num_loops)
        self.residents = Residents(
            model,
            settings,
            cache,
            chunks,
            self.exits if self.exits.draft_loops else None,
            policy.admission_rank,
        )
        self.allocator = Allocator(self.residents, cache, settings.max_num_seqs)
        self.blocks = self.residents.blocks
        self.rings = self.residents.rings
        self.waiting = self.residents.waiting
        self.running = self.residents.running
        self.peak_hidden_rows = 0
        self.tokens_by_loops = [0] * (model.num_loops + 1)
        self.guesses = GuessTotals.of(self.exits)
        self.next_seq = 0
        self._device_free_ns = 0
        self._select = policy.chooser(model)
        self.in_flight: deque[ExecutionBatch] = deque()
        """Batches formed and not yet collected, the oldest first."""
        self._surplus_until = -1
        self.handover = Handover(role, self.residents)
        self._sends, self._imports = role == "prefill", role == "decode"
        self._publishes = cache.prefix_caching or self._sends
        self._plan: TransferPlan | None = None
        """What was given out since the last batch was formed."""
        self.prompt_batches_since_decode = 0
        self._has_planes = self.blocks.planes > 1
        self.rhythm: Rhythm | None = None
        if policy.repeats and not self.exits.has_decisions and not self.exits.draft_loops:
            self.rhythm = Rhythm(settings, self.exits, model.num_loops, self._has_planes)

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def surplus_rows(self) -> int:
        return self.residents.surplus_rows

    @property
    def lacks(self) -> str | None:
        """What whoever still waits after a batch was formed waits for: `places` when all are taken, else room
        in the `kv` pool; None when nobody does."""
        if not len(self.waiting):
            return None
        return "places" if len(self.running) == self.settings.max_num_seqs else "kv"

    def refusal(self, request: Request) -> str | None:
        """Why `request` can never run, with the numbers, or None."""
        return self.residents.refusal(request)

    def enqueue(self, request: Request) -> None:
        """Put a request that `refusal` accepts into the waiting queue."""
        self.residents.enqueue(request)

    def cancel(self, request_id: int) -> RequestState | None:
        """End a request whose client has hung up, wherever it is; return its state, None when it never ran.

        Nothing of it is scheduled any more. What it holds returns when no submitted batch touches it: now, or
        when the last one that does is collected.
        """
        self.handover.forget(request_id)
        return self.residents.cancel(request_id)

    def reserve(self) -> TransferPlan | None:
        """Give out room; return all that was given out since the last batch, which the next one carries
        (None: nothing)."""
        plan, before = self.allocator.allocate(), self._plan
        if plan is not None:
            for item in plan.allocations:
                self.running[item.request_id].admitted(self.next_seq)
            if self._imports:
                self.handover.came_in(plan)
        if before is not None:
            plan = before.followed_by(plan, self.running)
        self._plan = plan
        return plan

    def form_batch(self, now_ns: int) -> ExecutionBatch | None:
        """Give out room, select, validate, commit; None when no running request has anything left to
        schedule.

        Raises `SelectionError` for a wrong proposal and `StuckError` when the policy passes over ready work.
        """
        plan = self.reserve()
        order = self.residents.order
        if plan is not None and plan.withheld:
            order = tuple([state for state in order if state.request_id not in plan.withheld])
        if not order:
            return None
        members: ByPhase = by_phase(order)
        drafts: Members = ()
        if self.exits.draft_loops:
            prompts, codas, looping, drafts = by_row(order)
            members = (prompts, (), codas, looping)
        view = View(
            now_ns,
            self.settings,
            self.num_loops,
            self.exits,
            order,
            *members,
            self.prompt_batches_since_decode,
            self.blocks.free_blocks,
            self.rings.free_slots,
            self.next_seq,
            tuple(self.in_flight),
            self._device_free_ns,
            drafts,
        )
        selection = self._select(view)
        if selection is None:
            stuck = [request for request in order if request.phase not in NOTHING_TO_SCHEDULE]
            if stuck:
                raise StuckError(
                    f"invariant 9: policy {self.policy.name} formed no batch at {now_ns} ns with ready work "
                    f"of {len(stuck)} requests: {'; '.join(str(request) for request in stuck[:8])}"
                )
            return None
        try:
            work = derive(
                selection, self.running, self.settings, self.num_loops, self.exits, self._has_planes
            )
            if plan is not None:
                self._check_room(work)
        except SelectionError as error:
            raise SelectionError(f"policy {self.policy.name}: {error}") from None
        seq = self.next_seq
        self.next_seq = seq + 1
        self.commit(work, seq, now_ns)
        after_seq = self.residents.collected_seq
        batch = ExecutionBatch(seq, work, now_ns, after_seq, self.residents.transfers(plan))
        self._plan = None
        self.in_flight.append(batch)
        if self.rhythm is not None:
            self.rhythm.learn(work)
        return batch

    @property
    def is_settled(self) -> bool:
        """Whether what is given out, published or sent does not depend on what is collected next, or decided
        next, before somebody arrives or ends."""
        if self._plan is not None or not self.residents.is_settled:
            return False
        if not self._publishes:
            return True
        return not any([state.phase is PROMPT for state in self.residents.order]) and not any(
            [item.stage in PROMPT_STAGES for batch in self.in_flight for item in batch.ranges]
        )

    def advance(self, state: RequestState, frontiers: Sequence[int], staged: int) -> None:
        """A prompt has come so far in batches that were formed at once."""
        prompt, residents = state.prompt, self.residents
        rows_before = prompt.num_resident_rows
        prompt.moved_on(frontiers, staged)
        residents.hidden_rows += prompt.num_resident_rows - rows_before
        self._check_prompt(state)

    def formed(self, count: int, left: list[ExecutionBatch], moment: Moment, has_turned: bool) -> None:
        """`count` batches were formed at once, up to `moment`; the last of them, `left`, will be in flight
        behind those that are. `has_turned` says that decode rows ran before it."""
        self.next_seq += count
        self.peak_hidden_rows = max(self.peak_hidden_rows, self.residents.hidden_rows + moment.peak_rows)
        self.in_flight += left
        self.prompt_batches_since_decode = 0 if has_turned else moment.since_decode

    def _check_room(self, work: Work) -> None:
        """Raise `SelectionError` for a range whose tokens have no K/V blocks yet: a policy may only propose
        what its view holds."""
        for item in work.ranges if work.loop_count else ():
            room = len(self.running[item.request_id].block_groups) * self.blocks.block_size
            if item.token_end > room:
                raise SelectionError(f"{item} has K/V blocks up to token {room} only")

    def commit(self, work: Work, seq: int, now_ns: int) -> None:
        """Take the steps of valid work: what each of its rows does follows from its request's phase."""
        loops, running, exits = work.loop_count, self.running, self.exits
        collected_seq = self.residents.collected_seq
        has_prompt = has_decode = False
        for item in work.ranges:
            state = running[item.request_id]
            phase = state.phase
            if phase is RECURRENT:
                has_decode = True
                depth = state.depth + loops
                if depth == exits.max_loops:
                    # A token that runs all loops of the model skips none, whatever exit.max_loops says.
                    first_skipped = 0 if depth == self.num_loops else depth
                    state.looped_out(seq, first_skipped, state.undecided_until <= collected_seq)
                else:
                    if exits.has_decisions and depth >= exits.min_loops:
                        state.decides(seq)
                    state.looped(seq, depth)
            elif phase is CODA:
                state.sampled(seq)
            elif phase is PRELUDE:
                state.embedded(seq)
            elif phase is GUESSING:
                has_decode |= loops > 0
                self._commit_token(state, item, loops, seq)
            else:
                has_prompt = True
                state.scheduled(seq, now_ns)
                self._commit_prompt(state, item, loops)
        if has_decode:
            self.prompt_batches_since_decode = 0
        elif has_prompt and loops:
            self.prompt_batches_since_decode += 1

    def _commit_token(self, state: RequestState, item: ScheduledRange, loops: int, seq: int) -> None:
        tokens = state.tokens
        assert tokens is not None
        if item.stage is Stage.RECURRENT:
            tokens.loop(item.token_start, loops)
        elif item.stage is Stage.DRAFT:
            tokens.guess(item.depth)
        else:
            tokens.sample()
        state.stepped(seq)

    def _commit_prompt(self, state: RequestState, item: ScheduledRange, loops: int) -> None:
        prompt = state.prompt
        residents = self.residents
        rows_before = prompt.num_resident_rows
        if item.stage is Stage.PREFILLING_PRELUDE:
            prompt.stage(item.token_count)
        else:
            prompt.advance(item.depth, item.token_count, loops, item.embeds)
        residents.hidden_rows += prompt.num_resident_rows - rows_before
        self.peak_hidden_rows = max(self.peak_hidden_rows, residents.hidden_rows)
        self._check_prompt(state)

    def _check_prompt(self, state: RequestState) -> None:
        """Account for the chunks of a prompt that has moved."""
        prompt = state.prompt
        if not prompt.is_ordered():
            raise InvariantError(
                f"invariant 1: frontiers of request {state.request_id} out of order: {prompt}"
            )
        self.rings.set_used(state.ring_id, prompt.num_resident_chunks)
        if prompt.is_complete and self._sends:
            state.awaits()
        elif prompt.is_complete:
            state.prompt_done()

    def collect(self, completion: Completion) -> tuple[ExecutionBatch, list[tuple[RequestState, bool]]]:
        """Apply what the device reports for the oldest submitted batch; return it with (request, has ended)
        for every token delivered.

        Raises `InvariantError` when completions come out of order. A token sampled for a request that has
        already ended is surplus: counted, never delivered. Blocks and rings return only when no submitted
        batch touches the request any more.
        """
        if not self.in_flight:
            raise InvariantError(f"invariant 6: batch {completion.seq} completed, none is in flight")
        batch = self.in_flight.popleft()
        if completion.seq != batch.seq:
            raise InvariantError(
                f"invariant 6: batch {completion.seq} completed, the oldest submitted one is {batch.seq}"
            )
        residents = self.residents
        residents.collected(batch.seq)
        self._device_free_ns = completion.finished_ns
        delivered: list[tuple[RequestState, bool]] = []
        if residents.draining or batch.seq <= self._surplus_until:
            for item in batch.ranges:
                state = self.running[item.request_id]
                if state.is_ended or batch.seq <= state.surplus_until:
                    residents.surplus_rows += item.token_count
        if self.exits.has_decisions:
            self._apply_exits(batch, completion.exits)
        if self._publishes and batch.loop_count:
            self._publish(batch)
        if self.exits.draft_loops:
            self._collect_tokens(batch, completion, delivered)
        elif batch.stage is Stage.CODA:
            running, stops = self.running, completion.stops
            for item in batch.ranges:
                state = running[item.request_id]
                if state.is_ended:
                    continue
                num_tokens = state.delivered()
                state.heard(completion.finished_ns)
                if item.token_start >= state.request.prompt_tokens:
                    self.tokens_by_loops[item.depth or self.num_loops] += 1
                has_ended = num_tokens == state.max_tokens or item.request_id in stops
                if has_ended:
                    residents.end(state)
                delivered.append((state, has_ended))
        if residents.draining:
            residents.release_drained()
        return batch, delivered

    def _collect_tokens(
        self, batch: ExecutionBatch, completion: Completion, delivered: list[tuple[RequestState, bool]]
    ) -> None:
        """`collect` where tokens are guessed: deliver true tokens up to the first that was not guessed
        rightly, and drop the rows behind that one.

        Raises `InvariantError` when a guess is refused that was not there to be checked.
        """
        residents, guesses, running = self.residents, self.guesses, self.running
        stands: list[tuple[ScheduledRange, RequestState]] = []
        last_rows: dict[int, int] = {}
        looping: set[int] = set()
        for item in batch.ranges:
            state = running[item.request_id]
            if item.stage in PROMPT_STAGES:
                continue
            if batch.loop_count:
                looping.add(item.request_id)
            if state.is_ended or batch.seq <= state.surplus_until:
                continue
            assert state.tokens is not None
            state.tokens.collected(item.token_start)
            if item.stage in HEADS:
                stands.append((item, state))
                last_rows[item.request_id] = item.token_start
        guesses.request_loops += len(looping) * batch.loop_count
        drafts = sum([item.stage is Stage.DRAFT for item in batch.ranges])
        if drafts:
            guesses.drafted(drafts, batch.rows, completion.finished_ns - completion.started_ns)
        for item, state in stands:
            tokens, position = state.tokens, item.token_start
            if state.is_ended or batch.seq <= state.surplus_until or tokens is None:
                continue  # behind a refused one of this batch, and counted with it
            is_refused = (item.request_id, position) in completion.refused
            if is_refused and item.stage is not Stage.VERIFY:
                raise InvariantError(
                    f"invariant 2: batch {batch.seq} refuses a guess at {item}, there is none"
                )
            num_tokens = state.delivered()
            state.heard(completion.finished_ns)
            if position >= state.request.prompt_tokens:
                self.tokens_by_loops[self.num_loops] += 1
            is_last_row = is_refused or position == last_rows[item.request_id]
            has_ended = num_tokens == state.max_tokens or (
                item.request_id in completion.stops and is_last_row
            )
            if has_ended:
                residents.surplus_rows += tokens.refuse()
                residents.end(state)
            else:
                if item.stage is Stage.VERIFY:
                    guesses.checked(item.depth, not is_refused)
                if is_refused:
                    residents.surplus_rows += state.guessed_wrong(batch.seq)
                    self._surplus_until = max(self._surplus_until, state.surplus_until)
                else:
                    tokens.settle()
            delivered.append((state, has_ended))

    def _apply_exits(self, batch: ExecutionBatch, exits: frozenset[int]) -> None:
        """Send the tokens that have left on to CODA, and those that waited at the last depth for `batch` to
        say so or not.

        Rows of tokens that have left in later batches are surplus. Raises `InvariantError` for an exit where
        no row may leave.
        """
        found = 0
        for item in batch.ranges:
            state, loops = self.running[item.request_id], item.depth + batch.loop_count
            if item.request_id not in exits:
                if state.phase is Phase.UNDECIDED and state.undecided_until == batch.seq:
                    state.stayed()
                continue
            may_leave = item.stage is Stage.RECURRENT and batch.seq > state.surplus_until
            if not (
                may_leave
                and self.exits.has_decisions
                and self.exits.min_loops <= loops < self.exits.max_loops
            ):
                raise InvariantError(
                    f"invariant 2: batch {batch.seq} reports an exit of {item}, which may not leave there"
                )
            found += 1
            if state.is_ended:
                continue
            state.left(loops, batch.seq)
            self._surplus_until = max(self._surplus_until, state.surplus_until)
        if found < len(exits):
            raise InvariantError(
                f"invariant 2: batch {batch.seq} reports exits of {sorted(exits)}, it has rows of {found} of "
                "them"
            )

    def _publish(self, batch: ExecutionBatch) -> None:
        """Tell which prompts have come through their last depth, now that `batch` is collected."""
        for item in batch.ranges:
            if item.stage in PROMPT_STAGES and item.depth + batch.loop_count == self.num_loops:
                state = self.running[item.request_id]
                if not state.is_ended:
                    self.residents.publish(state, item.token_end)
                    if self._sends:
                        self.handover.completed(state, item.token_end)

    def check_integrity(self) -> None:
        """Raise `InvariantError` unless blocks, rings and running requests account for one another, id by
        id."""
        self.residents.check_integrity()

    def check_drained(self) -> None:
        """Raise `InvariantError` unless nothing is running, waiting, in flight or allocated: the state every
        run must end in."""
        self.check_integrity()
        left = self.residents.leftovers(len(self.in_flight))
        if any(left.values()):
            raise InvariantError(
                "invariant 7: the run ended with "
                f"{', '.join(f'{count} {what}' for what, count in left.items())}"
            )
