"""Many batches in one step: turns of `policies.core.engine.rhythm` committed and collected at once.

The same ledgers and frontiers move as when batch by batch is formed, by as much; only what follows from the
first time is not worked out again.
"""

from collections.abc import Sequence

from policies.core.engine.rhythm import MOST_REPEATED, Rhythm, Turn
from policies.core.engine.scheduler import Scheduler
from policies.core.progress.state import RequestState
from policies.core.seam.batch import ExecutionBatch, Stage


class Stretches:
    """Stretches of the run of `scheduler`, whose batches `rhythm` watches."""

    def __init__(self, scheduler: Scheduler, rhythm: Rhythm) -> None:
        self._scheduler = scheduler
        self._rhythm = rhythm

    def next_turn(self) -> Turn | None:
        """The turn that comes next and again, when nobody arrives, hangs up or stops early; None when none is
        known to, or batches in flight are not as many as they will be then."""
        scheduler, residents = self._scheduler, self._scheduler.residents
        if len(scheduler.in_flight) != scheduler.settings.inflight - 1:
            return None
        works = self._rhythm.turn(residents.order, scheduler.next_seq)
        if works is None or not residents.is_settled:
            return None
        most = min([scheduler.allocator.num_tokens_ahead(state) for state in residents.order])
        return Turn(scheduler.next_seq, works, min(most, MOST_REPEATED // len(works))) if most > 0 else None

    def form(self, turn: Turn, formed_ns: Sequence[int]) -> None:
        """Commit the batches of `turn`, formed again and again at `formed_ns`.

        As many are collected: first those in flight, then the first of these. The others are left in flight.
        """
        scheduler, first_seq, size = self._scheduler, turn.first_seq, len(turn.works)
        count = len(formed_ns)
        turns, rest = divmod(count, size)
        for state in scheduler.residents.order:
            state.moved_on(turns, turns * size)
        works = [work.moved(turns) for work in turn.works[:rest]]
        for at, work in enumerate(works, turns * size):
            scheduler.commit(work, first_seq + at, formed_ns[at])
        self._rhythm.repeated(turns, works)
        scheduler.next_seq = first_seq + count
        after_seq = scheduler.residents.collected_seq
        for at in range(max(0, count - len(scheduler.in_flight)), count):
            work = turn.works[at % size].moved(at // size)
            scheduler.in_flight.append(ExecutionBatch(first_seq + at, work, formed_ns[at], after_seq + at))

    def collect(self, turn: Turn, num_batches: int) -> list[tuple[RequestState, int]]:
        """The first `num_batches` of repeated `turn` have been collected, and nobody's last token was among
        them; return who got tokens, and of which batch of the turn."""
        scheduler, size = self._scheduler, len(turn.works)
        delivered: list[tuple[RequestState, int]] = []
        for at, work in enumerate(turn.works):
            times = (num_batches - at + size - 1) // size
            if work.stage is not Stage.CODA or times <= 0:
                continue
            for item in work.ranges:
                state = scheduler.running[item.request_id]
                state.delivered(times)
                is_first = item.token_start < state.request.prompt_tokens
                scheduler.tokens_by_loops[item.depth or scheduler.num_loops] += times - is_first
                delivered.append((state, at))
        scheduler.residents.collected(scheduler.residents.collected_seq + num_batches)
        return delivered
