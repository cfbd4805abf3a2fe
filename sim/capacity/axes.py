"""What makes a load heavier: a higher rate of the same requests, or fewer engines for them. Turns a step into
a config; runs nothing."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from policies.config.runconfig import RunConfig, parse_config
from policies.core.errors import InputError
from policies.core.seam.objectives import EVERYTHING
from workloads.drawn import Closed, Gamma, Poisson
from workloads.presets import resolve_preset
from workloads.spec import LiveSpec, PresetSpec, TraceSpec, parse_workload
from workloads.workload import Workload, load_workload

PRECISION = 0.02
"""A step of rate: an answer is a rate that holds where one that is 2 % higher does not."""
A_DOUBLING = round(math.log(2) / math.log1p(PRECISION))
MOST_DOUBLINGS = 20
MOST_REPLICAS = 1024


class Axis(Protocol):
    """One way to load a config, in steps (`sim.capacity.search.Steps`)."""

    name: str
    unit: str

    @property
    def first(self) -> int: ...
    @property
    def lightest(self) -> int: ...
    @property
    def heaviest(self) -> int: ...
    def heavier(self, step: int) -> int | None: ...
    def lighter(self, step: int) -> int | None: ...
    def value(self, step: int) -> float:
        """What a step is called: requests/s, or replicas."""
        ...

    def config(self, step: int) -> RunConfig:
        """The config under that load."""
        ...

    def requests_per_s(self, step: int) -> float: ...


@dataclass(frozen=True, slots=True)
class RateAxis:
    """The time axis of one request sequence, scaled: the same requests at every rate, in the same
    proportions."""

    base: RunConfig
    start: float
    name = "rate"
    unit = "requests/s"

    @property
    def first(self) -> int:
        return round(math.log(self.start) / math.log1p(PRECISION))

    @property
    def lightest(self) -> int:
        return self.first - MOST_DOUBLINGS * A_DOUBLING

    @property
    def heaviest(self) -> int:
        return self.first + MOST_DOUBLINGS * A_DOUBLING

    def heavier(self, step: int) -> int | None:
        return None if step >= self.heaviest else step + A_DOUBLING

    def lighter(self, step: int) -> int | None:
        return None if step <= self.lightest else step - A_DOUBLING

    def value(self, step: int) -> float:
        """Powers of 1.02 to four digits: searches that begin elsewhere meet at the same rates."""
        return float(f"{(1 + PRECISION) ** step:.4g}")

    def config(self, step: int) -> RunConfig:
        return at_rate(self.base, self.value(step))

    def requests_per_s(self, step: int) -> float:
        return self.value(step)


@dataclass(frozen=True, slots=True)
class ReplicaAxis:
    """Engines for a load that stays: step -n is n of them, so that a higher step is a heavier load for
    each."""

    base: RunConfig
    rate: float
    name = "replicas"
    unit = "replicas"
    first = -1
    lightest = -MOST_REPLICAS
    heaviest = -1

    def heavier(self, step: int) -> int | None:
        return None if step >= self.heaviest else min(step // 2, self.heaviest)

    def lighter(self, step: int) -> int | None:
        return None if step <= self.lightest else max(2 * step, self.lightest)

    def value(self, step: int) -> float:
        return -step

    def config(self, step: int) -> RunConfig:
        fleet = {**(self.base.resolved.get("fleet") or {}), "replicas": -step}
        return changed(self.base, fleet=fleet)

    def requests_per_s(self, step: int) -> float:
        return self.rate


def axis_of(name: str, config: RunConfig, workload: Workload) -> Axis:
    """The axis `name` for `config`, whose requests are `workload`. Raises `InputError` where its arrivals
    have no rate."""
    rate = rate_of(config, workload)
    fixed = [key for key in ("prefill", "decode", "devices") if (config.resolved.get("fleet") or {}).get(key)]
    if name == "replicas" and fixed:
        raise InputError(
            f"{config.where}: fleet.{fixed[0]}: --axis replicas counts engines that are alike and do all, "
            "expected a fleet of replicas and router alone, or --axis rate"
        )
    if name == "rate" and (config.measure.skip_s or config.measure.until_s is not None):
        raise InputError(
            f"{config.where}: measure: a span in seconds has other requests at every rate, expected "
            "measure.skip_requests alone"
        )
    return RateAxis(config, rate) if name == "rate" else ReplicaAxis(config, rate)


def rate_of(config: RunConfig, workload: Workload) -> float:
    """Requests a second of `config` as it is: that of its arrival process, else the recorded mean."""
    spec = parse_workload(config.workload, config.where)
    arrival = None if isinstance(spec, TraceSpec) and spec.arrival is None else _arrival(config)
    if arrival is not None:
        rate = getattr(arrival, "rate", None)
        if rate is None:
            raise InputError(
                f"{config.where}: workload.arrival: {arrival.process} arrivals have no rate, expected "
                "poisson, gamma or constant ones, or a trace with times"
            )
        return float(rate)
    span_ns = workload.requests[-1].arrival_ns
    if not span_ns:
        raise InputError(f"{config.where}: workload: all requests arrive at once, expected a rate to change")
    return 1e9 * (len(workload.requests) - 1) / span_ns


def _arrival(config: RunConfig) -> Any:
    spec = parse_workload(config.workload, config.where)
    if isinstance(spec, LiveSpec):
        raise InputError(f"{config.where}: workload.kind: live has no rate, expected requests that are known")
    return resolve_preset(spec).arrival if isinstance(spec, PresetSpec) else spec.arrival


def at_rate(config: RunConfig, rate: float) -> RunConfig:
    """`config` with its arrivals at `rate`: scaled, never drawn anew."""
    workload = copy.deepcopy(dict(config.workload))
    if workload.get("arrival") is not None:
        workload["arrival"] = {**workload["arrival"], "rate": rate}
    elif workload["kind"] == "synthetic":
        workload["arrival"] = {"process": "burst", "rate": rate}  # which `rate_of` has refused
    else:
        workload.pop("time_scale", None)
        workload["rate"] = rate
    return changed(config, workload=workload)


def one_at_a_time(config: RunConfig) -> RunConfig:
    """`config` with every request alone: what no rate can be better than. Of what is left out only the first
    requests are known."""
    workload = copy.deepcopy(dict(config.workload))
    if config.measure != EVERYTHING:
        config = changed(config, measure={"skip_requests": config.measure.skip_requests})
    if workload["kind"] == "trace" and workload.get("arrival") is None:
        workload.pop("time_scale", None)
        return changed(config, workload={**workload, "rate": 1e6, "concurrency": 1})
    for key in ("rate", "concurrency"):
        workload.pop(key, None)
    return changed(config, workload={**workload, "arrival": Closed(concurrency=1).model_dump()})


def with_poisson(config: RunConfig, rate: float) -> RunConfig | None:
    """`config` with independent arrivals at the same rate; None where they are that already, or where its
    lengths come with its times."""
    spec = parse_workload(config.workload, config.where)
    is_trace = isinstance(spec, TraceSpec) and spec.arrival is None
    arrival = None if is_trace else _arrival(config)
    if isinstance(arrival, Poisson) or (isinstance(arrival, Gamma) and arrival.cv == 1):
        return None
    workload = copy.deepcopy(dict(config.workload))
    for key in ("time_scale", "rate"):
        workload.pop(key, None)
    concurrency = workload.pop("concurrency", None) or getattr(arrival, "concurrency", None)
    poisson = {"process": "poisson", "rate": rate}
    if concurrency is not None:
        poisson["concurrency"] = concurrency
    result = changed(config, workload={**workload, "arrival": poisson})
    try:
        load_workload(parse_workload(result.workload, result.where), result.seed, result.base_dir)
    except InputError:  # ServeGen's windows
        return None
    return result


def changed(config: RunConfig, **sections: Mapping[str, Any] | int) -> RunConfig:
    """`config` with whole sections replaced, checked again."""
    return parse_config({**copy.deepcopy(dict(config.resolved)), **sections}, config.base_dir, config.where)
