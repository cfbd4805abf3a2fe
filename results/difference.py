"""Two sides of a question set side by side: before and after, one device and another, this policy and that.

Runs belong together when their configs are equal but for the device; else when workload, policy and chunk
size are, and nothing else on either side is called so. A difference is B / A - 1. The confidence of one of a
latency comes from drawing the requests anew, 95 % of 200 drawings: in blocks of neighbours in order of
arrival, because who comes after a late one is late too, and the same requests on both sides where both have
them. It says whether other requests of the same kind would show the difference; not whether another seed of
arrivals would, nor another card.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from policies.core.errors import InputError
from policies.core.seam.request import Status
from results.comparison.pairs import config_difference
from results.identity import policy_order, printable
from results.load import Run
from results.table import plain_table

DRAWINGS, SEED = 200, 0
FIGURES = (
    ("ttft", 50, "TTFT p50"),
    ("ttft", 99, "TTFT p99"),
    ("itl", 50, "ITL p50"),
    ("itl", 99, "ITL p99"),
    ("e2e", 99, "E2E p99"),
)
COUNTED = (("request_throughput", "requests/s"), ("output_token_throughput", "output tok/s"))
LEGEND = (
    "B / A - 1, in brackets the 95 % interval where requests are drawn anew in blocks of neighbours; * the "
    "interval leaves out 0. Throughputs and goodput have no interval: they are one number of a run."
)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both sides, and the interval of B / A - 1 where it is known."""

    name: str
    a: float
    b: float
    low: float | None = None
    high: float | None = None

    @property
    def change(self) -> float:
        return self.b / self.a - 1

    @property
    def is_sure(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.1%}, {self.high:+.1%}]"
        return f"{self.change:+.1%}{interval}{'*' if self.is_sure else ''}"


@dataclass(frozen=True, slots=True)
class Row:
    """One pair of runs and what differs between them; `by` names the first key in which their configs do."""

    a: Run
    b: Run
    figures: tuple[Difference, ...]
    by: str | None

    @property
    def names(self) -> tuple[str, str, str]:
        return self.a.workload, self.a.policy, str(self.a.chunk_tokens)


def differences(a: Sequence[Run], b: Sequence[Run]) -> tuple[list[Row], list[str]]:
    """A row for each pair, and a sentence for what has no partner. Raises `InputError` when nothing has
    one."""
    pairs, notes = _pairs(a, b)
    rows = [
        Row(one, other, tuple(_figures(one, other)), config_difference(one, other)) for one, other in pairs
    ]
    order = list(dict.fromkeys(row.a.workload for row in rows))
    rows.sort(key=lambda row: (order.index(row.a.workload), row.a.chunk_tokens, policy_order(row.a.policy)))
    return rows, notes


