"""round_robin: one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import ClassVar

from policies.core.seam.request import Request
from policies.routing.router import Choose, Load, Router


@dataclass(frozen=True)
class RoundRobin(Router):
    """Request n goes to replica n modulo their number, whatever it asks for and whatever they have to do."""

    name: ClassVar[str] = "round_robin"

    def chooser(self, num_replicas: int, seed: int) -> Choose:
        turn = cycle(range(num_replicas))

        def choose(request: Request, loads: Sequence[Load]) -> int:
            return next(turn)

        return choose
