"""A fitted latency model as a file: provenance, coefficients in nanoseconds, profiled range, and its own
held-out errors. JSON.

Written by `sim.fit`, read by `policies.costs.fitted`. A model file names its profile by content, so that
neither can change without the other.
"""

import dataclasses
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.core.seam.batch import BATCH_STAGES, Stage
from policies.costs.features import Cutting, Features
from policies.costs.latency import HostLoop
from policies.process.documents import read_json
from policies.process.sentences import first_problem, shown

SCHEMA = 1
FIT_VERSION = 8
"""Of features and fit together: raise it with any change after which an old model file would predict or mean
something else."""


LARGEST = 1e15
"""Eleven days in nanoseconds, and more than any count: what is larger makes sums that no integer holds."""
PROVENANCE = ("date", "torch", "kernel_sha256", "gpu")
"""What a prediction says of the profile that it comes from."""


@dataclass(frozen=True, slots=True)
class Table:
    """Nanoseconds by ascending row bucket: linear between entries, flat before the first, beyond the last at
    the slope of the last doubling of rows."""

    rows: tuple[int, ...]
    ns: tuple[float, ...]

    def at(self, rows: int) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.ns[0]
        if rows > self.rows[-1]:
            low, high = max(bisect_right(self.rows, self.rows[-1] // 2) - 1, 0), -1
        else:
            high = bisect_left(self.rows, rows)
            low = high - 1
        slope = (self.ns[high] - self.ns[low]) / (self.rows[high] - self.rows[low])
        return self.ns[high] + slope * (rows - self.rows[high])


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of K/V of rows that leave early: a fixed part where there are any, parts per row and per row and
    plane written."""

    any_ns: float
    row_ns: float
    plane_ns: float

    def of(self, rows: int, planes: int) -> float:
        """`planes` are those written, of all `rows` together."""
        return self.any_ns + self.row_ns * rows + self.plane_ns * planes if rows else 0.0


@dataclass(frozen=True, slots=True)
class Swap:
    """K/V to or from host memory: a fixed part of each time, and a part per byte."""

    any_ns: float
    byte_ns: float

    def of(self, num_bytes: int) -> float:
        return self.any_ns + self.byte_ns * num_bytes if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one invocation with query tiles of one height, all layers and heads.

    The sum of its critical path (`path_tile_ns` for each history tile on it and `wave_ns` for each unit), and
    of what all the work beside it slows that down (`tile_ns` for each history tile of every item). That it
    runs at all is in the linear table.
    """

    path_tile_ns: float
    tile_ns: float
    wave_ns: float


@dataclass(frozen=True, slots=True)
class Combine:
    """Joining the partial results of split items in one invocation: for each of the splits that a row is
    joined from in sequence, and for each partial row written and read."""

    split_ns: float
    partial_ns: float


@dataclass(frozen=True, slots=True)
class FewRows:
    """Attention of one invocation of few rows, whose kernels wait for memory: for each history tile, and for
    each of the splits that a row is joined from in sequence."""

    tile_ns: float
    split_ns: float

    def of(self, features: Any) -> Any:
        return self.tile_ns * features.tiles + self.split_ns * features.joined_splits


def attention_ns(features: Any, cost: Any, light: Any, combine: Any) -> Any:
    """Attention of one invocation that is not of few rows: history tiles of light items at the price of
    `light`, all else at that of `cost`. Numbers in, a number out; `sim.solve` passes arrays of one value per
    case instead."""
    tiles = (
        cost.path_tile_ns * (features.path_tiles - features.light_path_tiles)
        + cost.tile_ns * (features.tiles - features.light_tiles)
        + light.path_tile_ns * features.light_path_tiles
        + light.tile_ns * features.light_tiles
    )
    joined = combine.split_ns * features.joined_splits + combine.partial_ns * features.partials
    return tiles + cost.wave_ns * features.waves + joined


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Coefficients of device time. `linear` is all of an invocation that depends on its row bucket alone, and
    `launch_ns` what a recurrent batch costs beside its invocations. `prelude` and
    `staging` are whole batches of tokens that are embedded, sampled ones and those of prompts; `coda` one of
    LM head and sampling. `few` and `swap` are None where no batch of few rows, or no swapping, was
    measured."""

    launch_ns: float
    linear: Table
    attention: Mapping[int, Attention]
    combine: Combine
    few: FewRows | None
    prelude: Table
    staging: Table
    coda: Table
    copies: Copies
    swap: Swap | None = None

    def recurrent_ns(self, features: Features, loops: int) -> tuple[float, float, float]:
        """(linear, attention, launch) of a recurrent batch."""
        if features.is_few and self.few is not None:
            attention = self.few.of(features)
        else:
            cost, light = (self.attention_of(rows) for rows in (features.tile_rows, features.light_rows))
            attention = attention_ns(features, cost, light, self.combine)
        return loops * self.linear.at(features.bucket), loops * attention, self.launch_ns

    def attention_of(self, tile_rows: int) -> Attention:
        """The coefficients of a tile height; of one that was not profiled, those of the nearest that was."""
        known = self.attention.get(tile_rows)
        return known or self.attention[min(self.attention, key=lambda rows: (abs(rows - tile_rows), rows))]


@dataclass(frozen=True, slots=True)
class HostTime:
    """Host nanoseconds of a batch: a fixed part, and parts per range, per row and per recurrent loop."""

    batch_ns: float
    range_ns: float
    row_ns: float
    loop_ns: float

    def of(self, ranges: int, rows: int, loops: int) -> float:
        return self.batch_ns + self.range_ns * ranges + self.row_ns * rows + self.loop_ns * loops


@dataclass(frozen=True, slots=True)
class StageHost:
    """Host time of the batches of one stage: choosing, packing, launching; and the share of launching that an
    idle device waits."""

    select: HostTime
    prepare: HostTime
    launch: HostTime
    idle_share: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute relative errors over held-out compositions; `worst_case` is the batch of the worst one."""

    cases: int
    median: float
    p95: float
    worst: float
    worst_case: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """All of a model file. `profile` is the header of the profile it was fitted on, `profile_sha256` the hash
    of its bytes.

    `model` is the shape that was profiled, in the dtype that was profiled. `profiled` is the (smallest,
    largest) value of every feature of recurrent batches in the profile.
    """

    schema: int
    fit_version: int
    profile_sha256: str
    profile: Mapping[str, str]
    model: ModelShape
    cutting: Cutting
    device: DeviceTimes
    host: Mapping[Stage, StageHost]
    loop: HostLoop
    profiled: Mapping[str, tuple[int, int]]
    errors_by_stage: Mapping[Stage, Errors]
    errors_by_component: Mapping[str, Errors]
    errors_by_family: Mapping[str, Errors]
    """Of batches that policies form on one kind of workload, from a fit that saw none of that kind."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


_ADAPTER = TypeAdapter(ModelFile)


def read_model(path: Path) -> ModelFile:
    """The model file at `path`. Raises `InputError` for a file that is none, or that another schema or fit
    wrote."""
    data = read_json(path, "a model file written by `sim fit`")
    for key, expected in (("schema", SCHEMA), ("fit_version", FIT_VERSION)):
        found = data.get(key) if isinstance(data, dict) else None
        if found != expected:
            raise InputError(
                f"{path}: {key}: {shown(found)}, expected {expected}: fit the profile again with `sim fit`"
            )
    try:
        file = _ADAPTER.validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error, 'model')}") from None
    problem = next(_problems(file, data), None)
    if problem is not None:
        raise InputError(f"{path}: {problem}: fit the profile again with `sim fit`")
    return file


def _problems(file: ModelFile, data: Any) -> Iterator[str]:
    """What no fit writes and no prediction survives: times that are no times, tables that do not rise, parts
    left out."""
    for section in ("model", "cutting", "device", "host", "loop"):
        for name, value in _numbers(data[section], section):
            if not 0 <= value <= LARGEST:
                yield f"{name}: {value}, expected a number from 0 to {LARGEST:g}"
    for name, table in (
        ("linear", file.device.linear),
        ("prelude", file.device.prelude),
        ("staging", file.device.staging),
        ("coda", file.device.coda),
    ):
        if not table.rows or len(table.rows) != len(table.ns) or list(table.rows) != sorted(set(table.rows)):
            yield (
                f"device.{name}: {len(table.rows)} rows and {len(table.ns)} times, expected as many, by "
                "ascending rows"
            )
    if not file.device.attention:
        yield "device.attention: is empty, expected coefficients by tile height"
    for section, found, expected in (
        ("host", file.host, BATCH_STAGES),
        ("profiled", file.profiled, Features._fields),
        ("profile", file.profile, PROVENANCE),
    ):
        yield from (f"{section}.{key}: is missing" for key in expected if key not in found)
    for name in ("row_buckets", "tile_rows"):
        sizes = getattr(file.cutting, name)
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            yield f"cutting.{name}: {shown(sizes)}, expected ascending numbers from 1 on"
    if not 1 <= file.cutting.tall_margin < inf:
        yield f"cutting.tall_margin: {file.cutting.tall_margin}, expected a number of 1 or more"
    if file.cutting.tile_keys < 1:
        yield "cutting.tile_keys: 0, expected at least 1"
    if file.cutting.split_keys < file.cutting.tile_keys:
        yield (
            f"cutting.split_keys: {file.cutting.split_keys}, expected at least tile_keys, "
            f"{file.cutting.tile_keys}"
        )


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number below `value`, a part of a JSON file, with its dotted name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int | float):
        yield name, value
