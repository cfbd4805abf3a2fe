"""A grid of capacity searches: cells and seeds in parallel, what was found kept at once."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.config.grid import load_grid
from policies.config.overrides import read_yaml
from policies.config.runconfig import RunConfig, load_config
from policies.core.errors import InputError
from results.finish import changed_options
from results.identity import RunIdentity, config_hash, policy_label
from results.sweep import workload_labels
from sim.capacity.axes import Axis, axis_of, changed, one_at_a_time, with_poisson
from sim.capacity.kept import keep, kept, place
from sim.capacity.probe import Probe, measured_requests, probe
from sim.capacity.search import Found, search
from sim.parallel import in_parallel
from sim.run import Simulation, inputs_sha256
from workloads.burstiness import Burstiness
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

SEEDS_OF_CHANCE = 3
"""Seeds of a workload that is drawn, unless more or fewer are asked for."""
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """One search: a config with its seed, where to keep what is found, what its workload is called, and how
    near to the answer a second opinion must be (0: none is asked for)."""

    config: RunConfig
    axis: str
    label: str
    folder: Path
    cell: int
    near: int = 8


def load_questions(
    path: Path, overrides: Sequence[str], axis: str, seeds: int | None, out: Path
) -> list[Question]:
    """The cells of a config or a sweep file, each with every seed. A policy that is told latencies is told
    those that are judged.

    Raises `InputError`, before anything runs, for whatever is wrong with any of them.
    """
    raw = read_yaml(path)
    grid = load_grid(path, overrides) if "grid" in raw else [({}, load_config(path, overrides))]
    labels = workload_labels([(axes, config.resolved) for axes, config in grid])
    questions, drawn, seen = [], {}, set()
    workloads: dict[str, Workload] = {}
    for cell, ((axes, config), label) in enumerate(zip(grid, labels, strict=True)):
        config = _told(config)
        if config_hash(config.resolved) in seen:
            raise InputError(f"{path}: grid: {dict(axes)} occurs twice, expected it once")
        seen.add(config_hash(config.resolved))
        key = json.dumps([config.resolved["workload"], config.seed], sort_keys=True, default=str)
        if key not in drawn:
            drawn[key] = _is_drawn(config)
        workload = Simulation.prepare(config.parts()[0], workloads.get(key)).workload
        workloads[key] = workload
        measured_requests(workload, config.measure)
        axis_of(axis, config, workload)
        count = seeds or (SEEDS_OF_CHANCE if drawn[key] else 1)
        for seed in range(config.seed, config.seed + count):
            questions.append(Question(changed(config, seed=seed), axis, label, out, cell))
    return questions


def _told(config: RunConfig) -> RunConfig:
    if config.slo is None:
        raise InputError(
            f"{config.where}: slo: missing, expected what is to hold: --slo ttft_ms=500,itl_ms=20"
        )
    names = {item.name for item in dataclasses.fields(config.policy)}  # type: ignore[arg-type]
    told = {name: limit for name, limit in config.slo.limits_ms.items() if name in names}
    return changed(config, policy={**config.resolved["policy"], **told}) if told else config


def _is_drawn(config: RunConfig) -> bool:
    """Whether another seed is another workload."""
    spec = parse_workload(config.workload, config.where)
    one, other = (load_workload(spec, seed, config.base_dir) for seed in (config.seed, config.seed + 1))
    return list(one.requests) != list(other.requests)


def find_all(
    questions: Sequence[Question], jobs: int, cluster: str | None, out: Path
) -> list[tuple[Question, Answer]]:
    """Every answer, in order; what was found before is not searched again."""
    before = [(question, kept(_answer_path(question))) for question in questions]
    todo = [question for question, answer in before if answer is None]
    # What takes longest goes first, so that no core is left with it at the end.
    todo.sort(key=lambda item: (item.config.policy.name != "slo", item.config.scheduler.chunk_tokens))
    found = {id(question): answer for question, answer in before if answer is not None}
    for question, answer in in_parallel(_find, todo, jobs, "searches", cluster, out):
        found[id(question)] = answer
    lacking = {question.cell for question in questions if found[id(question)]["value"] is None}
    if len(lacking) == len({question.cell for question in questions}):
        for question, whole in in_parallel(_alone, questions, jobs, "requests alone", cluster, out):
            found[id(question)] = {**found[id(question)], "alone": whole}
    return [(question, found[id(question)]) for question in questions]


def _alone(question: Question) -> Answer | None:
    """How many would keep the objectives at best, where none of the searches has found a load; None after
    Ctrl-C."""
    try:
        return _figures(probe(one_at_a_time(question.config), question.folder / "probes", to_the_end=True))
    except KeyboardInterrupt:
        return None


def _answer_path(question: Question) -> Path:
    config = question.config
    return place(
        question.folder / "answers",
        config_hash(config.resolved),
        inputs_sha256(config),
        question.axis,
        question.near,
    )


def _find(question: Question) -> Answer | None:
    """Search; None after Ctrl-C, when every probe that has ended is kept."""
    config, probes = question.config, question.folder / "probes"
    spec = parse_workload(config.workload, config.where)
    axis = axis_of(question.axis, config, load_workload(spec, config.seed, config.base_dir))
    curve: dict[int, Probe] = {}
    alone: list[Probe] = []

    def ask(step: int) -> Probe:
        curve[step] = probe(axis.config(step), probes)
        return curve[step]

    def is_hopeless() -> bool:
        alone.append(probe(one_at_a_time(config), probes))
        return not alone[0].holds

    try:
        found = search(axis, ask, is_hopeless, question.near)
        if found.step is None and not alone:
            alone.append(probe(axis.config(axis.lightest), probes))
    except KeyboardInterrupt:
        return None
    answer = _answer(question, axis, found, curve, alone)
    keep(_answer_path(question), answer)
    return answer


def _answer(
    question: Question, axis: Axis, found: Found, curve: Mapping[int, Probe], alone: Sequence[Probe]
) -> Answer:
    config = question.config
    assert config.slo is not None
    step = found.step
    identity = RunIdentity.from_config(config.resolved, "sim", 0, workload=question.label)
    limit = None if step is None or found.is_open else curve.get(step + 1)
    replicas = len(config.parts())
    rate = None if step is None else axis.requests_per_s(step)
    if step is not None and axis.name == "replicas":
        replicas = int(axis.value(step))
    return {
        "axis": axis.name,
        "policy": policy_label({"policy": config.policy.name, "policy_options": _options(config)}),
        "prefill_chunk_size": identity.chunk_tokens,
        "workload": identity.workload,
        "model": identity.model,
        "device": identity.device,
        "seed": config.seed,
        "slo": {**config.slo.limits_ms, "share": config.slo.share},
        "value": None if step is None else axis.value(step),
        "requests_per_s": rate,
        "replicas": replicas,
        "is_open": found.is_open,
        "exceptions": [axis.value(item) for item in found.exceptions],
        "at": None if step is None else _figures(curve[step]),
        "beyond": None if limit is None else _figures(limit),
        "alone": _figures(alone[-1]) if step is None and alone else None,
        "probes": [{"value": axis.value(item), **_figures(curve[item])} for item in sorted(curve)],
    }


def _options(config: RunConfig) -> dict[str, Any]:
    """What is set beside the policy's name, without what it is told of the objectives."""
    assert config.slo is not None
    changed_ones = changed_options(config.policy)
    return {key: value for key, value in changed_ones.items() if key not in config.slo.limits_ms}


def _figures(item: Probe) -> dict[str, Any]:
    return {**dataclasses.asdict(item), "share_met": item.share_met}


def poisson_questions(questions: Sequence[Question], rate: float) -> list[Question]:
    """The same cell with independent arrivals, for what burstiness costs; none where that cannot be."""
    found = []
    for question in questions:
        config = with_poisson(question.config, rate)
        if config is None:
            return []
        found.append(dataclasses.replace(question, config=config, near=0))
    return found


def burstiness(config: RunConfig) -> Burstiness:
    """Of the arrivals of `config`, as they are."""
    spec = parse_workload(config.workload, config.where)
    workload = load_workload(spec, config.seed, config.base_dir)
    return Burstiness.of([request.arrival_ns for request in workload.requests])
