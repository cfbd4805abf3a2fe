"""The best fixed policy in hindsight: what a policy that sizes its chunks gains over whoever had known the
best fixed setting beforehand.

A study (`sim/configs/slo-study.yaml`) names traffics, objectives, a grid of fixed settings and the sized one.
For every traffic and objectives, the highest rate that any fixed setting sustains is sought; then all
settings run at loads relative to it. Every rate is the same requests with all arrival times scaled.

No setting of the grid is left out: what a run can still meet only falls as requests end, so it stops once it
cannot serve `SLACK` of all requests more than the best run known at that rate. So the best one's figure is
never more than `SLACK` too low, and where the best known leaves no more than that, nobody else is asked.
"""

import copy
import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from policies.config.overrides import apply_overrides, read_yaml, set_key
from policies.config.runconfig import RunConfig, model_shape, parse_config, parse_objectives
from policies.config.sections import check_keys
from policies.core.errors import InputError
from policies.core.seam.objectives import Objectives
from policies.core.seam.request import Request
from policies.process.sentences import shown
from results.goodput import Goodput
from sim.run import Simulation
from workloads.drawn import MAX_TOKENS
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

STEP = 1.05
"""Rates that are tried for what a setting sustains are powers of this times the recorded one."""
SLACK = 0.005
"""Of all requests: to so much the best fixed setting is known."""
FURTHEST = 100
"""The power of `STEP` beyond which no rate is tried: 130 times the recorded one, or a 130th of it."""
WAVE = 16
"""Settings that are asked at once: what the first of them show bounds the next."""
KEYS = ("base", "fixed", "sized", "traffic", "objectives", "loads")


@dataclass(frozen=True, slots=True)
class Setting:
    """A fixed policy with its options, or the sized one."""

    name: str
    keys: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One traffic under one pair of objectives."""

    traffic: str
    raw: Mapping[str, Any]
    objectives: Mapping[str, float]
    fixed: tuple[Setting, ...]
    sized: Setting
    loads: tuple[float, ...]
    base_dir: Path
    where: str

    def config(self, setting: Setting) -> RunConfig:
        raw = apply_overrides(self.raw, ())
        for key, value in setting.keys.items():
            set_key(raw, key, copy.deepcopy(value))
        raw["slo"] = dict(self.objectives)
        if setting is self.sized:
            for key in ("ttft_ms", "itl_ms"):
                set_key(raw, f"policy.{key}", self.objectives[key])
        return parse_config(raw, self.base_dir, f"{self.where}: {self.traffic}, {setting.name}")


@dataclass(frozen=True, slots=True)
class Served:
    """Of `requests` so many met; when the run was not `whole`, so many had met when it was stopped."""

    requests: int
    met: int
    whole: bool
    missed_by: Mapping[str, int]

    @property
    def share(self) -> float:
        return self.met / self.requests


@dataclass(frozen=True, slots=True)
class Row:
    """One traffic, objectives and load: the best fixed setting beside the sized one. Rates and goodput in
    requests a second, goodput as share met x rate. `sustained_by` is the fixed setting that holds at the
    highest rate."""

    traffic: str
    ttft_ms: float
    itl_ms: float
    requests: int
    fixed_sustains: float
    sustained_by: str
    sized_sustains: float
    load: float
    rate: float
    best_fixed: str
    fixed_met: int
    sized_met: int
    fixed_goodput: float
    sized_goodput: float
    fixed_missed_by: str
    sized_missed_by: str
    runs: int
    whole_runs: int

    @property
    def gain(self) -> float:
        """Goodput of the sized policy over the best fixed one's, less 1."""
        return self.sized_met / self.fixed_met - 1 if self.fixed_met else math.inf


def load_study(path: Path, overrides: Sequence[str], traces: Path | None) -> list[Task]:
    """The tasks of a study file. Raises `InputError`."""
    raw = apply_overrides(read_yaml(path), overrides)
    check_keys(raw, KEYS, str(path))
    for key, kind in zip(KEYS, (dict, dict, dict, dict, list, list), strict=True):
        if not isinstance(raw.get(key), kind) or not raw[key]:
            word = "mapping" if kind is dict else "list"
            raise InputError(f"{path}: {key}: {shown(raw.get(key))}, expected a {word} with something in it")
    for name, values in raw["fixed"].items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{path}: fixed.{name}: {shown(values)}, expected a list of values")
    fixed = tuple(_settings(raw["fixed"]))
    sized = Setting("sized", raw["sized"])
    loads = tuple(raw["loads"])
    if not all(isinstance(load, int | float) and 0 < load <= 100 for load in loads):
        raise InputError(f"{path}: loads: {shown(raw['loads'])}, expected factors of what is sustained")
    objectives = []
    for values in raw["objectives"]:
        asked = parse_objectives(values, f"{path}: objectives")
        if asked.ttft_ms is None or asked.itl_ms is None:
            raise InputError(f"{path}: objectives: {shown(values)}, expected ttft_ms and itl_ms")
        objectives.append({"ttft_ms": asked.ttft_ms, "itl_ms": asked.itl_ms, "share": asked.share})
    tasks = []
    for (traffic, sections), asked_ms in itertools.product(raw["traffic"].items(), objectives):
        if not isinstance(sections, Mapping) or not isinstance(sections.get("workload"), Mapping):
            raise InputError(f"{path}: traffic.{traffic}: expected a mapping with its workload")
        mine = {**raw["base"], **copy.deepcopy(dict(sections))}
        name = mine["workload"].get("path")
        if traces is not None and isinstance(name, str):
            mine["workload"]["path"] = str(traces / name)
        tasks.append(Task(str(traffic), mine, asked_ms, fixed, sized, loads, path.parent, str(path)))
    for task in tasks[:: len(objectives)]:
        for setting in (sized, *fixed):
            task.config(setting)
        Simulation.prepare(task.config(sized), workload_of(task))
    return tasks


