"""least_kv: whoever has promised the smallest part of its KV pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.core.seam.request import Request
from policies.routing.router import Choose, Load, Router


@dataclass(frozen=True)
class LeastKv(Router):
    """Counts tokens and not requests, as parts of each pool: a long prompt weighs more than a short one, and
    a large card takes more than a small one."""

    name: ClassVar[str] = "least_kv"

    def chooser(self, num_replicas: int, seed: int) -> Choose:
        def choose(request: Request, loads: Sequence[Load]) -> int:
            return min(range(len(loads)), key=lambda at: (loads[at].kv_share, loads[at].requests, at))

        return choose
