"""`python -m results report | diff | why | compare | late | plot | pack | unpack`: arguments to files."""

import argparse
import hashlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from policies.core.errors import InputError
from policies.process.command import OneLineParser, exit_status
from results.comparison.figures import Tolerances
from results.find import find_runs
from results.identity import comparable, config_hash, slug
from results.late import late_tokens
from results.pack import SUFFIX, pack, unpack
from results.plots import (
    Window,
    plot_account,
    plot_chunks,
    plot_goodput,
    plot_latency_cdfs,
    plot_load,
    plot_pareto,
    plot_rows,
    plot_wavefront,
)
from results.report import write_difference, write_report
from results.rundir import PLOTS, PREDICTED, RUNS_ROOT
from results.table import print_table, print_whole


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; a user's mistake is one line on standard error."""
    options = build_parser().parse_args(arguments)
    return exit_status("results", lambda: int(options.action(options)))


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="results", description="Look at what runs left behind.", allow_abbrev=False)
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="report|diff|why|compare|late|plot|pack|unpack",
        parser_class=OneLineParser,
    )

    report = commands.add_parser(
        "report", help="print a comparison table and write one self-contained HTML page"
    )
    report.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="run directories, or directories that hold some (a sweep)",
    )
    report.set_defaults(action=_report)
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help=f"default: {RUNS_ROOT}/report-NAME-HASH.html, named after the directories",
    )

    diff = commands.add_parser(
        "diff", help="two sides of one world against each other: before and after, one device and another"
    )
    diff.add_argument("a", metavar="A", help="a run, or a folder or pack of them")
    diff.add_argument("b", metavar="B", help="the other side")
    diff.add_argument(
        "--out", type=Path, metavar="FILE.html", help=f"default: {RUNS_ROOT}/diff-NAMES-HASH.html"
    )
    diff.set_defaults(action=_diff)

    why = commands.add_parser("why", help="the batches behind the tail of a run's latency")
    why.add_argument("directory", metavar="RUN", help="a run directory")
    kinds = why.add_mutually_exclusive_group(required=True)
    for name, text in (("itl", "gaps between tokens"), ("ttft", "times to first token")):
        kinds.add_argument(f"--{name}", metavar="p99", help=f"{text} from this percentile on")
    why.set_defaults(action=_why)

    comparison = commands.add_parser(
        "compare", help="hold simulated runs against measured ones; status 1 beyond a tolerance"
    )
    comparison.add_argument(
        "simulated", metavar="SIM_DIR", help="a simulated run, or a folder or pack of them"
    )
    comparison.add_argument(
        "measured",
        metavar="GPU_DIR",
        help="the measured run, or a folder or pack of them; repeats go together",
    )
    for name, text in (
        ("p50", "error of a latency's p50"),
        ("p99", "error of a latency's p99"),
        ("throughput", "error of the throughput"),
        ("rank-gap", "difference above which policies have an order that both sides must share"),
    ):
        default = 100 * getattr(Tolerances(), name.replace("-", "_"))
        comparison.add_argument(
            f"--{name}",
            type=float,
            default=default,
            metavar="%",
            help=f"{text}, in %% (default: {default:g})",
        )
    comparison.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"default: {RUNS_ROOT}/compare-NAMES-HASH, named after both sides",
    )
    comparison.add_argument("--no-plots", action="store_true", help="draw no pictures")
    comparison.set_defaults(action=_compare)

    late = commands.add_parser("late", help="count late tokens of measured runs, and say whose they are")
    late.add_argument("simulated", type=Path, metavar="SIM_DIR", help="what `sim predict` left of the runs")
    late.add_argument("runs", nargs="+", metavar="RUN")
    late.add_argument("--itl-ms", type=float, default=None, help="default: that of the run's `slo`")
    late.set_defaults(action=_late)

    plot = commands.add_parser("plot", help="draw one picture of one run, or of several side by side")
    plot.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="run directories; several are compared in the order given",
    )
    kinds = plot.add_mutually_exclusive_group()
    for kind, text in (
        ("wavefront", "which chunk runs at which depth (default)"),
        ("latency", "TTFT, ITL and E2E distributions"),
        ("rows", "rows per recurrent invocation over time"),
        ("pareto", "throughput against p99 latency; below saturation, p99 TTFT against p99 ITL"),
        ("load", "latency against the offered rate"),
        ("goodput", "p99 ITL against goodput, simulated and measured side by side"),
        ("chunks", "how many prompt rows every batch takes in, and the gaps between tokens"),
        ("time", "where the time goes: limits, what is beyond them, idle"),
    ):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=text)
    plot.set_defaults(kind="wavefront", action=_plot)
    plot.add_argument(
        "--from-batch",
        type=int,
        metavar="N",
        help="first batch of the wavefront's window (the first DIR's count)",
    )
    plot.add_argument("--to-batch", type=int, metavar="M", help="last batch of the window")
    plot.add_argument(
        "--from-ms", type=float, metavar="A", help="start of the window in ms of the run's clock"
    )
    plot.add_argument("--to-ms", type=float, metavar="B", help="end of the window")
    plot.add_argument("--out", type=Path, required=True, metavar="FILE.png")

    packer = commands.add_parser(
        "pack", help="keep runs in one small file, which every command here takes in a directory's place"
    )
    packer.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="run directories, or directories that hold some (a sweep)",
    )
    packer.add_argument(
        "--logs",
        choices=("first", "all", "none"),
        default="first",
        help=(
            "whose requests.csv and batches.csv to keep: of repeats the first's (default), everyone's, or "
            "no one's"
        ),
    )
    packer.add_argument("--out", type=Path, required=True, metavar=f"FILE{SUFFIX}")
    packer.set_defaults(action=_pack)
    unpacker = commands.add_parser("unpack", help="turn a packed file into run directories again")
    unpacker.add_argument("file", type=Path, metavar=f"FILE{SUFFIX}")
    unpacker.add_argument("--out", type=Path, required=True, metavar="DIR")
    unpacker.set_defaults(action=_unpack)
    return parser


