"""Where decisions repeat: what a policy chose once, told by how requests stand, is what it chooses again.

What a policy that says so (`repeats`) sees of a decoding request is its phase, its depth, and how many
batches ago it was scheduled; of a prompt how its frontiers lie to one another and to its end, in chunks: how
it *stands*. Where all rows fit into a batch it takes those who decode and stand alike together, and which of
them depends on what stands there and not on how many stand so. So every answer is kept under the stands that
it was given to, and a company that never was, or one that somebody has left or joined, goes on in batches
that are known already: a `Plan`. Where everybody decodes and stands as at its beginning, a token further, the
plan goes round in *turns*. Three requests at one depth have a turn of three batches (PRELUDE, RECURRENT
through all loops, CODA); in four groups at four depths it may have twelve.

Times do not enter. With no end, no decision to leave early and no preemption between, what a collected batch
changes is read by nobody who decides. So a plan holds until somebody arrives, hangs up or ends, or needs a
block; who follows it must stop before.
"""

from collections.abc import Sequence
from operator import ge
from typing import NamedTuple

from policies.core.engine.walk import Answer, Key, Moment, Walk
from policies.core.progress.state import RequestState
from policies.core.seam.batch import Stage, Work
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import CODA, PRELUDE, PROMPT, RECURRENT
from policies.core.seam.settings import SchedulerSettings

MOST_BATCHES = 64
"""In one turn: what takes longer to come round is not waited for."""
MOST_KEPT = 1 << 15
"""Answers that are kept; more are forgotten all at once."""


class Plan(NamedTuple):
    """Batches from number `first_seq` on: `works`, `most` of them at most. Where these are more than there
    are works, they come again and again, each time every row a token further. `moments` lie before each of
    the works, and after the last; `begun_at` says which of the works is the first of members whose prompts
    begin."""

    first_seq: int
    works: tuple[Work, ...]
    most: int
    moments: list[Moment]
    begun_at: dict[int, int]


class Rhythm:
    """What the policy of one run has answered so far."""

    def __init__(
        self, settings: SchedulerSettings, exits: ExitRule, num_loops: int, has_planes: bool
    ) -> None:
        self._settings = settings
        self._exits = exits
        self._num_loops = num_loops
        self._has_planes = has_planes
        self._answers: dict[Key, Answer] = {}
        self._asked: tuple[Key, Walk] | None = None

    def plan(
        self,
        order: tuple[RequestState, ...],
        next_seq: int,
        tokens_ahead: Sequence[int],
        prompt_batches_since_decode: int,
    ) -> Plan | None:
        """What comes from batch `next_seq` on, up to where one of `order` has made as many more tokens as are
        `tokens_ahead`, at least 1; None where that is not known, and then the next answer is learnt."""
        self._asked = None
        for state in order:
            phase = state.phase
            if phase is PROMPT:
                if not state.prompt.is_at_chunks:
                    return None
            elif phase not in (CODA, PRELUDE, RECURRENT):
                return None
        walk = Walk(order, next_seq, self._settings, self._exits, self._num_loops, self._has_planes)
        walk.since_decode = prompt_batches_since_decode
        had_prompts = bool(walk.prompts)
        moments, works, most = [walk.moment()], list[Work](), 0
        while walk.fits() and len(works) < MOST_BATCHES:
            key = walk.key()
            answer = self._answers.get(key)
            if answer is None:
                if not works:
                    self._asked = key, walk
                break
            if had_prompts != bool(walk.prompts) or not (had_prompts or walk.makes_first_tokens(answer)):
                break
            works.append(walk.step(answer))
            moments.append(walk.moment())
            if answer.stage is Stage.CODA and any(map(ge, walk.made, tokens_ahead)):
                break
            if not had_prompts and comes_round(moments[0], moments[-1], len(works)):
                turn = len(works)
                ends = [
                    (tokens - 1) * turn + at for tokens, at in zip(tokens_ahead, walk.coda_at, strict=True)
                ]
                most = min(ends) + 1
                break
        if not works:
            return None
        return Plan(next_seq, tuple(works), most or len(works), moments, walk.begun_at)

    def learn(self, work: Work) -> None:
        """`work` was chosen; keep it when `plan` did not know it and it takes all of those who stand
        alike."""
        if self._asked is None:
            return
        key, walk = self._asked
        self._asked = None
        answer = walk.answer(work)
        if answer is not None:
            if len(self._answers) >= MOST_KEPT:
                self._answers.clear()
            self._answers[key] = answer


def comes_round(start: Moment, now: Moment, batches: int) -> bool:
    """Whether everybody stands as at the start so many batches before, a token further."""
    if len(start.groups) != len(now.groups) or any([item.tokens != 1 for item in now.groups]):
        return False
    found = {(item.phase, item.depth, item.last - batches): item.members for item in now.groups}
    return all([found.get((item.phase, item.depth, item.last)) == item.members for item in start.groups])
