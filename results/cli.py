"""`python -m results report | plot`: arguments in, files and exit status out (`policies.core.command`)."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from policies.core.command import OneLineParser, exit_status
from policies.core.errors import InputError
from results.load import find_runs
from results.plots import Window, plot_latency_cdfs, plot_pareto, plot_rows, plot_wavefront
from results.report import write_report
from results.rundir import RUNS_ROOT
from results.table import print_table


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; a user's mistake is one line on standard error."""
    options = build_parser().parse_args(arguments)
    return exit_status("results", lambda: int(options.action(options)))


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="results", description="Look at what runs left behind.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="report|plot", parser_class=OneLineParser)

    report = commands.add_parser("report", help="print a comparison table and write one self-contained HTML page")
    report.add_argument("directories", nargs="+", metavar="DIR", help="run directories, or directories that hold some (a sweep)")
    report.set_defaults(action=_report)
    report.add_argument("--out", type=Path, default=RUNS_ROOT / "report.html", metavar="FILE.html", help="default: %(default)s")

    plot = commands.add_parser("plot", help="draw one picture of one run, or of several side by side")
    plot.add_argument("directories", nargs="+", metavar="DIR", help="run directories; several are compared in the order given")
    kinds = plot.add_mutually_exclusive_group()
    for kind, text in (
        ("wavefront", "which chunk runs at which depth (default)"),
        ("latency", "TTFT, ITL and E2E distributions"),
        ("rows", "rows per recurrent invocation over time"),
        ("pareto", "throughput against p99 latency"),
    ):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=text)
    plot.set_defaults(kind="wavefront", action=_plot)
    plot.add_argument("--from-batch", type=int, metavar="N", help="first batch of the wavefront's window (the first DIR's count)")
    plot.add_argument("--to-batch", type=int, metavar="M", help="last batch of the window")
    plot.add_argument("--from-ms", type=float, metavar="A", help="start of the window in ms of the run's clock")
    plot.add_argument("--to-ms", type=float, metavar="B", help="end of the window")
    plot.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    return parser


def _report(options: argparse.Namespace) -> int:
    runs, unfinished = find_runs(options.directories)
    print_table([run.summary for run in runs])
    for path in unfinished:
        print(f"left out, did not end: {path}", file=sys.stderr)
    write_report(runs, options.out, unfinished)
    print(f"report: {options.out}", file=sys.stderr)
    return 0


def _plot(options: argparse.Namespace) -> int:
    window = window_of(options)
    if window is not None and options.kind != "wavefront":
        raise InputError(f"--{options.kind}: takes no window; --from-batch, --to-batch, --from-ms, --to-ms go with --wavefront")
    runs, _ = find_runs(options.directories)
    workloads = list(dict.fromkeys(run.workload for run in runs))
    if options.kind != "pareto" and len(workloads) > 1:
        raise InputError(f"the runs have different workloads ({', '.join(workloads)}), expected one")
    try:
        if options.kind == "wavefront":
            plot_wavefront(runs, options.out, window)
        elif options.kind == "latency":
            plot_latency_cdfs(runs, options.out)
        elif options.kind == "rows":
            plot_rows(runs, options.out)
        else:
            plot_pareto(runs, options.out)
    except OSError as error:
        raise InputError(f"{options.out}: cannot be written: {error.strerror}") from None
    print(f"plot: {options.out}", file=sys.stderr)
    return 0


def window_of(options: argparse.Namespace) -> Window | None:
    """The window the options ask for, None when they ask for none. Raises `InputError` for one that is mixed or backwards."""
    batches, times = (options.from_batch, options.to_batch), (options.from_ms, options.to_ms)
    if batches == (None, None) and times == (None, None):
        return None
    if batches != (None, None) and times != (None, None):
        raise InputError("--from-batch/--to-batch and --from-ms/--to-ms: give a window of batches or of time, not both")
    for name, (low, high), minimum_gap in (("batch", batches, 0), ("ms", times, 1e-6)):
        if low is not None and not 0 <= low < math.inf:
            raise InputError(f"--from-{name}: {low}, expected a number of at least 0")
        if high is not None and not (low or 0) + minimum_gap <= high < math.inf:
            raise InputError(f"--to-{name}: {high}, expected a number not before --from-{name} ({low or 0})")
    nanoseconds = [None if value is None else round(value * 1e6) for value in times]
    return Window(batches[0], batches[1], nanoseconds[0], nanoseconds[1])
