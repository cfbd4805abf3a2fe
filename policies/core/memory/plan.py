"""What is transferred when a batch is formed, while it is being decided. Values only."""

from dataclasses import dataclass, field

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
