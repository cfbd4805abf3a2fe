"""The coefficients of a latency model from measured batches. What they mean is in `policies.costs.modelfile`;
scipy is imported here alone.

Most are non-negative, robust least-squares problems in relative errors: recurrent batches together, exit
copies and host times as straight lines of a few features. Batches without recurrent loops are tables by row
bucket.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression, least_squares, nnls

from policies.core.seam.batch import BATCH_STAGES, Stage
from policies.costs.features import Cutting, Features
from policies.costs.latency import HostLoop
from policies.costs.modelfile import (
    Attention,
    Combine,
    Copies,
    DeviceTimes,
    FewRows,
    HostTime,
    StageHost,
    Swap,
    Table,
    attention_ns,
)
from results.profile import GAPS, Profile, ProfileRow

Array = npt.NDArray[np.float64]
OUTLIER = 0.03
"""Relative residual from which on a case counts by its size and no longer by its square."""
TABLES = {Stage.PRELUDE: "prelude", Stage.PREFILLING_PRELUDE: "staging", Stage.CODA: "coda"}
"""Stages without recurrent loops, and their field of `DeviceTimes`."""
DEVIATIONS_TO_P90 = 1.2816
"""Of a normal distribution, in standard deviations from the median."""
ENOUGH = 4
"""Lines of a profile that a host time is solved from, at least: as many as it has coefficients."""
NO_TIME = HostTime(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A measured batch. `composition` is what must be held out together: the spans of its ranges, its rows
    where no depth runs."""

    row: ProfileRow
    stage: Stage
    loops: int
    num_ranges: int
    features: Features
    composition: str

    @classmethod
    def of(cls, row: ProfileRow, cutting: Cutting) -> "Case":
        work = row.work()
        composition = (
            str(sorted((item.token_start, item.token_count) for item in work.ranges))
            if work.loop_count
            else f"{work.stage} {work.rows}"
        )
        features = cutting.features(cutting.key(work.ranges))
        return cls(row, work.stage, work.loop_count, len(work.ranges), features, composition)

    @property
    def device_ns(self) -> float:
        assert self.row.device_ns is not None
        return float(self.row.device_ns)

    def predicted_ns(self, times: DeviceTimes) -> float:
        if self.loops:
            return sum(times.recurrent_ns(self.features, self.loops))
        table: Table = getattr(times, TABLES[self.stage])
        return table.at(self.features.bucket)


def fit_device(cases: Sequence[Case], copies: Copies, swap: Swap | None = None) -> DeviceTimes:
    """All device coefficients from `cases`, which hold some recurrent ones, some that embed and some CODA.
    Where no staging was measured, the other tokens that embed stand for it."""
    recurrent = _Recurrent([case for case in cases if case.loops])
    found = {stage: [case for case in cases if case.stage is stage] for stage in TABLES}
    found[Stage.PREFILLING_PRELUDE] = found[Stage.PREFILLING_PRELUDE] or found[Stage.PRELUDE]
    return recurrent.solve({name: _table(found[stage]) for stage, name in TABLES.items()}, copies, swap)


def fit_swap(rows: Sequence[ProfileRow], token_bytes: int) -> Swap | None:
    """Of rows of kind `swap`, both ways together; a token's K/V has `token_bytes`."""
    features = [[1.0, float((row.rows or 0) * token_bytes)] for row in rows]
    return Swap(*_straight(features, [float(row.device_ns or 0) for row in rows])) if rows else None


def fit_copies(rows: Sequence[ProfileRow], num_loops: int) -> Copies:
    """Of rows of kind `copies`: each range's row left after its depth and is written to every plane behind
    it."""
    ranges = [row.work().ranges for row in rows]
    features = [[1.0, len(items), sum(num_loops - 1 - item.depth for item in items)] for items in ranges]
    return (
        Copies(*_straight(features, [float(row.device_ns or 0) for row in rows]))
        if rows
        else Copies(0.0, 0.0, 0.0)
    )


