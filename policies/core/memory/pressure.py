"""Who is preempted when blocks or places run out, and who no longer is. Pure choices over running requests;
what they hold moves in `residents.py`.

A request that has been preempted `MOST_PREEMPTIONS` times comes back *guarded*. As long as it runs, all who
run up to it in order fit into the pool with everything they can ever need: it is not let in before they do,
and nobody who would go before it is let in unless they still do. So whoever of them lacks a block gets it
from those behind it, and nobody has to take one from the guarded. Requests of a strictly lower priority
number are not bound by it: they take what they need.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from policies.core.memory.admission import Rank
from policies.core.memory.kv import BlockLedger
from policies.core.progress.state import RequestState
from policies.core.seam.request import Request

MOST_PREEMPTIONS = 5
"""Less patience makes room for less: decoding in a pool for a third of the demand was as fast as without a
bound from 5 on, 12 % slower at 3 and 26 % at 1."""


def is_guarded(state: RequestState | None) -> bool:
    """Whether a request is no longer preempted for blocks that its equals need."""
    return state is not None and state.num_preemptions >= MOST_PREEMPTIONS


def keeps_guards(
    request: Request,
    rank: Rank,
    state: RequestState | None,
    running: Iterable[RequestState],
    blocks: BlockLedger,
) -> bool:
    """Whether `request`, of `rank`, which comes in as `state`, may run beside `running`: all up to the last
    guarded one of its priority, itself included, fit whole.

    A pool of 20 groups; A, which needs 8 in the end, and guarded B, which needs 10, run. C with 5 may come in
    when it goes after B in order, and not when it goes before it: A, C and B need 23.
    """
    members = [(rank, request, is_guarded(state))]
    for other in running:
        if not other.is_ended:
            members.append((other.rank, other.request, is_guarded(other)))
    if not any(guarded for _, _, guarded in members):
        return True
    total = 0
    for place, member, guarded in sorted(members, key=lambda item: item[0]):
        total += blocks.groups_for(member.num_kv_positions)
        if guarded and place[0] == rank[0] and place >= rank and total > blocks.num_groups:
            return False
    return True


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
