"""What is transferred when a batch is formed, while it is being decided. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.core.progress.state import RequestState
from policies.core.seam.batch import Allocation, Growth, Preemption


@dataclass(slots=True)
class TransferPlan:
    """What is transferred when a batch is formed.

    `withheld` requests may not be scheduled in it: they lack blocks, or are preempted next. `is_short` says
    that somebody waits for blocks; nobody after it may take any.
    """

    preemptions: list[Preemption] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    swapped_bytes: int = 0
    withheld: set[int] = field(default_factory=set)
    is_short: bool = False

    def followed_by(self, plan: "TransferPlan | None", running: Mapping[int, RequestState]) -> "TransferPlan":
        """What was given out here and then by `plan`, before any batch was formed, of requests that still
        run."""
        plan = plan or TransferPlan()
        return TransferPlan(
            self.preemptions + plan.preemptions,
            [item for item in self.allocations + plan.allocations if item.request_id in running],
            [item for item in self.growths + plan.growths if item.request_id in running],
            self.swapped_bytes + plan.swapped_bytes,
            plan.withheld,
            plan.is_short,
        )
