"""What a router must answer, and what it may know: of each replica what has been sent there and has not
ended.

A router sees requests as a policy does: never how many tokens they will really produce.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from policies.core.seam.request import Request


class Load(NamedTuple):
    """What a replica has been sent that has not ended: `requests` of them, which need K/V for `kv_positions`
    tokens at most, of the `pool_positions` that its pool holds."""

    requests: int
    kv_positions: int
    pool_positions: int

    @property
    def kv_share(self) -> float:
        """The part of the pool that is promised, above 1 where some will wait."""
        return self.kv_positions / self.pool_positions


Choose = Callable[[Request, Sequence[Load]], int]


class Router(ABC):
    """One way to spread requests over replicas. A subclass is one file in `policies/routing/` and one line in
    `policies.routing.registry`; its fields are its options."""

    name: ClassVar[str]

    @abstractmethod
    def chooser(self, num_replicas: int, seed: int) -> Choose:
        """What is asked, once for every request in order of arrival, in one run: the index of the replica
        that it goes to. What it remembers between two requests it keeps for itself; chance comes from a
        stream of its own that `seed` begins."""
