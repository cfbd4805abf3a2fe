"""The simulator's commands: `run` one configuration, `sweep` a grid of them, `replay` a recorded run, `bench` the simulator."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from policies.config import load_config
from policies.core.command import OneLineParser, exit_status
from policies.core.errors import InputError


def main(arguments: Sequence[str]) -> int:
    """Parse and run; return the exit status (0 done, 1 the run failed its check, 2 wrong input)."""
    parser = OneLineParser(prog="sim", description="Simulate scheduling policies for looped language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|sweep|replay|bench", parser_class=OneLineParser)
    run = commands.add_parser("run", help="one simulation")
    run.add_argument("config", type=Path, metavar="CONFIG.yaml")
    run.add_argument("--no-plots", action="store_true", help="write no plots and no Perfetto trace")
    run.set_defaults(action=_run)
    sweep = commands.add_parser("sweep", help="a grid of simulations, in parallel, resumable")
    sweep.add_argument("config", type=Path, metavar="SWEEP.yaml")
    sweep.add_argument("--jobs", type=int, default=-1, help="processes; -1 for all cores")
    sweep.add_argument("--no-batches", action="store_true", help="delete every cell's batches.csv once it is summarised")
    sweep.set_defaults(action=_sweep)
    replay = commands.add_parser("replay", help="decide a recorded run of either world again: every batch must be equal")
    replay.add_argument("run", type=Path, metavar="RUN_DIR")
    replay.set_defaults(action=_replay)
    bench = commands.add_parser("bench", help="iterations per second, start-up time, memory")
    bench.add_argument("--trace", type=Path, default=None, help="also simulate this whole trace and report its peak memory")
    bench.set_defaults(action=_bench)
    for command in (run, sweep):
        command.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a config key; may be repeated")
        command.add_argument("--out", type=Path, default=None, metavar="DIR")
    options = parser.parse_args(arguments)
    return exit_status("sim", lambda: int(options.action(options)))


def _run(options: argparse.Namespace) -> int:
    from results.table import print_table
    from sim.run import simulate

    path, summary = simulate(load_config(options.config, options.set), options.out, plots=not options.no_plots)
    print_table([summary])
    for note in summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    print(f"run directory: {path}", file=sys.stderr)
    if summary["status"] == "failed":
        refusals = [f"{count} refused: {reason}" for reason, count in summary["refusal_reasons"].items()]
        print(f"sim: the run failed: {'; '.join([*summary['notes'][-1:], *refusals[:1]])}", file=sys.stderr)
    return 0 if summary["status"] == "complete" else 130 if summary["status"] == "interrupted" else 1


def _sweep(options: argparse.Namespace) -> int:
    from results.sweep import write_sweep
    from results.table import print_table
    from sim.sweep import load_cells, run_sweep

    if options.jobs == 0 or options.jobs < -1:
        raise InputError(f"--jobs: {options.jobs}, expected -1 or a number of processes")
    out = options.out or Path("results/runs") / options.config.stem
    cells = load_cells(options.config, options.set, out)
    results = list(run_sweep(cells, options.jobs, not options.no_batches))
    order = {cell.directory: at for at, cell in enumerate(cells)}
    results.sort(key=lambda result: order[result[0].directory])
    print_table([summary for _, summary in results])
    files = write_sweep([(cell.axes, cell.directory, summary) for cell, summary in results], out)
    print(f"{', '.join(file.name for file in files)} in {out}", file=sys.stderr)
    return 0 if all(summary["status"] == "complete" for _, summary in results) else 1


def _replay(options: argparse.Namespace) -> int:
    from sim.replay import replay

    outcome = replay(options.run)
    print(outcome)
    return 0 if outcome.difference is None else 1


def _bench(options: argparse.Namespace) -> int:
    from sim.bench import main as run_bench

    if options.trace is not None and not options.trace.is_file():
        raise InputError(f"--trace {options.trace}: no such file")
    run_bench(options.trace)
    return 0
