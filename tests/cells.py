"""Grids of settings that tests run whole or in part."""

import itertools
import os
from collections.abc import Sequence
from typing import Any


def cells(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each of `axes`, such that any two values of two axes occur together.

    `WHOLE_GRIDS=1` gives all combinations; what takes three values at once to go wrong is also looked for by
    the random worlds.
    """
    left = list(itertools.product(*axes))
    if os.environ.get("WHOLE_GRIDS"):
        return left
    unseen = set(itertools.chain.from_iterable(map(pairs, left)))
    found = []
    while unseen:
        best = max(left, key=lambda cell: len(unseen.intersection(pairs(cell))))
        unseen.difference_update(pairs(best))
        left.remove(best)
        found.append(best)
    return found


def pairs(cell: tuple[Any, ...]) -> list[tuple[tuple[int, Any], ...]]:
    """Every two (axis, value) of `cell`."""
    return list(itertools.combinations(enumerate(cell), 2))
