"""random: any replica, all alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from policies.core.seam.request import Request
from policies.routing.router import Choose, Load, Router


@dataclass(frozen=True)
class AtRandom(Router):
    """Of Poisson arrivals every replica then gets Poisson arrivals at its part of the rate: what queueing
    theory speaks of, and what every other router has to beat."""

    name: ClassVar[str] = "random"

    def chooser(self, num_replicas: int, seed: int) -> Choose:
        chance = Random(f"{seed} router")

        def choose(request: Request, loads: Sequence[Load]) -> int:
            return chance.randrange(num_replicas)

        return choose
