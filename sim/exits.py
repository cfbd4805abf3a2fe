"""Where decoded tokens leave the loop in a simulation: the workload's word under `trace`, a seeded draw under
`gate`."""

from bisect import bisect_right
from itertools import accumulate

from policies.core.errors import InputError
from policies.core.seam.draws import draw
from policies.core.seam.exits import ExitSettings
from policies.core.seam.request import ExitOracle
from workloads.workload import Workload


class DrawnExits:
    """Loops of every token drawn by `weights`, weight i that of leaving after loop i + 1.

    A draw depends on seed, request and position alone, so no schedule changes it.
    """

    def __init__(self, seed: int, weights: tuple[float, ...]) -> None:
        self._seed = seed
        self._bounds = list(accumulate(weights))

    def exit_loops(self, request_id: int, position: int) -> int:
        """Loops after which the token at `position` of the request leaves."""
        drawn = draw(self._seed, request_id, position)
        return bisect_right(self._bounds, drawn * self._bounds[-1], hi=len(self._bounds) - 1) + 1


def exit_oracle(settings: ExitSettings, num_loops: int, workload: Workload, seed: int) -> ExitOracle | None:
    """Who says where tokens leave; None when no token decides. Raises `InputError` when there is nobody to
    ask."""
    if not settings.rule(num_loops).has_decisions:
        return None
    if settings.mode == "trace":
        return workload.recorded_exits()
    weights = settings.loop_weights
    if (
        weights is None
        or len(weights) != num_loops
        or min(weights) < 0
        or not 0 < sum(weights) < float("inf")
    ):
        found = None if weights is None else list(weights)
        raise InputError(
            f"exit.loop_weights: {found}, expected {num_loops} weights >= 0 of leaving after loop 1 to "
            f"{num_loops}, because a simulation has no gate to ask"
        )
    return DrawnExits(seed, weights)
