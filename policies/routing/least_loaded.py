"""least_loaded: whoever has the fewest requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.core.seam.request import Request
from policies.routing.router import Choose, Load, Router


@dataclass(frozen=True)
class LeastLoaded(Router):
    """Joins the shortest queue; of equal ones the one with less promised K/V, then the first."""

    name: ClassVar[str] = "least_loaded"

    def chooser(self, num_replicas: int, seed: int) -> Choose:
        return least_loaded


def least_loaded(request: Request, loads: Sequence[Load]) -> int:
    """The replica with the fewest requests."""
    return min(range(len(loads)), key=lambda at: (loads[at].requests, loads[at].kv_share, at))
