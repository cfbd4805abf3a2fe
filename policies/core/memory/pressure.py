"""Who is preempted when blocks or places run out. Pure choices over running requests; what they hold moves in
`residents.py`."""

from collections.abc import Sequence
from typing import NamedTuple

from policies.core.memory.kv import BlockLedger
from policies.core.progress.state import RequestState


class Need(NamedTuple):
    """Groups and places that must become free. `reused` groups do not count: whoever needs room holds them
    itself."""

    groups: int
    places: int = 0
    reused: frozenset[int] = frozenset()


class Choice(NamedTuple):
    """`victims` are preempted now, `withheld` will once the batches that touch them are collected; one of the
    two is empty."""

    victims: Sequence[RequestState] = ()
    withheld: Sequence[RequestState] = ()


def choose(
    need: Need,
    draining: Sequence[RequestState],
    candidates: Sequence[RequestState],
    collected_seq: int,
    blocks: BlockLedger,
) -> Choice:
    """Whom of `candidates`, in their order, `need` takes.

    Nobody with a batch in flight is preempted. When the others are too few, nobody is preempted now, and
    those who will are withheld, so that the next batches do not touch them. What `draining` requests are
    about to return is waited for first; and nobody is preempted when it would not be enough.
    """
    if fewest(draining, need, blocks) is not None:
        return Choice()
    idle = [state for state in candidates if state.last_seq <= collected_seq]
    victims = fewest(idle, need, blocks)
    if victims is not None:
        return Choice(victims=victims)
    return Choice(withheld=fewest([*draining, *candidates], need, blocks) or ())


def fewest(states: Sequence[RequestState], need: Need, blocks: BlockLedger) -> Sequence[RequestState] | None:
    """The fewest of `states`, from the first on, without whom `need` is met; None when it is not without all
    of them."""
    groups, places = need.groups, need.places
    returned: dict[int, int] = {}
    for number, state in enumerate(states, 1):
        for group in state.block_groups:
            returned[group] = returned.get(group, 0) + 1
            groups -= returned[group] == blocks.references(group) and group not in need.reused
        places -= 1
        if groups <= 0 and places <= 0:
            return states[:number]
    return None
