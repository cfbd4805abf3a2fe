"""A grid of simulations: cells in parallel over processes, each in a run directory of its own, finished ones
never run again."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from policies.config.grid import load_grid
from policies.config.runconfig import RunConfig
from policies.core.errors import InputError
from results.identity import RunIdentity
from results.load import finished_summary
from results.sweep import workload_labels
from sim.parallel import in_parallel
from sim.run import Logs, Simulation, inputs_sha256, simulate
from workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid: its config, its place on the axes, its directory, and what its workload is
    called."""

    config: RunConfig
    axes: Mapping[str, Any]
    directory: Path
    label: str


def load_cells(path: Path, overrides: Sequence[str], out: Path) -> list[Cell]:
    """The cells of a sweep file, each with its directory below `out`. Raises `InputError`, also when two are
    the same run."""
    cells: dict[Path, Cell] = {}
    for folder in (out, *out.parents):
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise InputError(f"--out {out}: {folder} is no folder, expected one to write the cells to")
    grid = load_grid(path, overrides)
    labels = workload_labels([(axes, config.resolved) for axes, config in grid])
    for (axes, config), label in zip(grid, labels, strict=True):
        name = RunIdentity.from_config(config.resolved, "sim", 0).directory_name
        cell = Cell(config, axes, out / "cells" / name, label)
        if cell.directory in cells:
            twin = cells[cell.directory]
            raise InputError(
                f"{path}: grid: {dict(twin.axes)} and {dict(axes)} are the same run, expected it once"
            )
        cells[cell.directory] = cell
    return list(cells.values())


def run_sweep(
    cells: Sequence[Cell],
    jobs: int,
    log: Logs = "batches",
    cluster: str | None = None,
    shared: Path | None = None,
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield (cell, summary) as cells finish, earlier finished ones first; shows a progress bar on stderr.

    Every cell is prepared before the first runs, so that a wrong one costs nothing. A cell that breaks an
    invariant ends the sweep with its error, and Ctrl-C in any cell ends it too; finished cells stay, and the
    next call goes on from there. On a `cluster` a worker that dies has its cells done by others.
    """
    todo = []
    for cell in cells:
        summary = finished_summary(cell.directory, inputs_sha256(cell.config))
        if summary is None:
            todo.append(cell)
        else:
            yield cell, summary
    _check(todo)
    if len(todo) < len(cells):
        print(f"{len(cells) - len(todo)} of {len(cells)} cells are finished already", file=sys.stderr)
    yield from in_parallel(partial(_run_cell, log), todo, jobs, "cells", cluster, shared)


def _check(cells: Sequence[Cell]) -> None:
    """Prepare every cell, each workload once."""
    workloads: dict[str, Workload] = {}
    for cell in cells:
        resolved = cell.config.resolved
        key = json.dumps([resolved["workload"], resolved["seed"]], sort_keys=True, default=str)
        for part in cell.config.parts():
            simulation = Simulation.prepare(part, workloads.get(key))
            workloads[key] = simulation.workload


def _run_cell(log: Logs, cell: Cell) -> dict[str, Any] | None:
    """The summary, None after Ctrl-C, which has been spent on this cell."""
    summary = simulate(cell.config, cell.directory, label=cell.label, plots=False, log=log)[1]
    return None if summary["status"] == "interrupted" else summary
