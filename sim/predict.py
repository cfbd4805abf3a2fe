"""What the simulator says of runs that were measured: the half of a comparison that needs a latency model.

For every configuration among recorded runs it leaves one simulated run directory with three answers in it:
the run as the simulator would have it, from the same requests (`requests.csv`, `batches.csv`,
`summary.json`); whether the decisions of the measured runs are decided alike (`replay.json`); and the
predicted times of every batch that was really formed (`predicted.csv`). `results compare` holds these against
the measured runs.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import joblib

from policies.config.runconfig import RunConfig, load_config, model_shape
from policies.core.errors import InputError
from policies.core.seam.batch import ExecutionBatch
from policies.costs.fitted import FittedModel
from policies.costs.latency import HostLoop, LatencyModel
from policies.costs.models import load_device
from results.batchlog import LoggedBatch
from results.find import find_runs, replicas_of
from results.identity import RunIdentity, comparable, config_hash
from results.load import Run
from results.predictions import Replay, write_predictions, write_replays
from results.rundir import CONFIG
from sim.recorded import RecordedRun
from sim.replay import Outcome, replay
from sim.run import simulate
from workloads.spec import TraceSpec, parse_workload
from workloads.workload import RecordedOutputs, Workload


@dataclass(frozen=True, slots=True)
class Task:
    """One configuration: its measured runs (repeats), and the directory of the run that stands for them."""

    runs: tuple[Run, ...]
    config: RunConfig
    directory: Path


def recorded_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at `paths` whose logs were kept; a path that is a single run stays, log or not. Raises
    `InputError`."""
    runs = []
    for path in paths:
        found, _ = find_runs([path])
        runs += [run for run in found if run.has_logs or replicas_of(run.path)] if len(found) > 1 else found
    if not runs:
        raise InputError(
            f"{', '.join(map(str, paths))}: no run there has kept its requests.csv and batches.csv"
        )
    return runs


def predict(paths: Sequence[str | Path], out: Path, device: str | None, jobs: int = -1) -> bool:
    """Simulate what the runs at `paths` did on `device` (None: the one in their configs), each configuration
    below `out`.

    A run whose logs were not kept is simulated from its config, and neither replayed nor predicted batch by
    batch.

    Returns whether every decision of every run was decided alike. Prints a line for each. Raises `InputError`
    when a run cannot be simulated: its log is no log, or its workload is in a file that is not here and its
    own arrivals do not say enough.
    """
    tasks = plan(find_runs(paths)[0], out, device)
    differences: dict[str, None] = {}
    for task in tasks:
        latency = load_device(task.config.device, model_shape(task.config))
        if isinstance(latency, FittedModel):
            differences |= dict.fromkeys(filter(None, (latency.difference(run.summary) for run in task.runs)))
    for difference in differences:
        print(f"note: {difference}", file=sys.stderr)
    is_equal = True
    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator", batch_size=1)
    for lines, is_alike in parallel(joblib.delayed(run_task)(task) for task in tasks):
        print("\n".join(lines))
        is_equal = is_equal and is_alike
    print(f"{len(tasks)} simulated runs in {out}", file=sys.stderr)
    return is_equal


def plan(runs: Sequence[Run], out: Path, device: str | None) -> list[Task]:
    """Runs by configuration, in the order in which they come."""
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        by_config.setdefault(config_hash(comparable(run.config)), []).append(run)
    tasks = []
    for repeats in by_config.values():
        overrides = [f"device={device}"] if device else []
        exits = repeats[0].config.get("exit") or {}
        if (
            exits.get("mode") == "gate"
            and exits.get("loop_weights") is None
            and exits.get("threshold", 1) < 1
        ):
            overrides.append(f"exit.loop_weights={list(loop_weights(repeats))}")
        config = load_config(repeats[0].path / CONFIG, overrides)
        name = RunIdentity.from_config(config.resolved, "sim", repeats[0].num_loops).directory_name
        tasks.append(Task(tuple(repeats), config, out / "cells" / name))
    return tasks