def difference_table(rows: Sequence[Row]) -> Table:
    """One line for each pair; bold where the interval leaves out 0."""
    table = plain_table(None)
    for name in ("workload", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("chunk", *figure_names(rows)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found = {item.name: item for item in row.figures}
        cells = [
            Text(
                str(found[name]) if name in found else "-",
                style="bold" if name in found and found[name].is_sure else "",
            )
            for name in figure_names(rows)
        ]
        table.add_row(*map(Text, row.names), *cells)
    return table


def figure_names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(item.name for row in rows for item in row.figures))


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each latency: for how many pairs it is surely lower, surely higher, or neither."""
    for _, _, name in FIGURES:
        found = [item for row in rows for item in row.figures if item.name == name and item.low is not None]
        if found:
            lower = sum(item.is_sure and item.change < 0 for item in found)
            higher = sum(item.is_sure and item.change > 0 for item in found)
            yield (
                f"{name}: lower in B for {lower}, higher for {higher}, neither for sure for "
                f"{len(found) - lower - higher} of {len(found)} pairs"
            )


def places(rows: Sequence[Row]) -> Iterator[str]:
    """What each side ran: `A: ouro-1.4b on h200 (sim)`."""
    for side, runs in (("A", [row.a for row in rows]), ("B", [row.b for row in rows])):
        found = {
            f"{run.summary['model']} on {run.summary['device']} ({run.summary['world']})": None
            for run in runs
        }
        yield printable(f"{side}: {', '.join(found)}")


def _pairs(a: Sequence[Run], b: Sequence[Run]) -> tuple[list[tuple[Run, Run]], list[str]]:
    left = [run for run in a if run.summary["status"] == "complete"]
    free = [run for run in b if run.summary["status"] == "complete"]
    pairs, notes = (
        [],
        [
            f"{run.path.name}: {run.summary['status']}, left out"
            for run in (*a, *b)
            if run.summary["status"] != "complete"
        ],
    )
    for are_alike in (_same_config, _same_name):
        for run in list(left):
            mine = [other for other in free if are_alike(run, other)]
            rivals = [other for other in left if mine and are_alike(other, mine[0])]
            if len(mine) == 1 and len(rivals) == 1:
                pairs.append((run, mine[0]))
                left.remove(run)
                free.remove(mine[0])
    if not pairs and len(left) == len(free) == 1:
        pairs, left, free = [(left[0], free[0])], [], []
    notes += [f"{run.path.name}: only in A" for run in left] + [f"{run.path.name}: only in B" for run in free]
    if not pairs:
        raise InputError(
            f"{a[0].path} and {b[0].path}: no two complete runs with one config, or with one workload, "
            "policy and chunk size, expected some to set side by side"
        )
    return pairs, notes


def _same_config(one: Run, other: Run) -> bool:
    return _same_name(one, other) and config_difference(one, other) is None


def _same_name(one: Run, other: Run) -> bool:
    return (one.workload, one.policy, one.chunk_tokens) == (other.workload, other.policy, other.chunk_tokens)


def _figures(a: Run, b: Run) -> Iterator[Difference]:
    for key, name in COUNTED:
        if a.summary[key] and b.summary[key]:
            yield Difference(name, a.summary[key], b.summary[key])
    goods: list[Any] = [(run.summary.get("slo") or {}).get("goodput") for run in (a, b)]
    if all(goods):
        yield Difference("goodput/s", goods[0], goods[1])
    drawn: dict[tuple[str, int], tuple[float, float]] = {}
    if all((run.path / "requests.csv").is_file() for run in (a, b)):
        drawn = _intervals(a, b)
    for key, percent, name in FIGURES:
        values = [run.summary[f"{key}_ms"][f"p{percent}"] for run in (a, b)]
        if all(values):
            yield Difference(name, values[0], values[1], *drawn.get((key, percent), (None, None)))


@dataclass(frozen=True, slots=True)
class _Samples:
    """Of requests in order of arrival: ids `[n]`, TTFT and E2E `[n]` (NaN without), and of all gaps in
    ascending order their length and whose they are `[gaps]`."""

    ids: tuple[int, ...]
    ttft: Floats
    e2e: Floats
    itl: Floats
    owner: NDArray[np.int64]

    @classmethod
    def of(cls, run: Run) -> "_Samples":
        table = run.requests().sort_values(["arrival_ns", "request_id"], kind="stable")
        times = [np.fromstring(text, dtype=np.int64, sep=" ") for text in table["token_ns"]]
        arrival = table["arrival_ns"].to_numpy(dtype=np.float64)
        ttft = np.array([item[0] if len(item) else np.nan for item in times]) - arrival
        ended = (table["status"] == Status.FINISHED.value).to_numpy()
        e2e = np.array([item[-1] if len(item) else np.nan for item in times]) - arrival
        gaps = np.concatenate([np.diff(item) for item in times] or [np.zeros(0)]).astype(np.float64)
        owner = np.repeat(np.arange(len(times)), [max(len(item) - 1, 0) for item in times])
        order = np.argsort(gaps, kind="stable")
        return cls(tuple(table["request_id"]), ttft, np.where(ended, e2e, np.nan), gaps[order], owner[order])

    def percentile(self, key: str, percent: int, weights: NDArray[np.int64]) -> float:
        """Of requests that count as often as `weights` say."""
        if key == "itl":
            return _weighted(self.itl, weights[self.owner], percent)
        values = getattr(self, key)
        order = np.argsort(values, kind="stable")
        order = order[~np.isnan(values[order])]
        return _weighted(values[order], weights[order], percent)


def _intervals(a: Run, b: Run) -> dict[tuple[str, int], tuple[float, float]]:
    """(low, high) of B / A - 1 for each latency that both have."""
    sides = [_Samples.of(run) for run in (a, b)]
    num = [len(side.ids) for side in sides]
    if min(num) < 2:
        return {}
    random = np.random.default_rng(SEED)
    is_paired = sides[0].ids == sides[1].ids
    ratios: dict[tuple[str, int], list[float]] = {(key, percent): [] for key, percent, _ in FIGURES}
    for _ in range(DRAWINGS):
        first = _drawn(random, num[0])
        weights = (first, first if is_paired else _drawn(random, num[1]))
        for (key, percent), found in ratios.items():
            one, other = (
                side.percentile(key, percent, mine) for side, mine in zip(sides, weights, strict=True)
            )
            if one > 0 and other > 0:
                found.append(other / one - 1)
    return {
        key: (float(low), float(high))
        for key, found in ratios.items()
        if len(found) > DRAWINGS // 2
        for low, high in [np.percentile(found, (2.5, 97.5))]
    }


def _drawn(random: np.random.Generator, num: int) -> NDArray[np.int64]:
    """How often each of `num` requests is drawn, `num` draws in all in blocks of neighbours: their length
    grows with the cube root, 2 of 8, 10 of 1,000."""
    length = max(1, round(num ** (1 / 3)))
    starts = random.integers(0, num, size=-(-num // length))
    at = (starts[:, None] + np.arange(length)).ravel()[:num] % num
    return np.bincount(at, minlength=num)


def _weighted(ordered: Floats, weights: NDArray[np.int64], percent: int) -> float:
    """The percentile of ascending values that count `weights` times each; NaN of none."""
    total = np.cumsum(weights)
    if not len(total) or not total[-1]:
        return float("nan")
    return float(ordered[np.searchsorted(total, percent / 100 * total[-1])])