def _report(options: argparse.Namespace) -> int:
    runs, unfinished = find_runs(options.directories)
    out = options.out or RUNS_ROOT / f"report-{named_after(options.directories)}.html"
    notes = write_report(runs, out, unfinished, [Path(item) for item in options.directories])
    print_table([run.summary for run in runs])
    for note in notes:
        print(note, file=sys.stderr)
    print(f"report: {out}", file=sys.stderr)
    return 0


def _diff(options: argparse.Namespace) -> int:
    from results.difference import LEGEND, difference_table, differences, places, verdicts

    a, b = (find_runs([side])[0] for side in (options.a, options.b))
    rows, notes = differences(a, b)
    by = sorted({row.by for row in rows if row.by is not None})
    notes += [
        f"configs differ: {key.replace(' simulated', ' in A').replace(' measured', ' in B')}" for key in by
    ]
    out = options.out or RUNS_ROOT / f"diff-{named_after([options.a, options.b])}.html"
    write_difference(a, b, rows, notes, out)
    print("\n".join(places(rows)))
    print_whole(difference_table(rows), sys.stdout)
    print("\n".join([LEGEND, *verdicts(rows)]))
    for note in notes:
        print(note, file=sys.stderr)
    print(f"report: {out}", file=sys.stderr)
    return 0


def _why(options: argparse.Namespace) -> int:
    from results.why import batch_table, component_table, percent_of, sentences, why

    name = "itl" if options.itl is not None else "ttft"
    text = getattr(options, name)
    try:
        percent = percent_of(text)
    except ValueError:
        raise InputError(
            f"--{name}: {text}, expected a percentile from p0 to below p100, such as p99"
        ) from None
    runs, _ = find_runs([options.directory])
    if len(runs) > 1:
        raise InputError(f"{options.directory}: holds {len(runs)} runs, expected one")
    reason = why(runs[0], name, percent)
    print("\n".join(sentences(reason)))
    print_whole(batch_table(reason), sys.stdout)
    print_whole(component_table(reason), sys.stdout)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from results.comparison.compare import compare
    from results.comparison.markdown import write_markdown
    from results.comparison.pictures import write_pictures
    from results.comparison.show import print_comparison

    percents = {name: getattr(options, name) for name in ("p50", "p99", "throughput", "rank_gap")}
    for name, percent in percents.items():
        if not 0 <= percent < math.inf:
            raise InputError(f"--{name.replace('_', '-')}: {percent}, expected a percentage of at least 0")
    tolerances = Tolerances(**{name: percent / 100 for name, percent in percents.items()})
    comparison = compare(options.simulated, options.measured, tolerances)
    out = options.out or RUNS_ROOT / f"compare-{named_after([options.simulated, options.measured])}"
    comparison.write_json(out / "compare.json")
    write_markdown(comparison, out / "compare.md")
    print_comparison(comparison)
    num_pictures, notes = (0, []) if options.no_plots else write_pictures(comparison, out / PLOTS)
    for note in notes:
        print(note, file=sys.stderr)
    print(f"compare.json, compare.md and {num_pictures} pictures in {out}", file=sys.stderr)
    return 0 if comparison.holds else 1


