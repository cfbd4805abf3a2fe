"""How unevenly requests arrive. A mean rate alone says little: the same mean in bursts needs more room."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

FIVE_MINUTES_NS = 300 * 10**9
MIN_WINDOWS = 3
TENTHS = 10


@dataclass(frozen=True, slots=True)
class Burstiness:
    """`cv` is the coefficient of variation of the gaps (Poisson arrivals: 1). The windows are whole ones of
    `window_s` seconds: five minutes where there are some, else tenths of the whole."""

    rate: float
    cv: float
    window_s: float
    slowest: float
    fastest: float

    @classmethod
    def of(cls, arrivals_ns: Sequence[int]) -> "Burstiness":
        """Of arrivals in order, not all of them at once. Three at 0, 1 and 4 s: 0.5 a second, cv 0.5."""
        gaps = [later - earlier for earlier, later in pairwise(arrivals_ns)]
        span_ns = arrivals_ns[-1] - arrivals_ns[0]
        is_long = span_ns >= MIN_WINDOWS * FIVE_MINUTES_NS
        width_ns = FIVE_MINUTES_NS if is_long else max(1, -(-span_ns // TENTHS))
        counts = Counter((at - arrivals_ns[0]) // width_ns for at in arrivals_ns)
        rates = [1e9 * counts[at] / width_ns for at in range(max(1, span_ns // width_ns))]
        return cls(
            1e9 * len(gaps) / span_ns,
            pstdev(gaps) / fmean(gaps),
            width_ns / 1e9,
            min(rates),
            max(rates),
        )

    def __str__(self) -> str:
        width = "five-minute windows" if self.window_s == 300 else f"windows of {self.window_s:.3g} s"
        return (
            f"{width} carry {self.slowest:.2f} to {self.fastest:.2f} requests/s around a mean of "
            f"{self.rate:.2f}; gaps have a cv of {self.cv:.2f} (Poisson arrivals: 1)"
        )
