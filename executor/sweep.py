"""A grid of runs on one loaded model, one after another: a device runs one thing at a time. Finished cells are not run again."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.run import execute
from executor.session import Session
from policies.config import RunConfig, input_sha256
from results.identity import RunIdentity
from results.load import finished_summary
from results.sweep import workload_labels

Cell = tuple[dict[str, Any], Path, dict[str, Any]]


def run_grid(
    grid: Sequence[tuple[dict[str, Any], RunConfig]], device: str, out: Path, *, use_graphs: bool = True, audit: bool = False
) -> list[Cell]:
    """(axes, run directory, summary) of every cell, in order. A cell interrupted by Ctrl-C is the last one.

    Every cell is checked before the first runs. A cell that fails ends the sweep with its error; finished ones stay, and the next
    call goes on from there.
    """
    places = [
        out / "cells" / RunIdentity.from_config(config.resolved, "executor", 0, device=device).directory_name for _, config in grid
    ]
    done = [finished_summary(place, input_sha256(config)) for place, (_, config) in zip(places, grid, strict=True)]
    labels = workload_labels([(axes, config.resolved) for axes, config in grid])
    todo = [config for (_, config), summary in zip(grid, done, strict=True) if summary is None]
    session = Session(todo, device, use_graphs=use_graphs) if todo else None
    runs = iter(session.runs) if session else iter(())
    if len(todo) < len(grid):
        print(f"{len(grid) - len(todo)} of {len(grid)} cells are finished already", file=sys.stderr)
    cells: list[Cell] = []
    for (axes, _), place, summary, label in zip(grid, places, done, labels, strict=True):
        if summary is None:
            assert session is not None
            _, summary, _ = execute(session, next(runs), place, label=label, plots=False, audit=audit)
        cells.append((axes, place, summary))
        if summary["status"] == "interrupted":
            break
    return cells
