"""Whether both sides put the policies of a workload in the same order, wherever the measured figures differ
enough to have one.

They do when they differ by more than a least gap and by more than their own repeats do: a gap of 3 % between
figures that vary by 2 % each from run to run is no order. Of a figure that was measured once the spread is
not known: the least gap alone decides, and the order says so (`is_known`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from results.comparison.figures import THROUGHPUT, Figure

RANKED = (
    THROUGHPUT,
    *(f"{name} {statistic}" for name in ("TTFT", "ITL", "TPOT", "E2E") for statistic in ("p50", "p99")),
)


@dataclass(frozen=True, slots=True)
class Order:
    """Two policies by one figure of one workload: `gap` and `predicted_gap` are second / first - 1, measured
    and predicted."""

    workload: str
    figure: str
    first: str
    second: str
    gap: float
    predicted_gap: float
    is_known: bool = True

    @property
    def is_alike(self) -> bool:
        return (self.gap > 0) == (self.predicted_gap > 0) and self.predicted_gap != 0

    @property
    def sentence(self) -> str:
        """`wcpb against atomic -3.1% measured, +0.4% simulated`."""
        return (
            f"{self.second} against {self.first} {self.gap:+.1%} measured, {self.predicted_gap:+.1%} "
            "simulated"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "figure": self.figure,
            "policies": [self.first, self.second],
            "measured_gap": self.gap,
            "predicted_gap": self.predicted_gap,
            "is_alike": self.is_alike,
            "has_repeats": self.is_known,
        }


def orders(workload: str, policies: Mapping[str, Mapping[str, Figure]], least_gap: float) -> list[Order]:
    """Every pair of `policies` (figures by label) and every ranked figure whose two measurements have an
    order."""
    found = []
    for label in RANKED:
        for first, second in combinations(policies, 2):
            one, two = policies[first].get(label), policies[second].get(label)
            if one is None or two is None:
                continue
            gap = two.measured / one.measured - 1
            if max(gap, 1 / (1 + gap) - 1) > max(least_gap, (one.spread or 0.0) + (two.spread or 0.0)):
                predicted_gap = two.predicted / one.predicted - 1
                is_known = one.spread is not None and two.spread is not None
                found.append(Order(workload, label, first, second, gap, predicted_gap, is_known))
    return found


def agreement(found: Sequence[Order]) -> str:
    """`41 of 44 orders alike (30 of 31 where both were measured more than once)`."""
    text = f"{sum(item.is_alike for item in found)} of {len(found)} orders alike"
    known = [item for item in found if item.is_known]
    if len(known) == len(found):
        return text
    alike = sum(item.is_alike for item in known)
    return f"{text} ({alike} of {len(known)} where both were measured more than once)"