def _settings(axes: Mapping[str, Sequence[Any]]) -> Iterator[Setting]:
    """All combinations but chunks that no batch could hold."""
    for values in itertools.product(*axes.values()):
        keys = dict(zip(axes, values, strict=True))
        chunk = keys.get("scheduler.prefill_chunk_size")
        budget = keys.get("scheduler.max_num_batched_tokens")
        if chunk is None or budget is None or chunk <= budget:
            yield Setting(" ".join(str(value) for value in values), keys)


def run_study(tasks: Sequence[Task], jobs: int, on_run: Callable[[], object]) -> Iterator[list[Row]]:
    """The rows of every task as it is done; `on_run` is called after every run. Tasks are threads that share
    `jobs` processes, so none is idle while a task has only one run to ask for; what they find does not depend
    on `jobs`."""
    pool = ProcessPoolExecutor(jobs if jobs > 0 else os.cpu_count(), initializer=_ignore_ctrl_c)
    threads = ThreadPoolExecutor(len(tasks))
    try:
        for done in as_completed([threads.submit(run_task, task, pool, on_run) for task in tasks]):
            yield done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        threads.shutdown(wait=False, cancel_futures=True)


def run_task(task: Task, pool: Executor, on_run: Callable[[], object]) -> list[Row]:
    """One row for every load."""
    hindsight = Hindsight(task, pool, on_run)
    power, setting = hindsight.sustained(task.fixed)
    best, own = hindsight.rate(power), hindsight.rate(hindsight.sustained((task.sized,), power)[0])
    rates = [load * best for load in task.loads]
    rows = []
    for load, rate, sized in zip(
        task.loads, rates, hindsight.serve([(task.sized, rate, 0) for rate in rates]), strict=True
    ):
        before = hindsight.runs, hindsight.whole_runs
        name, fixed = hindsight.best(rate)
        rows.append(
            Row(
                traffic=task.traffic,
                ttft_ms=task.objectives["ttft_ms"],
                itl_ms=task.objectives["itl_ms"],
                requests=sized.requests,
                fixed_sustains=best,
                sustained_by=setting,
                sized_sustains=own,
                load=load,
                rate=rate,
                best_fixed=name,
                fixed_met=fixed.met,
                sized_met=sized.met,
                fixed_goodput=rate * fixed.share,
                sized_goodput=rate * sized.share,
                fixed_missed_by=_spelled(fixed.missed_by),
                sized_missed_by=_spelled(sized.missed_by),
                runs=hindsight.runs - before[0],
                whole_runs=hindsight.whole_runs - before[1],
            )
        )
    return rows


