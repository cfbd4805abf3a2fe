"""Where decisions repeat: what a policy chose once, told by how requests stand, is what it chooses again.

Let every running request be between its prompt and its last token. What a policy that says so (`repeats`)
sees of one is its phase, its depth, and how many batches ago it was scheduled: how it *stands*. Where all
rows fit into a batch it takes those who stand alike together, and which of them depends on what stands there
and not on how many stand so. So every answer is kept under the set of stands that it was given to, and a
company that never was, or one of whom somebody has gone, decodes on in batches that are known already: a
`Plan`. As soon as everybody stands as at its beginning, a token further, the plan goes round in *turns*.
Three requests at one depth have a turn of three batches (PRELUDE, RECURRENT through all loops, CODA); in four
groups at four depths it may have twelve.

Times do not enter. With no end, no decision to leave early and no preemption between, what a collected batch
changes is read by nobody who decides. So a plan holds until somebody arrives, hangs up or ends, or needs a
block; who follows it must stop before.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from policies.core.progress.state import RequestState
from policies.core.seam.batch import Stage, Work, new_range
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import CODA, PRELUDE, RECURRENT, Phase
from policies.core.seam.settings import SchedulerSettings

MOST_BATCHES = 64
"""In one turn: what takes longer to come round is not waited for."""
MOST_KEPT = 1 << 14
"""Answers that are kept; more are forgotten all at once."""
STAGES = {PRELUDE: Stage.PRELUDE, RECURRENT: Stage.RECURRENT, CODA: Stage.CODA}

Stand = tuple[Phase, int, int]
"""Phase, depth, and how many batches ago a request was scheduled."""
Stands = frozenset[Stand] | frozenset[tuple[Stand, int]]


class Answer(NamedTuple):
    """What was chosen: everybody who stands as one of `taken`."""

    stage: Stage
    loop_count: int
    taken: frozenset[Stand]


class Group(NamedTuple):
    """Those who stand alike, by their place in order: their phase and depth, the batch of the plan that took
    them last (the first has number 0, those before it negative ones), and tokens that they have made."""

    phase: Phase
    depth: int
    last: int
    tokens: int
    members: Sequence[int]


class Plan(NamedTuple):
    """Batches from number `first_seq` on: `works`, `most` of them at most. Where these are more than there
    are works, they come again and again, each time every row a token further. `after` are the groups before
    each of the works, and after the last."""

    first_seq: int
    works: tuple[Work, ...]
    most: int
    after: list[list[Group]]


class Rhythm:
    """What the policy of one run has answered so far."""

    def __init__(
        self, settings: SchedulerSettings, exits: ExitRule, num_loops: int, has_planes: bool
    ) -> None:
        self._most_rows = settings.max_num_batched_tokens
        self._counts = settings.min_coda_batch_size > 1
        self._exits = exits
        self._num_loops = num_loops
        self._has_planes = has_planes
        self._answers: dict[Stands, Answer] = {}
        self._asked: tuple[Stands, list[Group]] | None = None

    def plan(
        self, order: tuple[RequestState, ...], next_seq: int, tokens_ahead: Sequence[int]
    ) -> Plan | None:
        """What comes from batch `next_seq` on, up to where one of `order` has made as many more tokens as are
        `tokens_ahead`, at least 1; None where that is not known, and then the next answer is learnt."""
        self._asked = None
        if len(order) > self._most_rows:
            return None
        groups = start = grouped(order, next_seq)
        ids, positions = [state.request_id for state in order], [state.position for state in order]
        depths, coda_at = [state.depth for state in order], [MOST_BATCHES] * len(order)
        works: list[Work] = []
        after = [groups]
        while len(works) < MOST_BATCHES:
            at = len(works)
            stands = self._stands(groups, at)
            answer = self._answers.get(stands)
            if answer is None:
                if not works:
                    self._asked = stands, groups
                break
            stage, loops, taken = answer
            chosen = [item for item in groups if (item.phase, item.depth, at - item.last) in taken]
            if stage is Stage.CODA and any([item.tokens for item in chosen]):
                break
            members = joined(chosen)
            rows = len(members)
            ranges = [
                new_range((ids[member], stage, depths[member], positions[member], 1, 0, None, False))
                for member in members
            ]
            works.append(Work(stage, loops, tuple(ranges), rows, rows, self._has_planes))
            groups = self._moved(groups, chosen, loops, at)
            after.append(groups)
            if stage is Stage.CODA:
                for member in members:
                    positions[member] += 1
                    coda_at[member] = at
            for item in groups:
                if item.last == at:
                    for member in item.members:
                        depths[member] = item.depth
            if comes_round(start, groups, len(works)):
                turn = len(works)
                most = [
                    (tokens - 1) * turn + at + 1 for tokens, at in zip(tokens_ahead, coda_at, strict=True)
                ]
                return Plan(next_seq, tuple(works), min(most), after)
        ends = [at + 1 for tokens, at in zip(tokens_ahead, coda_at, strict=True) if tokens == 1]
        return Plan(next_seq, tuple(works), min([len(works), *ends]), after) if works else None

    def learn(self, order: tuple[RequestState, ...], work: Work) -> None:
        """`work` was chosen; keep it when `plan` did not know it and it takes all of those who stand
        alike."""
        if self._asked is None:
            return
        stands, groups = self._asked
        self._asked = None
        ids = [item.request_id for item in work.ranges]
        first_of = {order[item.members[0]].request_id: item for item in groups}
        chosen = [first_of[key] for key in ids if key in first_of]
        if [order[member].request_id for member in joined(chosen)] == ids:
            if len(self._answers) >= MOST_KEPT:
                self._answers.clear()
            taken = frozenset([(item.phase, item.depth, -item.last) for item in chosen])
            self._answers[stands] = Answer(work.stage, work.loop_count, taken)

    def forget(self) -> None:
        """What is chosen next does not follow from how requests stand."""
        self._asked = None

    def _stands(self, groups: list[Group], at: int) -> Stands:
        """How requests stand before batch `at` of a plan; how many stand so too, where they wait for one
        another at the LM head."""
        if self._counts:
            return frozenset(
                Counter(
                    [(phase, depth, at - last) for phase, depth, last, _, who in groups for _ in who]
                ).items()
            )
        return frozenset([(phase, depth, at - last) for phase, depth, last, _, _ in groups])

    def _moved(self, groups: list[Group], chosen: list[Group], loops: int, at: int) -> list[Group]:
        """The groups once batch `at` has taken `chosen`: the steps of `Scheduler.commit`."""
        moved: dict[tuple[Phase, int, int], list[Group]] = {}
        for item in chosen:
            phase, depth, tokens = item.phase, item.depth, item.tokens
            if phase is RECURRENT:
                depth += loops
                if depth == self._exits.max_loops:
                    phase, depth = CODA, 0 if depth == self._num_loops else depth
            elif phase is CODA:
                phase, depth, tokens = PRELUDE, 0, tokens + 1
            else:
                phase = RECURRENT
            moved.setdefault((phase, depth, tokens), []).append(Group(phase, depth, at, tokens, item.members))
        left = [item for item in groups if item not in chosen]
        return left + [alike[0]._replace(members=joined(alike)) for alike in moved.values()]


def grouped(order: Sequence[RequestState], next_seq: int) -> list[Group]:
    """Those of `order` who stand alike before batch `next_seq`."""
    found: dict[Stand, list[int]] = {}
    for member, state in enumerate(order):
        found.setdefault((state.phase, state.depth, next_seq - state.last_seq), []).append(member)
    return [Group(phase, depth, -age, 0, members) for (phase, depth, age), members in found.items()]


def joined(groups: Sequence[Group]) -> Sequence[int]:
    """Members of `groups` in order."""
    if len(groups) == 1:
        return groups[0].members
    return sorted([member for item in groups for member in item.members])


def comes_round(start: list[Group], groups: list[Group], batches: int) -> bool:
    """Whether everybody stands as at the start so many batches before, a token further."""
    if len(groups) != len(start) or not all([item.tokens for item in groups]):
        return False
    now = {(item.phase, item.depth, item.last - batches): item.members for item in groups}
    return all([now.get((item.phase, item.depth, item.last)) == item.members for item in start])