def loop_weights(runs: Sequence[Run]) -> tuple[int, ...]:
    """How many decoded tokens of `runs` ran 1, 2, ... loops: `exit.loop_weights` of a simulation. Raises
    `InputError` where none was decoded."""
    counts = [run.summary.get("tokens_by_loops") or {} for run in runs]
    weights = tuple(
        sum(int(count.get(str(loops), 0)) for count in counts) for loops in range(1, runs[0].num_loops + 1)
    )
    if not any(weights):
        raise InputError(f"{runs[0].path}: tokens_by_loops has no decoded token, expected some")
    return weights


def run_task(task: Task) -> tuple[list[str], bool]:
    """Simulate, then replay every logged run and predict the batches of the first; what to print, and whether
    all was alike."""
    logged = [run for run in task.runs if run.has_logs]
    workload = recorded_workload(RecordedRun.read(logged[0].path)) if logged else None
    folder, _ = simulate(
        task.config, task.directory, workload=workload, label=task.runs[0].workload, plots=False
    )
    if not logged:
        return [f"{task.runs[0].path}: simulated; it has kept no log to replay"], True
    latency = load_device(task.config.device, model_shape(task.config))
    outcomes = [predict_batches(logged[0].path, latency, folder), *(replay(run.path) for run in logged[1:])]
    write_replays(folder, [_verdict(run, outcome) for run, outcome in zip(logged, outcomes, strict=True)])
    return [str(outcome) for outcome in outcomes], all(outcome.difference is None for outcome in outcomes)


def predict_batches(path: Path, latency: LatencyModel, folder: Path) -> Outcome:
    """Replay the run at `path` and write what `latency` says of each of its batches to `folder`."""
    rows: list[tuple[int, ...]] = []
    host = RecordedHost(latency.loop)

    def observe(row: LoggedBatch, batch: ExecutionBatch) -> None:
        said = latency.times(batch.work, batch.transfers)
        waiting_ns = said.waiting_ns(
            host.launched_ns(row) - said.launch_ns + latency.loop.mark_ns, row.started_ns
        )
        device_ns = said.device_ns + waiting_ns
        rows.append((batch.seq, said.select_ns, said.host_ns, device_ns, *said.components_after(waiting_ns)))

    outcome = replay(path, observe)
    write_predictions(folder, rows)
    return outcome


class RecordedHost:
    """When the recorded host had launched each batch: what the device's wait for a launch depends on, and no
    log says.

    The host chooses a batch when it is free again after the last thing it did, launching the batch before or
    collecting one, and is busy for the logged select and host times. `loop` says how long it takes to be
    free. Rows are asked for in order.
    """

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop
        self._free_ns = 0
        self._last_collected = -1
        self._collected_ns: dict[int, int] = {}

    def launched_ns(self, row: LoggedBatch) -> int:
        if row.after_seq > self._last_collected:
            self._free_ns = self._collected_ns[row.after_seq] + self._loop.after_collect_ns
        self._last_collected = row.after_seq
        self._collected_ns[row.seq] = row.collected_ns
        has_flights = row.after_seq < row.seq - 1
        launched_ns = self._loop.begins_ns(row.submitted_ns, self._free_ns, has_flights) + row.busy_ns
        self._free_ns = launched_ns + self._loop.after_submit_ns
        return launched_ns


def recorded_workload(run: RecordedRun) -> Workload | None:
    """The requests of `run` as a workload where its trace file is not here, None where the config gives them.

    An open trace's logged arrivals are its own. A cap on outstanding requests, clients that hung up, shared
    prefixes and exits need what only the file has: then reading the workload raises `InputError`.
    """
    spec = parse_workload(run.config.workload, run.config.where)
    if not isinstance(spec, TraceSpec) or Path(spec.path).is_file():
        return None
    if (
        run.concurrency is not None
        or run.patience_ns
        or run.config.cache.prefix_caching
        or run.config.exit.mode == "trace"
    ):
        return None
    by_id = sorted(run.outputs)
    if by_id != list(range(len(by_id))):
        raise InputError(
            f"{run.path}: request ids do not count from 0, expected a run that was not interrupted"
        )
    outputs = RecordedOutputs(array("q", (run.outputs[request_id] for request_id in by_id)))
    return Workload(Path(spec.path).stem, run.requests, outputs, max_context=spec.max_context)


def _verdict(run: Run, outcome: Outcome) -> Replay:
    return Replay(
        run.path.name,
        outcome.num_batches,
        None if outcome.difference is None else outcome.difference.sentence,
    )
