"""Who gets blocks and places before every selection, and who is preempted for it. Decides; what is held moves
in `residents.py`.

Under `allocation: incremental` a request begins with blocks for what is known of it, or for its first chunk,
and gets the others step by step. The first in order is served first; when blocks run out, those after it are
preempted, the last in order first. So the first in order always makes progress, and no run comes to a halt;
`pressure.py` says why nobody is preempted for ever. Order is `admission.Rank`.
"""

from collections.abc import Iterable

from policies.core.memory.claims import Claim
from policies.core.memory.plan import TransferPlan
from policies.core.memory.pressure import Need, choose, is_guarded, keeps_guards
from policies.core.memory.residents import Residents
from policies.core.progress.state import RequestState
from policies.core.seam.batch import Growth
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings


class Allocator:
    """Gives out what `residents` owns, at most `max_running` places, by the rules of `cache`."""

    def __init__(self, residents: Residents, cache: CacheSettings, max_running: int) -> None:
        self._residents = residents
        self._max_running = max_running
        self._grows = cache.allocation == "incremental"
        self._watermark_groups = int(cache.watermark * residents.blocks.num_groups) if self._grows else 0

    def allocate(self) -> TransferPlan | None:
        """Give out blocks and places: to those who run first, then to those who wait; None when nothing
        changes.

        Whatever changes here leaves somebody with work to schedule, so a batch is formed after it.
        """
        residents = self._residents
        if not (self._grows or residents.may_admit):
            return None
        plan = TransferPlan()
        if self._grows:
            self._grow(plan)
        if residents.may_admit and not (plan.is_short or plan.preemptions):
            self._admit(plan)
        if plan.allocations or plan.preemptions:
            residents.reorder()
        residents.swapped_bytes += plan.swapped_bytes
        return plan

    def num_tokens_ahead(self, state: RequestState) -> int:
        """How many tokens a request can make up to its last one, or one after which it needs a block; 0 or
        less when it needs one before."""
        tokens = state.max_tokens - state.num_scheduled_outputs
        if self._grows:
            room = len(state.block_groups) * self._residents.blocks.block_size
            tokens = min(tokens, room - state.num_known_positions + 1)
        return tokens

    def _grow(self, plan: TransferPlan) -> None:
        """Blocks for the next step of everyone who runs, first in order first."""
        residents, blocks = self._residents, self._residents.blocks
        for at, state in enumerate(residents.order):
            missing = blocks.groups_for(state.next_kv_positions) - len(state.block_groups)
            if missing <= 0 or state.request_id not in residents.running:
                continue
            later = residents.order[:at:-1]  # those after it, the last in order first
            if plan.is_short or (
                missing > blocks.free_groups
                and not self._make_room(plan, Need(missing - blocks.free_groups), state.priority, later)
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
        residents = self._residents
        while True:
            if residents.yields_to_priority and not self._make_room_for_head(plan):
                return
            if len(residents.running) == self._max_running:
                break
            request = residents.waiting.pop_admissible(self._fits)
            if request is None:
                break
            residents.start(plan, residents.claims.of(request))
            if plan.preemptions:
                return
        residents.may_admit = False

    def _fits(self, request: Request) -> bool:
        claim = self._residents.claims.of(request)
        return self._missing_groups(claim) <= 0 and self._keeps_guards(claim)

    def _missing_groups(self, claim: Claim) -> int:
        """Groups that must become free before `claim` can be met; 0 or less when it can now.

        A group that it reuses and somebody holds is not taken; one that nobody holds is free now and will not
        be. Beside others it leaves some free, so that they can grow.
        """
        blocks = self._residents.blocks
        taken = blocks.groups_for(claim.num_positions) - sum(
            1 for group in claim.reused if blocks.references(group)
        )
        reserve = self._watermark_groups if self._residents.running else 0
        return taken + reserve - blocks.free_groups

    def _keeps_guards(self, claim: Claim) -> bool:
        residents = self._residents
        return not self._grows or keeps_guards(
            claim.request,
            residents.rank_of(claim.request),
            claim.state,
            residents.running.values(),
            residents.blocks,
        )

    def _make_room_for_head(self, plan: TransferPlan) -> bool:
        """Preempt requests of strictly lower priority for the first that waits; False when it has to wait for
        them."""
        residents = self._residents
        head = residents.waiting.head()
        if head is None:
            return True
        places = 1 if len(residents.running) == self._max_running else 0
        claim = residents.claims.of(head)
        groups = self._missing_groups(claim)
        if (places or groups > 0) and self._keeps_guards(claim):
            lower = [state for state in reversed(residents.order) if state.priority > head.priority]
            self._make_room(plan, Need(groups, places, frozenset(claim.reused)), head.priority, lower)
        return not plan.withheld

    def _make_room(
        self, plan: TransferPlan, need: Need, priority: int, candidates: Iterable[RequestState]
    ) -> bool:
        """Preempt `candidates`, in their order, until `need` of one of `priority` is met; False when it is
        not yet, or never by them.

        Who has just got blocks, or waits for some, keeps what it has; so do the guarded among its equals.
        """
        residents = self._residents
        kept = plan.withheld.union(growth.request_id for growth in plan.growths)
        candidates = [
            state
            for state in candidates
            if state.request_id in residents.running
            and state.request_id not in kept
            and residents.may_be_preempted(state)
            and not (is_guarded(state) and (state.priority == priority or not residents.by_priority))
        ]
        choice = choose(need, residents.draining, candidates, residents.collected_seq, residents.blocks)
        for state in choice.victims:
            residents.preempt(plan, state)
        plan.withheld.update(state.request_id for state in choice.withheld)
        return bool(choice.victims)
