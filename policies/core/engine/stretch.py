"""Many batches in one step: plans of `policies.core.engine.rhythm` committed and collected at once.

The same ledgers and frontiers move as when batch by batch is formed, by as much; only what follows from the
first time is not worked out again.
"""

from collections.abc import Sequence

from policies.core.engine.rhythm import Plan, Rhythm
from policies.core.engine.scheduler import Scheduler
from policies.core.progress.state import RequestState
from policies.core.seam.batch import ExecutionBatch, Stage

MOST_REPEATED = 4096
"""Batches in one stretch: between stretches a run can be interrupted."""
WORTH = 6
"""Batches from which on a stretch takes less time than as many steps."""


class Stretches:
    """Stretches of the run of `scheduler`, whose answers `rhythm` keeps."""

    def __init__(self, scheduler: Scheduler, rhythm: Rhythm) -> None:
        self._scheduler = scheduler
        self._rhythm = rhythm
        self._next_seq = 0
        self._declined: tuple[tuple[RequestState, ...], int | None] | None = None

    def may_begin(self, until_ns: int | None) -> bool:
        """Whether a stretch could begin now, up to `until_ns`: not when batches in flight are not as many as
        they will be then, or somebody is let in, goes, or needs a block."""
        scheduler, residents = self._scheduler, self._scheduler.residents
        order = residents.order
        if len(scheduler.in_flight) != scheduler.settings.inflight - 1 or scheduler.next_seq < self._next_seq:
            return False
        if not order or not scheduler.is_settled:
            return False
        return self._declined is None or self._declined[0] is not order or self._declined[1] != until_ns

    def plan(self) -> Plan | None:
        """What comes next when nobody arrives, hangs up or stops early; None where that is not known, or
        hardly worth a stretch."""
        scheduler = self._scheduler
        order, seq = scheduler.residents.order, scheduler.next_seq
        ahead = [scheduler.allocator.num_tokens_ahead(state) for state in order]
        if min(ahead) <= 0:
            return None
        plan = self._rhythm.plan(order, seq, ahead, scheduler.prompt_batches_since_decode)
        if plan is None:
            return None
        if not scheduler.in_flight and plan.works[(plan.most - 1) % len(plan.works)].stage is Stage.CODA:
            # It may make somebody's last token, and nothing would be in flight behind it.
            plan = plan._replace(most=plan.most - 1)
        if plan.most < WORTH:
            self._next_seq = seq + plan.most
            return None
        return plan if plan.most <= MOST_REPEATED else plan._replace(most=MOST_REPEATED)

    def declined(self, until_ns: int | None) -> None:
        """Somebody ends, or `until_ns` comes, before anything else could be collected."""
        self._declined = self._scheduler.residents.order, until_ns

    def form(self, plan: Plan, formed_ns: Sequence[int]) -> None:
        """Commit the batches of `plan` that were formed at `formed_ns`.

        As many are collected: first those in flight, then the first of these. The others are left in flight.
        """
        scheduler, first_seq, size = self._scheduler, plan.first_seq, len(plan.works)
        count = len(formed_ns)
        turns, rest = divmod(count, size) if count > size else (0, count)
        order, turned_seq = scheduler.residents.order, first_seq + turns * size
        moment = plan.moments[rest]
        after_seq = scheduler.residents.collected_seq
        batches = []
        for at in range(max(0, count - len(scheduler.in_flight)), count):
            work = plan.works[at % size].moved(at // size)
            batches.append(ExecutionBatch(first_seq + at, work, formed_ns[at], after_seq + at))
        has_turned = turns > 0 and any([work.loop_count for work in plan.works])
        scheduler.formed(count, batches, moment, has_turned)
        left = {item.member: item for item in moment.prompts}
        for prompt in plan.moments[0].prompts:
            state = order[prompt.member]
            now = left.get(prompt.member)
            last = 0 if now is None else now.last  # of one that decodes by now it is said below
            if last is None:
                continue
            state.scheduled(first_seq + last, formed_ns[plan.begun_at.get(prompt.member, 0)])
            if now is not None:
                scheduler.advance(state, now.frontiers, now.staged)
            else:
                end = state.prompt_tokens
                scheduler.advance(state, [end] * scheduler.num_loops, end)
        for phase, depth, last, tokens, members in moment.groups:
            for member in members:
                order[member].moved_on(phase, depth, turns + tokens, turned_seq + last)

    def collect(self, plan: Plan, num_batches: int) -> list[tuple[RequestState, int]]:
        """The first `num_batches` of `plan` have been collected, and nobody's last token was among them;
        return who got tokens, and of which batch of a turn."""
        scheduler, size = self._scheduler, len(plan.works)
        delivered: list[tuple[RequestState, int]] = []
        for at, work in enumerate(plan.works[:num_batches]):
            if work.stage is not Stage.CODA:
                continue
            times = (num_batches - at + size - 1) // size
            for item in work.ranges:
                state = scheduler.running[item.request_id]
                state.delivered(times)
                is_first = item.token_start < state.request.prompt_tokens
                scheduler.tokens_by_loops[item.depth or scheduler.num_loops] += times - is_first
                delivered.append((state, at))
        scheduler.residents.collected(scheduler.residents.collected_seq + num_batches)
        return delivered
