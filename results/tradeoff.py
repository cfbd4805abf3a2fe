"""What pictures and pages decide by: which figures of runs stand against each other, and which runs are the
same traffic at other rates. Arithmetic on summaries; draws nothing."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.identity import policy_order, workload_name
from results.load import Run

SATURATED = 0.01
"""Throughputs that differ by less say nothing: all runs kept up with the arrivals."""
LOAD_KEYS = ("time_scale", "rate", "num_requests", "limit")
ARRIVAL_LOAD_KEYS = ("rate", "concurrency")


@dataclass(frozen=True, slots=True)
class Point:
    """One run by two figures; whether it kept its objectives (None: it has none)."""

    policy: str
    chunk_tokens: int
    x: float
    y: float
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """The points of one workload, what their figures are, and which way is better: x to the left, y upwards
    where `y_rises`. `box` is what objectives allow (x, y), None where nobody said; that of ITL bounds each
    request's own p99."""

    points: tuple[Point, ...]
    x_name: str
    y_name: str
    y_rises: bool
    box: tuple[float | None, float | None] = (None, None)


def tradeoff_of(runs: Sequence[Run]) -> Tradeoff:
    """How to look at the runs of one workload.

    Output tokens/s against p99 ITL, or, where some run has no ITL, prompt tokens/s against p99 TTFT. Below
    saturation, where throughputs are within `SATURATED` of each other or nothing but the arrivals limited
    any run, they decide nothing: then p99 TTFT against p99 ITL.
    """
    data = [
        run
        for run in runs
        if run.summary["ttft_ms"]["p99"] is not None and run.summary["output_token_throughput"]
    ]
    has_itl = bool(data) and all(run.summary["itl_ms"]["p99"] is not None for run in data)
    objective = objective_of(data)
    if not has_itl:
        return Tradeoff(
            _points(data, lambda s: s["ttft_ms"]["p99"], lambda s: s["prompt_token_throughput"]),
            "p99 TTFT, ms", "prompt tokens/s", True, (objective.get("ttft_ms"), None),
        )  # fmt: skip
    rates = [run.summary["output_token_throughput"] for run in data]
    has_room = all(run.summary.get("limited_by") == "arrivals" for run in data)
    if len(data) > 1 and (has_room or max(rates) <= (1 + SATURATED) * min(rates)):
        return Tradeoff(
            _points(data, lambda s: s["itl_ms"]["p99"], lambda s: s["ttft_ms"]["p99"]),
            "p99 ITL, ms", "p99 TTFT, ms", False, (objective.get("itl_ms"), objective.get("ttft_ms")),
        )  # fmt: skip
    return Tradeoff(
        _points(data, lambda s: s["itl_ms"]["p99"], lambda s: s["output_token_throughput"]),
        "p99 ITL, ms", "output tokens/s", True, (objective.get("itl_ms"), None),
    )  # fmt: skip


def front(points: Iterable[Point], y_rises: bool = True) -> list[Point]:
    """Points that no other point beats in one figure without losing in the other, from left to right. Equal
    points are all kept."""
    points = list(points)
    sign = 1 if y_rises else -1

    def is_beaten(point: Point) -> bool:
        return any(
            other.x <= point.x
            and sign * other.y >= sign * point.y
            and (other.x, other.y) != (point.x, point.y)
            for other in points
        )

    return sorted(
        (point for point in points if not is_beaten(point)),
        key=lambda point: (point.x, sign * point.y, point.policy, point.chunk_tokens),
    )


def objective_of(runs: Sequence[Run]) -> Mapping[str, float]:
    """The objectives that all of `runs` were held to, in ms by name; where they differ, none."""
    found = [
        {key: value for key, value in (run.summary.get("slo") or {}).items() if key.endswith("_ms") and value}
        for run in runs
    ]
    return found[0] if found and all(item == found[0] for item in found) else {}


@dataclass(frozen=True, slots=True)
class Load:
    """One traffic at several rates: its name and, by (policy, chunk), its runs in order of the rate
    offered."""

    name: str
    series: Mapping[tuple[str, int], Sequence[Run]]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.series.values() for run in runs]


def loads_of(runs: Sequence[Run]) -> list[Load]:
    """The traffics that ran at two rates or more, in the order given."""
    families: dict[str, dict[tuple[str, int], list[Run]]] = {}
    names: dict[str, str] = {}
    for run in runs:
        if run.summary.get("offered_request_rate") and run.summary["status"] == "complete":
            key = _traffic(run)
            names.setdefault(key, workload_name(run.config["workload"]))
            families.setdefault(key, {}).setdefault((run.policy, run.chunk_tokens), []).append(run)
    found = []
    for key, series in families.items():
        ordered = {
            label: sorted(series[label], key=offered)
            for label in sorted(series, key=lambda item: (policy_order(item[0]), item[1]))
        }
        if any(offered(mine[-1]) > (1 + SATURATED) * offered(mine[0]) for mine in ordered.values()):
            found.append(Load(names[key], ordered))
    return found


def offered(run: Run) -> float:
    """Requests a second at which they arrived."""
    return float(run.summary["offered_request_rate"] or 0.0)


def _traffic(run: Run) -> str:
    """What must be the same for two runs to differ in load alone: workload but for its rate, model, device,
    world, objectives."""
    workload = {key: value for key, value in run.config["workload"].items() if key not in LOAD_KEYS}
    if isinstance(workload.get("arrival"), Mapping):
        arrival = workload["arrival"].items()
        workload["arrival"] = {key: value for key, value in arrival if key not in ARRIVAL_LOAD_KEYS}
    place = [run.summary.get(key) for key in ("model", "device", "world")]
    return json.dumps([workload, place, dict(objective_of([run]))], sort_keys=True, default=str)


def _points(runs: Sequence[Run], x: Any, y: Any) -> tuple[Point, ...]:
    points = [
        Point(
            run.policy,
            run.chunk_tokens,
            float(x(run.summary)),
            float(y(run.summary)),
            (run.summary.get("slo") or {}).get("holds"),
        )
        for run in runs
    ]
    return tuple(
        sorted(points, key=lambda point: (policy_order(point.policy), point.chunk_tokens, point.x, point.y))
    )
