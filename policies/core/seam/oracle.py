"""What backends ask the future: whom a CODA batch ends, which rows leave early. Policies and the scheduler
never import this."""

from collections.abc import Iterator

from policies.core.seam.batch import HEADS, ScheduledRange, Stage, Transfers, Work
from policies.core.seam.exits import ExitRule
from policies.core.seam.guesses import AcceptanceOracle
from policies.core.seam.request import ExitOracle, Oracle

NOBODY: frozenset[int] = frozenset()
Refused = frozenset[tuple[int, int]]
NONE_REFUSED: Refused = frozenset()


class Foresight:
    """The oracles of one run, asked in terms of its batches.

    `oracle` says how many tokens a request produces, `exits` (None: nobody leaves early, or a gate on the
    device says who) where its tokens leave the loop under `rule`, `acceptance` (None: a model) which guesses
    are right. Knows the requests that run from the
    allocations that it is shown.
    """

    def __init__(
        self,
        oracle: Oracle,
        exits: ExitOracle | None,
        rule: ExitRule,
        acceptance: AcceptanceOracle | None = None,
    ) -> None:
        self._oracle = oracle
        self._exits = exits if rule.has_decisions else None
        self._rule = rule
        self._acceptance = acceptance
        self._last_positions: dict[int, int] = {}

    def see(self, transfers: Transfers) -> None:
        """Learn who runs from what was transferred with a batch, before anything else is asked of it.

        Position p of a prompt of P tokens makes token p - P + 2: a request of 10 prompt and 3 output tokens
        ends at position 11.
        """
        for request_id in transfers.released:
            self._last_positions.pop(request_id, None)
        for allocation in transfers.allocations:
            request = allocation.request
            tokens = self._oracle.output_tokens(request.request_id)
            self._last_positions[request.request_id] = tokens + request.prompt_tokens - 2

    @property
    def has_guesses(self) -> bool:
        """Whether tokens are guessed."""
        return self._rule.draft_loops > 0

    @property
    def is_asked_of_guesses(self) -> bool:
        """Whether it knows which guesses are right, and no model is asked."""
        return self._acceptance is not None

    def refused(self, work: Work, wrong: Refused = NONE_REFUSED) -> Refused:
        """(request, position) of those rows of `work` whose token is not the one that was guessed: `wrong`
        ones where a model says so, and those that make a request's last token, behind which nothing comes."""
        if not self.has_guesses or work.stage is not Stage.CODA:
            return NONE_REFUSED
        last, acceptance = self._last_positions, self._acceptance
        found = set()
        for item in work.ranges:
            request_id, position = item.request_id, item.token_start
            if item.stage is Stage.VERIFY and (
                position == last[request_id]
                or (request_id, position) in wrong
                or (acceptance is not None and not acceptance.is_right(request_id, position + 1, item.depth))
            ):
                found.add((request_id, position))
        return frozenset(found)

    def stops(self, work: Work, refused: Refused = NONE_REFUSED) -> frozenset[int]:
        """Requests whose token made by `work` is their last, where the guesses in `refused` are wrong. A deep
        queue may hold a CODA of one that has ended: surplus, which ends nothing."""
        if work.stage is not Stage.CODA:
            return NOBODY
        last = self._last_positions
        if self.has_guesses:
            ends: dict[int, int] = {}  # the position of the last row of each request that counts
            for item in work.ranges:
                before = ends.get(item.request_id)
                if item.stage in HEADS and (before is None or (item.request_id, before) not in refused):
                    ends[item.request_id] = item.token_start
            return frozenset([key for key, position in ends.items() if position == last[key]])
        return frozenset(
            [item.request_id for item in work.ranges if item.token_start == last[item.request_id]]
        )

    def num_tokens_ahead(self, item: ScheduledRange) -> int:
        """How many tokens the request makes before its last one, from that of CODA's row `item` on."""
        return self._last_positions[item.request_id] - item.token_start

    def early_exits(self, work: Work) -> frozenset[int]:
        """Requests whose decode row leaves after the depths that `work` runs, as `Completion.exits` wants
        them."""
        if self._exits is None:
            return NOBODY
        loops_run = work.loop_count
        return frozenset(
            [
                item.request_id
                for item, loops in self._leaving(work)
                if item.depth < loops <= item.depth + loops_run
            ]
        )

    def surplus_rows(self, work: Work) -> frozenset[int]:
        """Requests whose decode row in `work` is surplus: its token leaves before the depths that it runs."""
        if self._exits is None:
            return NOBODY
        return frozenset([item.request_id for item, loops in self._leaving(work) if loops <= item.depth])

    def _leaving(self, work: Work) -> Iterator[tuple[ScheduledRange, int]]:
        """Decode rows of `work` whose token leaves before `max_loops`, and the loops it runs."""
        assert self._exits is not None
        rule = self._rule
        for item in work.ranges:
            if item.stage is Stage.RECURRENT:
                loops = max(self._exits.exit_loops(item.request_id, item.token_start), rule.min_loops)
                if loops < rule.max_loops:
                    yield item, loops
