"""What a run is judged by: the latencies that a client was promised, and the part of a run that counts.

Values of a configuration. Neither changes what a run does: `results.goodput` and `results.window` apply them.
"""

from dataclasses import dataclass
from typing import Annotated

from policies.core.bounds import LARGEST, Within

Milliseconds = Annotated[float, Within(gt=0, le=1e9)]
Seconds = Annotated[float, Within(0, le=1e9)]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latencies that a request must keep, all of those that are given; they hold when `share` of the requests
    keep them. `itl_ms` bounds the p99 of a request's own gaps."""

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    share: Annotated[float, Within(gt=0, le=1)] = 0.99

    @property
    def limits_ms(self) -> dict[str, float]:
        """The latencies that are given, by name."""
        values = {name: getattr(self, name) for name in LATENCIES}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a run counts: not its first `skip_requests` requests in order of arrival, nor the first
    `skip_s` seconds after the first arrival, nor what comes from `until_s` after it on."""

    skip_requests: Annotated[int, Within(0, LARGEST)] = 0
    skip_s: Seconds = 0.0
    until_s: Annotated[float, Within(gt=0, le=1e9)] | None = None


LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
EVERYTHING = Window()