class _Recurrent:
    """Least squares over recurrent cases. Unknowns, all >= 0: the launch, the linear table, three attention
    coefficients by tile height, two of the combine and two of few rows. The table may fall where another
    kernel takes over, as it does from 4 to 8 rows on an H200."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._buckets = sorted({case.features.bucket for case in cases})
        features = [case.features for case in cases]
        light = {item.light_rows for item in features if item.light_tiles and not item.is_few}
        self._heights = sorted({item.tile_rows for item in features} | light)
        self._measured = np.array([case.device_ns for case in cases])
        self._loops = np.array([float(case.loops) for case in cases])
        self._bucket = np.array([self._buckets.index(case.features.bucket) for case in cases])
        self._height = np.array([self._heights.index(item.tile_rows) for item in features])
        self._light = np.array(
            [
                self._heights.index(item.light_rows) if item.light_rows in self._heights else 0
                for item in features
            ]
        )
        columns = zip(*features, strict=True)
        self._features = Features(*map(np.array, columns))  # type: ignore[arg-type]
        self._has_few = any(case.features.is_few for case in cases)

    def solve(self, tables: Mapping[str, Table], copies: Copies, swap: Swap | None) -> DeviceTimes:
        linear = np.array(
            [
                0.8 * float((self._measured / self._loops)[self._bucket == at].min())
                for at in range(len(self._buckets))
            ]
        )
        heights = np.ones(len(self._heights))
        guess = np.concatenate(
            [[5e3], linear, 3e4 * heights, 2e3 * heights, 5e4 * heights, [5e3, 100.0], [3e3, 5e3]]
        )
        result = least_squares(
            lambda unknowns: self._predicted(unknowns) / self._measured - 1,
            guess, bounds=(0, np.inf), x_scale=guess, loss="soft_l1", f_scale=OUTLIER,
        )  # fmt: skip
        launch, linear, attention, combine, few = self._parts(result.x)
        return DeviceTimes(
            launch_ns=_short(launch),
            linear=Table(tuple(self._buckets), tuple(map(_short, linear))),
            attention={
                height: Attention(*(_short(column[at]) for column in attention))
                for at, height in enumerate(self._heights)
            },
            combine=Combine(*map(_short, combine)),
            few=FewRows(*map(_short, few)) if self._has_few else None,
            copies=copies,
            swap=swap,
            **tables,
        )

    def _parts(self, unknowns: Array) -> tuple[float, Array, Array, Array, Array]:
        num_buckets, num_heights = len(self._buckets), len(self._heights)
        launch, linear, attention, combine, few = np.split(
            unknowns, np.cumsum([1, num_buckets, 3 * num_heights, 2])
        )
        return float(launch[0]), linear, attention.reshape(3, num_heights), combine, few

    def _predicted(self, unknowns: Array) -> Array:
        launch, linear, attention, combine, few = self._parts(unknowns)
        cost, light = Attention(*attention[:, self._height]), Attention(*attention[:, self._light])
        invocation: Array = linear[self._bucket] + np.where(
            self._features.is_few,
            FewRows(*few).of(self._features),
            attention_ns(self._features, cost, light, Combine(*combine)),
        )
        return launch + self._loops * invocation


def _table(cases: Sequence[Case]) -> Table:
    """Medians by bucket, made to never fall; a bucket counts by its cases.

    A bucket that real runs have counts by those alone; what else was measured, in the profile's own company,
    is off by as much as where there are both (median).
    """
    alone: dict[int, list[float]] = {}
    served: dict[int, list[float]] = {}
    for case in cases:
        company = served if case.row.kind == "served" else alone
        company.setdefault(case.features.bucket, []).append(case.device_ns)
    both = [float(np.median(served[size]) - np.median(alone[size])) for size in served if size in alone]
    missed_ns = float(np.median(both)) if both else 0.0
    found = {size: [max(0.0, ns + missed_ns) for ns in times] for size, times in alone.items()} | served
    buckets = sorted(found)
    medians = [float(np.median(found[bucket])) for bucket in buckets]
    rising = isotonic_regression(medians, weights=[len(found[bucket]) for bucket in buckets]).x
    return Table(tuple(buckets), tuple(map(_short, rising)))


def _straight(
    features: Sequence[Sequence[float]], measured: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """Non-negative coefficients of `features`, robust and in relative errors; a case of weight 4 counts as
    four.

    A feature that these cases cannot tell from those before it has no part. The start is the plain
    least-squares solution.
    """
    all_features, values = np.array(features), np.array(measured)
    kept: list[int] = []
    for at in range(all_features.shape[1]):
        if np.linalg.matrix_rank(all_features[:, [*kept, at]]) > len(kept):
            kept.append(at)
    scale = np.sqrt(np.ones(len(values)) if weights is None else np.array(weights) / np.mean(weights))
    relative = all_features[:, kept] / values[:, None]
    start = nnls(relative * scale[:, None], scale)[0]
    unit = 1 / np.abs(relative).mean(axis=0)
    result = least_squares(
        lambda part: scale * (relative * unit @ part - 1),
        start / unit,
        bounds=(-1e-12, np.inf),
        loss="soft_l1",
        f_scale=OUTLIER,
    )
    solution = np.zeros(all_features.shape[1])
    solution[kept] = np.maximum(result.x, 0.0) * unit
    return [_short(value) for value in solution]


def fit_host(cases: Sequence[Case]) -> dict[Stage, StageHost]:
    """Host times by stage; stages with recurrent loops are packed and launched alike and share theirs.

    Batches of real runs count alone where there are enough of them; a stage that was not measured takes the
    line of all.
    """
    result: dict[Stage, StageHost] = {}
    for stage in BATCH_STAGES:
        mine = [case for case in cases if case.stage is stage or (stage not in TABLES and case.loops)]
        real = [case for case in mine if case.row.kind == "host"]
        select, prepare, launch = (
            next(
                (line for line in (_line(some, name) for some in (real, mine, cases)) if line is not None),
                NO_TIME,
            )
            for name in ("select_ns", "prepare_ns", "launch_ns")
        )
        result[stage] = StageHost(select, prepare, launch, _idle_share(mine or cases))
    return result


def _line(cases: Sequence[Case], column: str) -> HostTime | None:
    """The coefficients of a host column, every line counting by its observations; None where less than ENOUGH
    was measured."""
    known = [case for case in cases if getattr(case.row, column)]
    if len(known) < ENOUGH:
        return None
    features = [[1.0, case.num_ranges, case.row.rows or 0, case.loops] for case in known]
    return HostTime(
        *_straight(
            features,
            [float(getattr(case.row, column)) for case in known],
            [case.row.n or 1 for case in known],
        )
    )


def _idle_share(cases: Sequence[Case]) -> float:
    """What an idle device adds over the launching times of the same cases, in medians: both are long where
    the host was slow."""
    known = [
        case.row for case in cases if case.row.idle_device_ns and case.row.device_ns and case.row.launch_ns
    ]
    if not known:
        return 0.0
    extra = np.median([(row.idle_device_ns or 0) - (row.device_ns or 0) for row in known])
    return round(max(0.0, float(extra / np.median([row.launch_ns or 0 for row in known]))), 4)


def fit_loop(profile: Profile) -> HostLoop:
    """Each part of the loop: the median of the profiled runs, each counting by its observations; 0 where none
    was seen."""
    gaps = profile.of_kind("gap")

    def typical(text: str) -> int:
        seen = sorted((row.device_ns or 0, row.n or 1) for row in gaps if row.case.endswith(text))
        counts = np.cumsum([count for _, count in seen])
        return seen[int(np.searchsorted(counts, counts[-1] / 2))][0] if seen else 0

    gaps_ns = {f"{name}_ns": typical(text) for name, text in GAPS.items()}
    return HostLoop(**gaps_ns, host_spread=_host_spread(profile.of_kind("host")))


def _host_spread(rows: Sequence[ProfileRow]) -> float:
    """Of a log-normal distribution, from the median ratio of the 90th percentile of packing and launching to
    its median."""
    medians = [(row.prepare_ns or 0) + (row.launch_ns or 0) for row in rows]
    ratios = [
        (row.host_p90_ns or 0) / median
        for row, median in zip(rows, medians, strict=True)
        if median and row.host_p90_ns
    ]
    return round(max(0.0, math.log(float(np.median(ratios))) / DEVIATIONS_TO_P90), 4) if ratios else 0.0


def _short(value: float) -> float:
    """Six significant digits, no less than a thousandth of a nanosecond: more is noise that differs between
    machines."""
    return round(float(f"{float(value):.6g}"), 3)
