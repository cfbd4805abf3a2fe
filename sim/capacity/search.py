"""Where a load stops being carried: bracketing over whole numbers, of which each is a heavier load than the
one before. Knows no simulation.

Doubling until one side of the answer is found and then the other, then narrowing. What a probe found beside
yes or no, its `strain`, places the next one: load and the logarithm of strain go together, so most searches
end after half the probes of a bisection; where two in a row do not halve the bracket the next one does. The
answer rests on yes and no alone: it holds there, and not one step further.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class Outcome(Protocol):
    """What a probe says: whether the objectives hold, and how much was late of what may be (1 is the limit;
    an estimate will do)."""

    @property
    def holds(self) -> bool: ...
    @property
    def strain(self) -> float: ...


class Steps(Protocol):
    """The loads that may be tried, as whole numbers: where to begin, and where to go from there."""

    @property
    def first(self) -> int: ...
    @property
    def lightest(self) -> int: ...
    @property
    def heaviest(self) -> int: ...

    def heavier(self, step: int) -> int | None:
        """A load about twice as heavy, at most the heaviest; None for that one itself."""

    def lighter(self, step: int) -> int | None:
        """About half of it, at least the lightest; None for that one itself."""


@dataclass(slots=True)
class Found:
    """`step` is the heaviest load that holds: the next one does not. None when even the lightest does not;
    `is_open` when even the heaviest does. `exceptions` are steps that contradict this: lighter ones that do
    not hold, heavier ones that do."""

    step: int | None
    is_open: bool = False
    exceptions: list[int] = field(default_factory=list)


def search(
    steps: Steps,
    probe: Callable[[int], Outcome],
    is_hopeless: Callable[[], bool] = lambda: False,
    near: int = 8,
) -> Found:
    """The answer, and on each side of it a second opinion: a probe further out, at most `near` steps away (0:
    none), unless the search has made one. It says whether what holds is one piece.

    `is_hopeless` is asked once, when half of the first load does not hold either: whether no lighter one
    can.
    """
    low, high = _bracket(steps, probe, is_hopeless)
    if low is None:
        return Found(None)
    if high is None:
        return Found(low[0], is_open=True)
    probed, num_slow = {low[0], high[0]}, 0
    while high[0] - low[0] > 1:
        width = high[0] - low[0]
        step = _crossing(low, high) if num_slow < 2 else low[0] + width // 2
        outcome = probe(step)
        probed.add(step)
        if outcome.holds:
            low = (step, outcome.strain)
        else:
            high = (step, outcome.strain)
        num_slow = num_slow + 1 if 2 * (high[0] - low[0]) > width else 0
    exceptions = []
    for edge, outwards, holds in ((low[0], -1, True), (high[0], 1, False)):
        around = range(edge + outwards, edge + outwards * (near + 1), outwards)
        second = edge + outwards * (near // 2)
        if near and probed.isdisjoint(around) and steps.lightest <= second <= steps.heaviest:
            exceptions += [second] if probe(second).holds != holds else []
    return Found(low[0], exceptions=sorted(exceptions))


Side = tuple[int, float]
"""A step and its strain."""


def _bracket(
    steps: Steps, probe: Callable[[int], Outcome], is_hopeless: Callable[[], bool]
) -> tuple[Side | None, Side | None]:
    """Neighbouring steps of a doubling, the first of which holds; None for a side that there is not."""
    low: Side | None = None
    high: Side | None = None
    at: int | None = steps.first
    num_probes = 0
    while at is not None and (low is None or high is None):
        if num_probes == 2 and low is None and is_hopeless():
            break
        outcome = probe(at)
        num_probes += 1
        if outcome.holds:
            low = (at, outcome.strain)
        else:
            high = (at, outcome.strain)
        at = steps.heavier(at) if high is None else steps.lighter(at)
    return low, high


def _crossing(low: Side, high: Side) -> int:
    """The step between the two that should be the last to hold if the logarithm of strain were a line."""
    below, above = -math.log(max(low[1], 0.02)), math.log(max(high[1], 1.02))
    below = max(below, 0.0)
    step = low[0] + math.floor((high[0] - low[0]) * below / (below + above))
    return min(max(step, low[0] + 1), high[0] - 1)
