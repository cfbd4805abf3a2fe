"""What a sweep leaves beside its cells: `sweep.csv`, one tidy row per cell, and the pictures that compare
them."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from results.files import user_file
from results.identity import workload_name
from results.load import load_run
from results.plots import draw_pictures, pictures_of_runs
from results.rundir import PLOTS

SWEEP = "sweep.csv"


def write_sweep(
    cells: Sequence[tuple[Mapping[str, Any], Path, Mapping[str, Any]]],
    out: Path,
    *,
    plots: bool = True,
    jobs: int = 1,
) -> list[Path]:
    """Write `sweep.csv` and, by `jobs` processes, the plots of (axes, run directory, summary) cells below
    `out`; return the files, the CSV first.

    Plots are extras: one that cannot be drawn is a line on stderr.
    """
    with user_file(out / SWEEP) as draft:
        tidy(cells).to_csv(draft, index=False, errors="backslashreplace")
    if not plots:
        return [out / SWEEP]
    runs = [load_run(path) for _, path, summary in cells if summary["status"] == "complete"]
    files, notes = draw_pictures(pictures_of_runs(runs), out / PLOTS, jobs)
    for note in notes:
        print(note, file=sys.stderr)
    return [out / SWEEP, *files]


def workload_labels(cells: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """What to call the workload of each (axes, resolved config), so that tables and pictures compare like
    with like.

    Its own name; a number when another workload of the sweep has the same name; and every axis that is not
    the workload, the policy or the chunk size: `chat`, `synthetic-2`, `chat seed=1`. Of an axis of mappings,
    its keys that differ within the sweep.
    """
    specs: dict[str, list[str]] = {}
    seen: dict[str, list[Any]] = {}
    for axes, _ in cells:
        for key, value in axes.items():
            seen.setdefault(key, []).append(value)
    labels = []
    for axes, config in cells:
        own = {key: value for key, value in axes.items() if not is_compared(key)}
        spec = _without(config["workload"], own, "workload")
        name, text = workload_name(config["workload"]), json.dumps(spec, sort_keys=True, default=str)
        known = specs.setdefault(name, [])
        if text not in known:
            known.append(text)
        number = f"-{known.index(text) + 1}" if known.index(text) else ""
        parts = [part for key, value in own.items() for part in _told_apart(key, value, seen[key])]
        labels.append(" ".join([name + number, *parts]))
    return labels


def _without(section: Mapping[str, Any], axes: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`section`, which is called `name`, without the keys that are `axes`."""
    return {
        key: _without(value, axes, f"{name}.{key}") if isinstance(value, Mapping) else value
        for key, value in section.items()
        if f"{name}.{key}" not in axes
    }


def _told_apart(axis: str, value: Any, seen: Sequence[Any]) -> list[str]:
    """What tells `value` of `axis` from the others `seen`, each as `key=value`."""
    if not all(isinstance(item, Mapping) for item in seen):
        return [f"{axis.rpartition('.')[2]}={value}"]
    return [f"{key}={part}" for key, part in value.items() if any(item.get(key) != part for item in seen)]


def is_compared(axis: str) -> bool:
    """Whether tables and pictures show `axis` by themselves."""
    return axis in ("workload", "policy", "scheduler.prefill_chunk_size") or axis.startswith("policy.")


def tidy(cells: Sequence[tuple[Mapping[str, Any], Path, Mapping[str, Any]]]) -> pd.DataFrame:
    """One row per cell in the order given: its axes as `axis.<key>`, then its summary, nested figures as
    `ttft_ms.p99`."""
    rows = []
    for axes, path, summary in cells:
        named = {
            f"axis.{key}": json.dumps(value) if isinstance(value, dict | list) else value
            for key, value in axes.items()
        }
        flat = {str(key): value for key, value in pd.json_normalize(dict(summary)).iloc[0].items()}
        for key in ("fleet.by_replica", "fleet.links"):  # tables of their own
            flat.pop(key, None)
        rows.append({**named, **flat, "directory": str(path)})
    return pd.DataFrame(rows)
