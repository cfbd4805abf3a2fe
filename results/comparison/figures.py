"""The figures of two sides held against each other, with the measured side's own spread and a tolerance.

measured = mean of the repeats
error    = predicted / measured - 1
spread   = largest |repeat / measured - 1|; None of a single run, which has none to show
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.comparison.pairs import Pair

LATENCY_NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
STATISTICS = ("mean", "p50", "p90", "p99")
THROUGHPUT = "throughput"
GOODPUT = "goodput"
ENOUGH_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How large an error may be, as a fraction; of what is not named here any. `rank_gap`: closer policies
    have no order."""

    p50: float = 0.05
    p99: float = 0.10
    throughput: float = 0.03
    goodput: float = 0.05
    rank_gap: float = 0.02

    def of(self, statistic: str) -> float | None:
        named = {"p50": self.p50, "p99": self.p99, THROUGHPUT: self.throughput, GOODPUT: self.goodput}
        return named.get(statistic)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one pair, in ms, or in requests a second for throughput and goodput."""

    name: str
    statistic: str
    predicted: float
    measured: float
    spread: float | None
    tolerance: float | None

    @property
    def label(self) -> str:
        return self.name if self.statistic == self.name else f"{self.name} {self.statistic}"

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        return self.tolerance is None or abs(self.error) <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        return {
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
            "spread": self.spread,
            "tolerance": self.tolerance,
            "holds": self.holds,
        }


def figures_of(pair: Pair, tolerances: Tolerances) -> list[Figure]:
    """Throughput, every latency at every statistic, goodput; what the workload does not have (ITL of one
    token) or nobody asked for is left out."""
    found = [_figure(pair, THROUGHPUT, THROUGHPUT, lambda summary: summary["request_throughput"], tolerances)]
    for key, name in LATENCY_NAMES.items():
        for statistic in STATISTICS:
            found.append(
                _figure(pair, name, statistic, lambda summary, k=key, s=statistic: summary[k][s], tolerances)
            )
    found.append(_figure(pair, GOODPUT, GOODPUT, _goodput, tolerances))
    return [figure for figure in found if figure is not None]


def _figure(pair: Pair, name: str, statistic: str, value: Any, tolerances: Tolerances) -> Figure | None:
    predicted = value(pair.predicted.summary)
    repeats = [value(run.summary) for run in pair.measured]
    if predicted is None or not all(repeats):
        return None
    measured, spread = centre(repeats)
    return Figure(name, statistic, predicted, measured, spread, tolerances.of(statistic))


def _goodput(summary: Mapping[str, Any]) -> float | None:
    return (summary.get("slo") or {}).get("goodput")


def centre(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of `values` and the largest relative distance from it: of 9, 10 and 11 (10, 0.1)."""
    mean = statistics.mean(values)
    return mean, max(abs(value / mean - 1) for value in values) if len(values) > 1 else None


def by_label(figures: Sequence[Figure]) -> Mapping[str, Figure]:
    return {figure.label: figure for figure in figures}
