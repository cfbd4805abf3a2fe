"""What a sweep leaves beside its cells: `sweep.csv`, one tidy row per cell, and the pictures that compare them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from results.load import Run, load_run
from results.plots import plot_latency_cdfs, plot_pareto, plot_rows, plot_wavefront
from results.report import typical_runs
from results.rundir import BATCHES, PLOTS

SWEEP = "sweep.csv"


def write_sweep(cells: Sequence[tuple[Mapping[str, Any], Path, Mapping[str, Any]]], out: Path, *, plots: bool = True) -> list[Path]:
    """Write `sweep.csv` and the plots of (axes, run directory, summary) cells below `out`; return the files, the CSV first."""
    out.mkdir(parents=True, exist_ok=True)
    tidy(cells).to_csv(out / SWEEP, index=False)
    if not plots:
        return [out / SWEEP]
    runs = [load_run(path) for _, path, summary in cells if summary["status"] == "complete"]
    return [out / SWEEP, *write_pictures(runs, out / PLOTS)]


def tidy(cells: Sequence[tuple[Mapping[str, Any], Path, Mapping[str, Any]]]) -> pd.DataFrame:
    """One row per cell in the order given: its axes as `axis.<key>`, then its summary, nested figures as `ttft_ms.p99`."""
    rows = []
    for axes, path, summary in cells:
        named = {f"axis.{key}": json.dumps(value) if isinstance(value, dict | list) else value for key, value in axes.items()}
        flat = {str(key): value for key, value in pd.json_normalize(dict(summary)).iloc[0].items()}
        rows.append({**named, **flat, "directory": str(path)})
    return pd.DataFrame(rows)


def write_pictures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """The Pareto picture of all runs; for every workload, latencies, rows and the wavefront of a typical run of each policy."""
    if not runs:
        return []
    files = [folder / "pareto.png"]
    plot_pareto(runs, files[0])
    for workload in dict.fromkeys(run.workload for run in runs):
        typical = typical_runs([run for run in runs if run.workload == workload])
        files.append(folder / f"latency-{workload}.png")
        plot_latency_cdfs(typical, files[-1])
        logged = [run for run in typical if (run.path / BATCHES).is_file()]
        if logged:
            files += [folder / f"rows-{workload}.png", folder / f"wavefront-{workload}.png"]
            plot_rows(logged, files[-2])
            plot_wavefront(logged, files[-1])
    return files
