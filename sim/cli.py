"""The simulator's commands: `run` one configuration, `sweep` a grid of them, `replay` and `predict` recorded
runs, `fit` a latency model to a profile, `explain` a prediction, `transfer` for what scaling to another card
is worth, `hindsight` a study, `bench` the simulator."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policies.config.runconfig import load_config
from policies.core.errors import InputError
from policies.core.seam.batch import BATCH_STAGES
from policies.process.command import OneLineParser, add_objectives, add_overrides, exit_status
from workloads.serving.options import add_serve_options, place_of


def main(arguments: Sequence[str]) -> int:
    """Parse and run; return the exit status (0 done, 1 the run failed its check, 2 wrong input)."""
    parser = OneLineParser(prog="sim", description="Simulate scheduling policies for looped language models.")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser
    )
    run = commands.add_parser("run", help="one simulation")
    run.add_argument("config", type=Path, metavar="CONFIG.yaml")
    run.add_argument("--no-plots", action="store_true", help="write no plots and no Perfetto trace")
    run.set_defaults(action=_run)
    sweep = commands.add_parser("sweep", help="a grid of simulations, in parallel, resumable")
    sweep.add_argument("config", type=Path, metavar="SWEEP.yaml")
    sweep.add_argument("--jobs", type=int, default=-1, help="processes; -1 for all cores")
    sweep.set_defaults(action=_sweep)
    capacity = commands.add_parser(
        "capacity", help="the highest rate, or the fewest replicas, at which objectives hold"
    )
    capacity.add_argument("config", type=Path, metavar="CONFIG.yaml", help="a run's or a sweep's")
    capacity.add_argument("--axis", choices=("rate", "replicas"), default="rate")
    capacity.add_argument(
        "--seeds",
        type=int,
        default=None,
        metavar="N",
        help="seeds, for an interval (default: 3 of a workload that is drawn, else 1)",
    )
    capacity.set_defaults(action=_capacity)
    for command in (sweep, capacity):
        command.add_argument(
            "--cluster",
            default=None,
            metavar="dask://HOST:PORT",
            help="run the cells on the workers of a Dask scheduler, which share this folder",
        )
    capacity.add_argument("--jobs", type=int, default=-1, help="processes; -1 for all cores")
    replay = commands.add_parser(
        "replay", help="decide recorded runs of either world again: every batch must be equal"
    )
    replay.set_defaults(action=_replay)
    serve = commands.add_parser(
        "serve", help="the twin on the wall clock, for clients of OpenAI's API over HTTP"
    )
    serve.add_argument("config", type=Path, metavar="CONFIG.yaml")
    serve.add_argument("--no-plots", action="store_true", help="write no plots and no Perfetto trace")
    add_overrides(serve)
    add_objectives(serve)
    add_serve_options(serve)
    serve.set_defaults(action=_serve)
    fit = commands.add_parser("fit", help="a latency model from a profile of a device")
    fit.add_argument("profile", type=Path, metavar="PROFILE.csv")
    fit.add_argument("--out", type=Path, required=True, metavar="MODEL.json")
    fit.set_defaults(action=_fit)
    explain = commands.add_parser("explain", help="where a predicted time comes from")
    explain.add_argument(
        "device", metavar="MODEL", help="a model file or any name that a config's `device` takes"
    )
    explain.add_argument(
        "--batch",
        required=True,
        metavar="RANGES",
        help="as in batches.csv: request:stage:depth:start:count ...",
    )
    explain.add_argument(
        "--stage",
        choices=[str(stage) for stage in BATCH_STAGES],
        help="of the batch; by default that of its ranges",
    )
    explain.add_argument("--loops", type=int, help="recurrent loops; by default what the stage runs at once")
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(action=_explain)
    predict = commands.add_parser(
        "predict", help="simulate what recorded runs did: their decisions, each batch, and the whole run"
    )
    predict.add_argument(
        "--device",
        default=None,
        metavar="NAME|MODEL.json",
        help="latency model (default: the runs' `device`)",
    )
    predict.add_argument("--jobs", type=int, default=-1, help="processes; -1 for all cores")
    predict.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="where the simulated runs go, one for each config",
    )
    predict.set_defaults(action=_predict)
    weights = commands.add_parser(
        "loop-weights",
        help="after how many loops tokens of recorded runs left, as a config's exit.loop_weights",
    )
    weights.set_defaults(action=_loop_weights)
    for command in (replay, predict, weights):
        command.add_argument(
            "runs", nargs="+", metavar="RUN", help="run directories, packs, or folders that hold some"
        )
    hindsight = commands.add_parser(
        "hindsight", help="a policy that sizes its chunks beside the best fixed setting of a grid"
    )
    hindsight.add_argument("study", type=Path, metavar="STUDY.yaml")
    hindsight.add_argument("--traces", type=Path, default=None, metavar="DIR", help="where its traces lie")
    hindsight.add_argument("--jobs", type=int, default=-1, help="processes; -1 for all cores")
    add_overrides(hindsight)
    hindsight.set_defaults(action=_hindsight)
    transfer = commands.add_parser(
        "transfer", help="how far off it is to scale one device to another card, where both are known"
    )
    transfer.set_defaults(action=_transfer)
    bench = commands.add_parser("bench", help="iterations per second, start-up time, memory")
    bench.add_argument(
        "--trace", type=Path, default=None, help="also simulate this whole trace and report its peak memory"
    )
    bench.set_defaults(action=_bench)
    for command in (run, sweep, capacity):
        add_overrides(command)
        add_objectives(command)
    for command in (run, sweep):
        command.add_argument(
            "--log",
            choices=("none", "requests", "batches"),
            default="batches",
            help="logs to keep: batches is requests.csv and batches.csv (default); without batches.csv there "
            "are no plots and no trace, figures are the same",
        )
    options = parser.parse_args(arguments)
    return exit_status("sim", lambda: int(options.action(options)))


def _run(options: argparse.Namespace) -> int:
    from results.find import replicas_of
    from results.fleet import replica_rows
    from results.load import load_run
    from results.table import print_table
    from sim.progress import Progress
    from sim.run import simulate

    path, summary = simulate(
        load_config(options.config, options.set),
        options.out,
        plots=not options.no_plots,
        log=options.log,
        on_ended=Progress("requests").count,
    )
    print_table(replica_rows(summary, [load_run(replica).summary for replica in replicas_of(path)]))
    for note in summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    print(f"run directory: {path}", file=sys.stderr)
    if summary["status"] == "failed":
        refusals = [f"{count} refused: {reason}" for reason, count in summary["refusal_reasons"].items()]
        print(f"sim: the run failed: {'; '.join([*summary['notes'][-1:], *refusals[:1]])}", file=sys.stderr)
    return 0 if summary["status"] == "complete" else 130 if summary["status"] == "interrupted" else 1


def _serve(options: argparse.Namespace) -> int:
    place = place_of(options)
    config = load_config(options.config, options.set, {"kind": "live"})
    from results.table import print_table
    from sim.serve import serve

    path, summary = serve(config, place, options.out, plots=not options.no_plots)
    print_table([summary])
    for note in summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    print(f"run directory: {path}", file=sys.stderr)
    if not summary["num_requests"]:
        return 0
    return 0 if summary["status"] == "complete" else 130 if summary["status"] == "interrupted" else 1


def _sweep(options: argparse.Namespace) -> int:
    from results.sweep import write_sweep
    from results.table import print_table
    from sim.progress import Progress
    from sim.sweeping import load_cells, run_sweep

    _check_jobs(options.jobs)
    out = _out(options, options.config.stem)
    cells = load_cells(options.config, options.set, out)
    progress, results = Progress("cells"), []
    for result in run_sweep(cells, options.jobs, options.log, options.cluster, out):
        results.append(result)
        if not sys.stderr.isatty():  # there is a bar
            progress.count(len(cells))
    order = {cell.directory: at for at, cell in enumerate(cells)}
    results.sort(key=lambda result: order[result[0].directory])
    written = [(cell.axes, cell.directory, summary) for cell, summary in results]
    files = write_sweep(written, out, jobs=options.jobs)
    print_table([summary for _, summary in results])
    print(f"{', '.join(file.name for file in files)} in {out}", file=sys.stderr)
    others = {path.parent for path in out.glob("cells/*/summary.json")} - {*order}
    if others:
        print(
            f"note: {out} has {len(others)} cells of other sweeps too, and so has a report of it",
            file=sys.stderr,
        )
    return 0 if all(summary["status"] == "complete" for _, summary in results) else 1


def _capacity(options: argparse.Namespace) -> int:
    from sim.capacity.command import capacity

    _check_jobs(options.jobs)
    if options.seeds is not None and not 1 <= options.seeds <= 1000:
        raise InputError(f"--seeds: {options.seeds}, expected at least 1 and at most 1,000")
    rows = capacity(
        options.config,
        options.set,
        axis=options.axis,
        seeds=options.seeds,
        jobs=options.jobs,
        cluster=options.cluster,
        out=_out(options, f"capacity-{options.config.stem}"),
    )
    return 0 if any(row.value is not None for row in rows) else 1


def _out(options: argparse.Namespace, name: str) -> Path:
    """The output folder; whole where others must find it."""
    if options.cluster is not None:
        from sim.cluster import check_address

        check_address(options.cluster)
    out: Path = options.out or Path("results/runs") / name
    return out if options.cluster is None else out.resolve()


def _hindsight(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from results.hindsight import hindsight_lines, write_hindsight
    from sim.hindsight import load_study, run_study
    from sim.progress import Progress

    _check_jobs(options.jobs)
    out = options.out or Path("results/runs") / options.study.stem
    tasks = load_study(options.study, options.set, options.traces)
    order = [(task.traffic, task.objectives["ttft_ms"], task.objectives["itl_ms"]) for task in tasks]
    found: list[dict[str, Any]] = []
    try:
        for rows in run_study(tasks, options.jobs, Progress("runs").count):
            found.extend(asdict(row) for row in rows)
            print("\n".join(hindsight_lines([asdict(row) for row in rows])), flush=True)
    finally:
        found.sort(key=lambda row: order.index((row["traffic"], row["ttft_ms"], row["itl_ms"])))
        if found:
            files = write_hindsight(found, out)
            print(f"{len(found)} rows; {', '.join(file.name for file in files)} in {out}", file=sys.stderr)
    return 0


def _replay(options: argparse.Namespace) -> int:
    from results.find import replicas_of
    from sim.predict import recorded_runs
    from sim.replay import replay

    is_equal = True
    for run in recorded_runs(options.runs):
        for path in replicas_of(run.path) or [run.path]:
            outcome = replay(path)
            print(outcome)
            is_equal = is_equal and outcome.difference is None
    return 0 if is_equal else 1


def _predict(options: argparse.Namespace) -> int:
    from sim.predict import predict

    _check_jobs(options.jobs)
    return 0 if predict(options.runs, options.out, options.device, options.jobs) else 1


def _loop_weights(options: argparse.Namespace) -> int:
    from results.find import find_runs
    from sim.predict import loop_weights

    print(f"exit.loop_weights={list(loop_weights(find_runs(options.runs)[0]))}")
    return 0


def _fit(options: argparse.Namespace) -> int:
    from sim.fit import error_lines, fit_file

    model, was_current = fit_file(options.profile, options.out)
    print("\n".join(error_lines(model)))
    print(
        f"{options.out}: {'up to date' if was_current else 'fitted'}, profile {model.profile_sha256[:12]}",
        file=sys.stderr,
    )
    return 0


def _explain(options: argparse.Namespace) -> int:
    from sim.explain import explain

    explanation = explain(options.device, options.batch.strip(), options.stage, options.loops)
    print(json.dumps(explanation.as_json(), indent=1) if options.json else "\n".join(explanation.lines()))
    return 0


def _transfer(options: argparse.Namespace) -> int:
    from sim.transfers import print_known_errors

    print_known_errors()
    return 0


def _bench(options: argparse.Namespace) -> int:
    from sim.bench import main as run_bench

    if options.trace is not None and not options.trace.is_file():
        raise InputError(f"--trace {options.trace}: no such file")
    run_bench(options.trace)
    return 0


def _check_jobs(jobs: int) -> None:
    if jobs == 0 or jobs < -1:
        raise InputError(f"--jobs: {jobs}, expected -1 or a number of processes")
