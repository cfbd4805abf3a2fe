"""The executor's commands: `run` one configuration, `serve` clients, `sweep` a grid, `preserve` and
`diagnose` compare runs bit for bit, `profile` and `bench` time batches."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from executor.errors import RunError
from policies.config.grid import load_grid
from policies.config.runconfig import RunConfig, load_config
from policies.core.errors import InputError, InvariantError, SelectionError, WriteError
from policies.process.command import OneLineParser, add_objectives, add_overrides, exit_status
from workloads.serving.options import add_serve_options, place_of

CONFIGS = Path(__file__).parent / "configs"


def main(arguments: Sequence[str]) -> int:
    """Parse and run; return the exit status (0 done, 1 the run failed its check, 2 wrong input)."""
    parser = OneLineParser(prog="executor", description="Run scheduling policies with real kernels.")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="run|serve|sweep|diagnose|preserve|profile|bench|trace|peer-bench",
        parser_class=OneLineParser,
    )
    run = commands.add_parser("run", help="one run")
    run.add_argument("config", type=Path, metavar="CONFIG.yaml")
    run.add_argument("--no-plots", action="store_true", help="write no plots and no Perfetto trace")
    run.set_defaults(action=_run)
    serve = commands.add_parser("serve", help="a loaded model for clients of OpenAI's API over HTTP")
    serve.add_argument("config", type=Path, metavar="CONFIG.yaml")
    serve.add_argument("--no-plots", action="store_true", help="write no plots and no Perfetto trace")
    add_serve_options(serve)
    serve.set_defaults(action=_serve)
    sweep = commands.add_parser(
        "sweep", help="a grid of runs on one loaded model, one after another, resumable"
    )
    sweep.add_argument("config", type=Path, nargs="+", metavar="SWEEP.yaml")
    sweep.add_argument("--no-plots", action="store_true", help="draw no comparison of the cells")
    sweep.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="run the whole grid N times, so that figures have a spread",
    )
    sweep.set_defaults(action=_sweep)
    diagnose = commands.add_parser(
        "diagnose", help="compare hidden states and tokens of two policies, bit for bit, depth by depth"
    )
    diagnose.add_argument("config", type=Path, metavar="CONFIG.yaml")
    diagnose.add_argument(
        "--against", default="split", metavar="POLICY", help="the policy to compare with (default: split)"
    )
    diagnose.set_defaults(action=_diagnose)
    preserve = commands.add_parser(
        "preserve", help="a grid of runs whose tokens, hidden states and K/V must be the same bits"
    )
    preserve.add_argument("config", type=Path, metavar="SWEEP.yaml")
    preserve.set_defaults(action=_preserve)
    bench = commands.add_parser("bench", help="time single batches beside their physical limits (CUDA)")
    bench.add_argument("config", type=Path, nargs="?", default=CONFIGS / "bench.yaml", metavar="CONFIG.yaml")
    bench.set_defaults(action=_bench)
    profile = commands.add_parser(
        "profile", help="time what batches are made of, for the simulator to fit; resumable"
    )
    profile.add_argument("--model", default="ouro-1.4b", metavar="NAME")
    profile.add_argument("--device", default="cuda", metavar="cuda|cpu")
    profile.add_argument("--out", type=Path, required=True, metavar="PROFILE.csv")
    profile.add_argument("--quick", action="store_true", help="a fifth of the cases")
    profile.set_defaults(action=_profile)
    trace = commands.add_parser(
        "trace", help="profile a window of batches: does the host ever wait for the device? (CUDA)"
    )
    trace.add_argument("config", type=Path, metavar="CONFIG.yaml")
    trace.add_argument(
        "--skip", type=int, default=300, metavar="N", help="batches before the window (default: 300)"
    )
    trace.add_argument(
        "--batches", type=int, default=100, metavar="N", help="batches in the window (default: 100)"
    )
    add_overrides(trace, Path("results/runs/trace"))
    trace.set_defaults(action=_trace)
    peer = commands.add_parser(
        "peer-bench", help="beside the eager loop a user would write, same weights and prompts (CUDA)"
    )
    peer.add_argument("--model", default="ouro-1.4b", metavar="NAME")
    peer.add_argument("--out", type=Path, default=Path("results/runs/peer-bench"), metavar="DIR")
    peer.set_defaults(action=_peer_bench)
    for command in (run, serve, sweep):
        add_objectives(command)
    for command in (run, serve, sweep, diagnose, preserve, bench):
        command.add_argument("--device", default="cuda", metavar="cuda|cpu")
        add_overrides(command)
        command.add_argument(
            "--audit", action="store_true", help="recompute every address from first principles (slow)"
        )
        command.add_argument(
            "--no-graphs",
            action="store_true",
            help="launch every kernel eagerly instead of replaying CUDA graphs",
        )
    options = parser.parse_args(arguments)
    return exit_status("executor", lambda: _guarded(options))


def _guarded(options: argparse.Namespace) -> int:
    """The command's status; whatever it raises becomes one line and status 1 (`python -X dev` shows the
    traceback)."""
    try:
        return int(options.action(options))
    except (InputError, InvariantError, SelectionError, WriteError, ModuleNotFoundError):
        raise
    except (RecursionError, MemoryError, OverflowError):
        raise
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        lines = str(error).strip().splitlines()
        message = lines[0] if lines else ""
        print(
            f"executor: {message if isinstance(error, RunError) else f'{type(error).__name__}: {message}'}",
            file=sys.stderr,
        )
        return 1


def _run(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set)
    _need_torch()
    if config.fleet is not None:
        return _run_apart(config, options)
    if config.role != "whole":
        raise InputError(
            f"{config.where}: role: {config.role} is one side of a fleet, expected fleet.prefill"
        )
    from executor.run import execute
    from executor.session import Session
    from results.accuracy import print_accuracy
    from results.table import print_table

    session = Session([config], options.device, use_graphs=not options.no_graphs)
    path, summary, _ = execute(
        session, session.runs[0], options.out, plots=not options.no_plots, audit=options.audit
    )
    print_table([summary])
    print_accuracy([summary])
    for note in summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    print(f"run directory: {path}", file=sys.stderr)
    return _status(summary)


def _serve(options: argparse.Namespace) -> int:
    place = place_of(options)
    config = load_config(options.config, options.set, {"kind": "live"})
    _need_torch()
    from executor.serve import serve
    from results.table import print_table

    path, summary = serve(
        config,
        options.device,
        place,
        options.out,
        plots=not options.no_plots,
        audit=options.audit,
        use_graphs=not options.no_graphs,
    )
    print_table([summary])
    for note in summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    print(f"run directory: {path}", file=sys.stderr)
    return _status(summary) if summary["num_requests"] else 0


def _run_apart(config: RunConfig, options: argparse.Namespace) -> int:
    from executor.apart.run import run_apart
    from results.find import replicas_of
    from results.fleet import replica_rows
    from results.load import load_run
    from results.table import print_table

    if options.audit:
        raise InputError("--audit: knows one engine's writes, and not what another sends; expected none")
    path, summary = run_apart(config, options.device, options.out, use_graphs=not options.no_graphs)
    print_table(replica_rows(summary, [load_run(replica).summary for replica in replicas_of(path)]))
    for note in summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    print(f"run directory: {path}", file=sys.stderr)
    return _status(summary)


def _sweep(options: argparse.Namespace) -> int:
    grid = [cell for path in options.config for cell in load_grid(path, options.set)]
    if options.repeats < 1:
        raise InputError(f"--repeats: {options.repeats}, expected at least 1")
    _need_torch()
    from executor.sweep import run_grid
    from results.accuracy import print_accuracy
    from results.sweep import write_sweep
    from results.table import print_table

    out = options.out or Path("results/runs") / f"gpu-{options.config[0].stem}"
    cells = run_grid(
        grid,
        options.device,
        out,
        repeats=options.repeats,
        use_graphs=not options.no_graphs,
        audit=options.audit,
    )
    files = write_sweep(cells, out, plots=not options.no_plots)
    print_table([summary for _, _, summary in cells])
    print_accuracy([summary for _, _, summary in cells])
    print(f"{', '.join(file.name for file in files)} in {out}", file=sys.stderr)
    return max((_status(summary) for _, _, summary in cells), default=1)


def _diagnose(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set)
    against = load_config(options.config, [*options.set, f"policy={options.against}"])
    _need_torch()
    from executor.checks.diagnose import diagnose, print_differences

    result = diagnose(config, against, options.device, options.out, audit=options.audit)
    print_differences(result)
    return 0 if result.is_identical else 1


def _preserve(options: argparse.Namespace) -> int:
    grid = load_grid(options.config, options.set)
    _need_torch()
    from executor.checks.preserve import preserve, print_comparisons

    out = options.out or Path("results/runs") / f"preserve-{options.config.stem}"
    results = preserve(grid, options.device, out, use_graphs=not options.no_graphs, audit=options.audit)
    print_comparisons(results)
    return 0 if all(item.is_identical for item in results) else 1


def _bench(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set)
    _need_torch()
    from executor.lab.bench import STANDARD_CASES, print_timings, time_cases
    from executor.session import Session

    if options.device != "cuda":
        raise InputError(f"--device {options.device}: bench times device events, expected cuda")
    session = Session([config], options.device, use_graphs=not options.no_graphs)
    print_timings(time_cases(session, STANDARD_CASES))
    return 0


def _profile(options: argparse.Namespace) -> int:
    _need_torch()
    from executor.lab.profiling.command import profile

    return profile(options.model, options.device, options.out, quick=options.quick)


def _trace(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.set)
    _need_torch()
    from executor.lab.trace import print_account, trace

    account = trace(config, options.out, options.skip, options.batches)
    print_account(account)
    return 1 if account.blocking else 0


def _peer_bench(options: argparse.Namespace) -> int:
    _need_torch()
    from executor.lab.peer_bench import peer_bench, print_rows

    print_rows(peer_bench(options.model, options.out))
    return 0


def _status(summary: Mapping[str, Any]) -> int:
    """0 for a complete run, 130 for an interrupted one; 1, with a sentence, for one that finished no
    request."""
    if summary["status"] == "failed":
        reasons = "; ".join(
            f"{count} refused: {reason}" for reason, count in list(summary["refusal_reasons"].items())[:1]
        )
        print(f"executor: the run failed: {'; '.join([*summary['notes'][-1:], reasons])}", file=sys.stderr)
    return {"complete": 0, "interrupted": 130}.get(summary["status"], 1)


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise InputError(
            "the executor needs torch, which is not installed: run `make gpu-run`, or pip install '.[gpu]'"
        ) from None
