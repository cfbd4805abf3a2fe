"""Where a prediction comes from: components, physical limit, features with their coefficients, claimed error,
profiled range."""

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B
from policies.core.seam.batch import Stage, Work
from policies.core.seam.events import COMPONENTS
from policies.costs.features import Features
from policies.costs.fitted import FittedModel
from policies.costs.latency import LatencyModel, Prediction
from policies.costs.modelfile import DeviceTimes, Errors, read_model
from policies.costs.models import load_device, model_path
from results.batchlog import parse_work

WITHOUT_LOOPS = (Stage.PRELUDE, Stage.PREFILLING_PRELUDE, Stage.CODA)


@dataclass(frozen=True, slots=True)
class Term:
    """One feature of one invocation: `value` times `coefficient_ns`, a part of `component`."""

    component: str
    feature: str
    value: int
    coefficient_ns: float

    @property
    def ns(self) -> float:
        return self.value * self.coefficient_ns


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `latency` says of `work`. `terms`, `errors` and `beyond` (the first feature outside the profiled
    range) are those of a fitted model; another kind has none."""

    latency: LatencyModel
    work: Work
    prediction: Prediction
    terms: tuple[Term, ...]
    errors: Errors | None
    beyond: str | None

    def as_json(self) -> dict[str, Any]:
        prediction = self.prediction
        return {
            "device": self.latency.provenance,
            "model": self.latency.model.name,
            "stage": self.work.stage,
            "loop_count": self.work.loop_count,
            "rows": self.work.rows,
            "device_ns": prediction.device_ns,
            "limit_ns": prediction.limit_ns,
            "components_ns": dict(zip(COMPONENTS, prediction.components_ns, strict=True)),
            "host_ns": {
                "select": prediction.select_ns,
                "prepare": prediction.prepare_ns,
                "launch": prediction.launch_ns,
            },
            "idle_ns": prediction.idle_ns,
            "terms_of_one_invocation": [{**dataclasses.asdict(term), "ns": term.ns} for term in self.terms],
            "held_out_errors": dataclasses.asdict(self.errors) if self.errors else None,
            "beyond_profile": self.beyond,
        }

    def lines(self) -> Iterator[str]:
        """The explanation for people, times in microseconds."""
        work, prediction = self.work, self.prediction
        total, limit = prediction.device_ns, prediction.limit_ns
        of_limit = f", {total / limit:.2f} x its limit of {limit / 1e3:,.1f}" if limit else ""
        yield (
            f"{work.stage}, {work.loop_count} loops, {work.rows} rows in {len(work.ranges)} ranges of "
            f"{work.num_requests} requests: {total / 1e3:,.1f} us on the device{of_limit}"
        )
        yield f"device: {self.latency.provenance}"
        for name, ns in zip(COMPONENTS, prediction.components_ns, strict=True):
            if ns:
                yield f"  {name:<10}{ns / 1e3:>12,.1f} us {ns / total:>6.1%}"
        if self.terms:
            yield "one invocation, the sum of:"
        for term in self.terms:
            product = f"{term.value:,} x {term.coefficient_ns / 1e3:,.3f}"
            yield f"  {term.component:<18}{term.feature:<34}{product:>22} = {term.ns / 1e3:>10,.1f} us"
        yield (
            f"host: select {prediction.select_ns / 1e3:,.1f}, prepare {prediction.prepare_ns / 1e3:,.1f}, "
            f"launch {prediction.launch_ns / 1e3:,.1f} us; on an idle device {prediction.idle_ns / 1e3:,.1f} "
            "us more on the device"
        )
        if self.errors is not None:
            errors = self.errors
            yield (
                f"error of {work.stage} batches held out of the fit: median {errors.median:.1%}, p95 "
                f"{errors.p95:.1%}, worst {errors.worst:.1%} of {errors.cases} ({errors.worst_case})"
            )
            yield f"outside the profiled range: {self.beyond}" if self.beyond else "inside the profiled range"


def explain(device: str, ranges: str, stage: str | None, loops: int | None) -> Explanation:
    """Explain `device`'s prediction for a batch given as in `batches.csv`; a fitted model speaks of the model
    it was fitted for.

    `stage` is by default that of the ranges (RECURRENT where they differ), `loops` as many as it runs at
    once. Raises `InputError`.
    """
    path = model_path(device)
    latency = load_device(device, read_model(path).model if path is not None else OURO_1_4B)
    work = work_of(ranges, stage, loops, latency.model.num_loops)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the explanation itself says what lies outside the profiled range
        prediction = latency.predict(work)
    if not isinstance(latency, FittedModel):
        return Explanation(latency, work, prediction, (), None, None)
    errors = latency.file.errors_by_stage.get(work.stage)
    if not work.loop_count:
        return Explanation(latency, work, prediction, (), errors, None)
    features = latency.features(work)
    return Explanation(
        latency, work, prediction, tuple(_terms(latency, features)), errors, latency.beyond(features)
    )


def work_of(text: str, stage: str | None, loops: int | None, num_loops: int) -> Work:
    """The work that `text` describes, `request:stage:depth:start:count` for each range. Raises
    `InputError`."""
    try:
        ranges = parse_work(text)
        stages = {item.stage for item in ranges}
        if len(stages) > 1 and stages != {Stage.RECURRENT, Stage.PREFILLING_RECURRENT}:
            raise ValueError(f"stages {', '.join(sorted(stages))} share no batch")
        of_batch = Stage(stage) if stage else stages.pop() if len(stages) == 1 else Stage.RECURRENT
    except ValueError as error:
        raise InputError(
            f"--batch {text!r}: {error}, expected request:stage:depth:start:count for each range"
        ) from None
    for item in ranges:
        if item.token_count < 1 or item.token_start < 0 or not 0 <= item.depth < num_loops:
            raise InputError(
                f"--batch {text!r}: a range of {item.token_count} tokens from {item.token_start} at depth "
                f"{item.depth}"
            )
    if loops is None:
        whole = num_loops - max(item.depth for item in ranges)
        loops = 0 if of_batch in WITHOUT_LOOPS else whole if of_batch is Stage.PREFILL else 1
    if (loops == 0) != (of_batch in WITHOUT_LOOPS) or loops < 0:
        raise InputError(
            f"--loops {loops}: expected {'0' if of_batch in WITHOUT_LOOPS else 'at least 1'} for a "
            f"{of_batch} batch"
        )
    if loops > num_loops - (deepest := max(item.depth for item in ranges)):
        raise InputError(
            f"--loops {loops}: expected at most {num_loops - deepest} from depth {deepest} of {num_loops}"
        )
    return Work.of(of_batch, loops, ranges)


def _terms(latency: FittedModel, features: Features) -> Iterator[Term]:
    device, layers = latency.file.device, latency.layer_factor
    yield Term("linear", f"bucket of {features.bucket} rows", 1, layers * device.linear.at(features.bucket))
    for component, feature, value, coefficient_ns in _attention_terms(device, features):
        if value:
            yield Term(component, feature, value, layers * coefficient_ns)


def _attention_terms(device: DeviceTimes, features: Features) -> tuple[tuple[str, str, int, float], ...]:
    """(component, feature, value, coefficient)."""
    joined = ("attention combine", "splits that a row is joined from", features.joined_splits)
    if features.is_few and (few := device.few) is not None:
        total = ("attention total", f"history tiles of {features.items} items, few rows", features.tiles)
        return (*total, few.tile_ns), (*joined, few.split_ns)
    cost, combine = device.attention_of(features.tile_rows), device.combine
    light = device.attention_of(features.light_rows)
    return (
        (
            "attention path",
            f"history tiles on it, {features.tile_rows} rows high",
            features.path_tiles - features.light_path_tiles,
            cost.path_tile_ns,
        ),
        (
            "attention path",
            f"history tiles on it, of items of up to {features.light_rows} rows",
            features.light_path_tiles,
            light.path_tile_ns,
        ),
        (
            "attention total",
            f"history tiles of {features.items} items",
            features.tiles - features.light_tiles,
            cost.tile_ns,
        ),
        (
            "attention total",
            f"history tiles of items of up to {features.light_rows} rows",
            features.light_tiles,
            light.tile_ns,
        ),
        ("attention path", "units on it, one for each wave", features.waves, cost.wave_ns),
        (*joined, combine.split_ns),
        ("attention combine", "rows of partial results", features.partials, combine.partial_ns),
    )
