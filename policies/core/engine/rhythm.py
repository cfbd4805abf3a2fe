"""Where decisions repeat: a decode phase goes round in turns, and a policy that says so decides every turn
alike.

Between two events nothing of what such a policy looks at changes from turn to turn. Let every running
request be between its prompt and its last token. What a policy sees of it is its phase, its depth, and how
many batches ago it was scheduled; these together are how requests *stand*. A selection follows from how they
stand, and how they stand after it follows from both. So where they stand as they stood some batches before,
each a token further, the batches in between come again, in order, each row a token further: a *turn*. Three
requests at one depth have a turn of three batches (PRELUDE, RECURRENT through all loops, CODA); in four
groups at four depths it may have twelve.

Times do not enter. With no end, no decision to leave early and no preemption between, what a collected batch
changes is read by nobody who decides. So a turn holds until somebody arrives, hangs up or ends, or needs a
block; who repeats turns must stop before.
"""

from collections.abc import Sequence
from typing import NamedTuple

from policies.core.progress.state import RequestState
from policies.core.seam.batch import Work
from policies.core.seam.request import CODA, PRELUDE, RECURRENT, Phase

MOST_BATCHES = 64
"""In one turn: what takes longer to come round is not waited for."""
MOST_REPEATED = 4096
"""Batches in one stretch: between stretches a run can be interrupted."""


class Turn(NamedTuple):
    """Batches that come `most` times from number `first_seq` on, where nothing comes between: `works` the
    first time, then each time every row a token further."""

    first_seq: int
    works: tuple[Work, ...]
    most: int


class Rhythm:
    """Watches the batches of one run for turns.

    Looks whenever the first request in order is about to embed a token: once in a turn, so that watching
    costs little where nothing repeats.
    """

    def __init__(self) -> None:
        self._order: tuple[RequestState, ...] = ()
        self._stand: list[tuple[Phase, int, int]] = []
        self._positions: list[int] = []
        self._works: list[Work] = []

    def formed(self, work: Work) -> None:
        """`work` is what was chosen next."""
        self._works.append(work)
        if len(self._works) > MOST_BATCHES:
            self.broken()

    def broken(self) -> None:
        """Something happened that does not repeat."""
        self._order = ()
        self._works.clear()

    def turn(self, order: tuple[RequestState, ...], next_seq: int) -> tuple[Work, ...] | None:
        """The works of the turn that begins now, in which every request makes one token; None when none is
        known to."""
        if not order or order[0].phase is not PRELUDE:
            return None
        is_same = order is self._order
        if is_same and order[0].position == self._positions[0]:
            return None
        phases = [state.phase for state in order]
        if phases.count(CODA) + phases.count(PRELUDE) + phases.count(RECURRENT) < len(order):
            self.broken()
            return None
        stand = [(state.phase, state.depth, next_seq - state.last_seq) for state in order]
        positions = [state.position for state in order]
        repeats = is_same and stand == self._stand and positions == [at + 1 for at in self._positions]
        works = tuple([work.moved(1) for work in self._works]) if repeats else None
        self._order, self._stand, self._positions = order, stand, positions
        self._works.clear()
        return works

    def repeated(self, turns: int, works: Sequence[Work]) -> None:
        """The turn was repeated `turns` times, and the batches `works` of another were formed."""
        self._positions = [at + turns for at in self._positions]
        self._works[:] = works