def named_after(paths: Sequence[str]) -> str:
    """A name for what is made of `paths`: the first two's own names, and a hash of all of them, so that other
    runs never take its place: `simulate-1f0c9a`."""
    names = [slug(Path(path).resolve().name.removesuffix(SUFFIX))[:60] for path in paths]
    more = [f"and-{len(names) - 2}"] if len(names) > 2 else []
    digest = hashlib.sha256("\n".join(str(Path(path).resolve()) for path in paths).encode("utf-8", "replace"))
    return "-".join([*names[:2], *more, digest.hexdigest()[:6]])


def _plot(options: argparse.Namespace) -> int:
    window = window_of(options)
    windowed = {"wavefront": plot_wavefront, "chunks": plot_chunks}
    if window is not None and options.kind not in windowed:
        raise InputError(
            f"--{options.kind}: takes no window; --from-batch, --to-batch, --from-ms, --to-ms go with "
            "--wavefront and --chunks"
        )
    runs, _ = find_runs(options.directories)
    workloads = list(dict.fromkeys(run.workload for run in runs))
    if options.kind in (*windowed, "latency", "rows") and len(workloads) > 1:
        raise InputError(f"the runs have different workloads ({', '.join(workloads)}), expected one")
    draw = {
        "latency": plot_latency_cdfs,
        "rows": plot_rows,
        "time": plot_account,
        "pareto": plot_pareto,
        "load": plot_load,
        "goodput": plot_goodput,
    }
    if options.kind in windowed:
        windowed[options.kind](runs, options.out, window)
    else:
        draw[options.kind](runs, options.out)
    print(f"plot: {options.out}", file=sys.stderr)
    return 0


def _late(options: argparse.Namespace) -> int:
    simulated = [run for run in find_runs([options.simulated])[0] if (run.path / PREDICTED).is_file()]
    by_config = {config_hash(comparable(run.config)): run.path for run in simulated}
    for run in find_runs(options.runs)[0]:
        place = by_config.get(config_hash(comparable(run.config)))
        itl_ms = options.itl_ms or (run.config.get("slo") or {}).get("itl_ms")
        if place is None or itl_ms is None:
            raise InputError(
                f"{run.path}: expected a simulated run of its config in {options.simulated}, and "
                "slo.itl_ms or --itl-ms"
            )
        print(f"{run.path.name}: {late_tokens(run, place, itl_ms)}")
    return 0


def _pack(options: argparse.Namespace) -> int:
    runs, unfinished = find_runs(options.directories)
    for path in unfinished:
        print(f"left out, did not end: {path}", file=sys.stderr)
    pack(runs, options.out, options.logs)
    print(f"{len(runs)} runs, {options.out.stat().st_size / 1e6:.2f} MB: {options.out}", file=sys.stderr)
    return 0


def _unpack(options: argparse.Namespace) -> int:
    if not options.file.is_file():
        raise InputError(f"{options.file}: no such file, expected a pack of runs")
    print(f"{len(unpack(options.file, options.out))} runs: {options.out}", file=sys.stderr)
    return 0


def window_of(options: argparse.Namespace) -> Window | None:
    """The window the options ask for, None when they ask for none. Raises `InputError` for one that is mixed
    or backwards."""
    batches, times = (options.from_batch, options.to_batch), (options.from_ms, options.to_ms)
    if batches == (None, None) and times == (None, None):
        return None
    if batches != (None, None) and times != (None, None):
        raise InputError(
            "--from-batch/--to-batch and --from-ms/--to-ms: give a window of batches or of time, not both"
        )
    for name, (low, high), minimum_gap in (("batch", batches, 0), ("ms", times, 1e-6)):
        if low is not None and not 0 <= low < math.inf:
            raise InputError(f"--from-{name}: {low}, expected a number of at least 0")
        if high is not None and not (low or 0) + minimum_gap <= high < math.inf:
            raise InputError(f"--to-{name}: {high}, expected a number not before --from-{name} ({low or 0})")
    nanoseconds = [None if value is None else round(value * 1e6) for value in times]
    return Window(batches[0], batches[1], nanoseconds[0], nanoseconds[1])