class Hindsight:
    """Runs of one task. Settings are asked in the order in which they have done well, `WAVE` at a time."""

    def __init__(self, task: Task, pool: Executor, on_run: Callable[[], object] = lambda: None) -> None:
        self.task, self.pool, self.on_run = task, pool, on_run
        self.order = list(task.fixed)
        self.runs = self.whole_runs = 0
        self.requests, self.recorded_rate = recorded(task)

    def serve(self, asked: Sequence[tuple[Setting, float, int]]) -> list[Served]:
        """All requests under each (setting, rate, at least): arriving at `rate` a second, ended early once
        fewer than so many can meet."""
        futures = [self.pool.submit(run_one, self.task, *item) for item in asked]
        found = []
        for future in futures:
            served = future.result()
            self.runs += 1
            self.whole_runs += served.whole
            self.on_run()
            found.append(served)
        return found

    def best(self, rate: float) -> tuple[str, Served]:
        """The fixed setting that serves most as promised at `rate`, to `SLACK`."""
        first, *others = self.order
        best, served = first, self.serve([(first, rate, 0)])[0]
        for wave in batched(others):
            # More than this must be met to be told from the best one.
            known = served.met + SLACK * served.requests
            if known >= served.requests:
                break
            results = self.serve([(setting, rate, int(known) + 1) for setting in wave])
            for setting, result in zip(wave, results, strict=True):
                if result.whole and result.met > served.met:
                    best, served = setting, result
        self._prefer(best)
        return best.name, served

    def sustained(self, settings: Sequence[Setting], power: int = 0) -> tuple[int, str]:
        """The highest rate at which one of `settings` holds, as a power of `STEP` times the recorded one, and
        which; sought from `power` on. A setting that has failed at one rate is not asked at a higher one."""
        failed_at = {setting.name: 10**9 for setting in settings}
        held: dict[int, str | None] = {}

        def holds(power: int) -> bool:
            if power not in held:
                held[power] = self._who_holds(settings, power, failed_at)
            return held[power] is not None

        low, step = power, 4
        while not holds(low):
            low -= step
            if low < -FURTHEST:
                raise self._refusal("none", low + step)
        high = low + step
        while holds(high):
            low, high = high, high + step
            if high > FURTHEST:
                raise self._refusal("all", low)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low, str(held[low])

    def _refusal(self, which: str, power: int) -> InputError:
        return InputError(
            f"{self.task.where}: {self.task.traffic}: {self.task.objectives} held at {which} of the rates "
            f"that were tried, to {self.rate(power):.3g} a second, expected some between"
        )

    def rate(self, power: int) -> float:
        return self.recorded_rate * STEP**power

    def _who_holds(self, settings: Sequence[Setting], power: int, failed_at: dict[str, int]) -> str | None:
        asked = [item for item in (*self.order, self.task.sized) if item in settings]
        asked = [item for item in asked if failed_at[item.name] > power]
        for wave in ([*asked[:1]], *batched(asked[1:])):
            at_least = math.ceil(self.task.objectives["share"] * self.requests)
            for setting, served in zip(
                wave, self.serve([(item, self.rate(power), at_least) for item in wave]), strict=True
            ):
                if served.whole:
                    self._prefer(setting)
                    return setting.name
                failed_at[setting.name] = power
        return None

    def _prefer(self, setting: Setting) -> None:
        if setting in self.order:
            self.order.remove(setting)
            self.order.insert(0, setting)


def batched(settings: Sequence[Setting]) -> Iterator[Sequence[Setting]]:
    return (settings[at : at + WAVE] for at in range(0, len(settings), WAVE))


@lru_cache(maxsize=4)
def _workload(spelled: str, seed: int, base_dir: Path, where: str) -> Workload:
    return load_workload(parse_workload(json.loads(spelled), where), seed, base_dir)


def workload_of(task: Task, rate: float | None = None) -> Workload:
    """The requests of a task as they were recorded, or arriving at `rate` a second; only those that the model
    and the user's `max_context` admit."""
    config = task.config(task.sized)
    found = _workload(json.dumps(config.workload), config.seed, config.base_dir, task.where)
    longest = min(model_shape(config).max_context_tokens, found.max_context or MAX_TOKENS)
    requests = [item for item in found.requests if item.prompt_tokens + item.max_tokens <= longest]
    if len(requests) < 2 or requests[0].arrival_ns == requests[-1].arrival_ns:
        raise InputError(f"{task.where}: {task.traffic}: expected requests that arrive at different times")
    factor = 1.0 if rate is None else _rate(requests) / rate
    moved = (replace(item, arrival_ns=round(item.arrival_ns * factor)) for item in requests)
    return replace(found, requests=tuple(moved))


def recorded(task: Task) -> tuple[int, float]:
    """How many requests a task has, and how many a second arrived as recorded."""
    requests = workload_of(task).requests
    return len(requests), _rate(requests)


def _rate(requests: Sequence[Request]) -> float:
    return 1e9 * (len(requests) - 1) / (requests[-1].arrival_ns - requests[0].arrival_ns)


def run_one(task: Task, setting: Setting, rate: float, at_least: int) -> Served:
    """Run without a log; end as soon as fewer than `at_least` of the requests can meet."""
    simulation = Simulation.prepare(task.config(setting), workload_of(task, rate))
    goodput = Goodput(Objectives(**task.objectives))
    total = len(simulation.workload.requests)
    is_lost = False

    def is_stopped() -> bool:
        nonlocal is_lost
        is_lost = total - goodput.missed < at_least
        return is_lost

    engine = simulation.engine(on_ended=lambda record: goodput.add(record, True, True))
    try:
        simulation.backend(engine, is_stopped=is_stopped).run()
    except KeyboardInterrupt:
        if not is_lost:
            raise
    missed_by = dict(sorted(goodput.missed_by.items()))
    return Served(total, goodput.met, total - goodput.missed >= at_least, missed_by)


def _ignore_ctrl_c() -> None:
    """Ctrl-C ends the study, which ends its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _spelled(missed_by: Mapping[str, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in missed_by.items())
