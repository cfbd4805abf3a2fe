"""A grid of runs on one loaded model, one after another: a device runs one thing at a time. Finished cells
are not run again."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.run import execute
from executor.session import Session
from executor.source import inputs_sha256
from policies.config.runconfig import RunConfig
from policies.core.errors import InputError
from results.identity import RunIdentity
from results.load import finished_summary
from results.sweep import workload_labels

Cell = tuple[dict[str, Any], Path, dict[str, Any]]


def run_grid(
    grid: Sequence[tuple[dict[str, Any], RunConfig]],
    device: str,
    out: Path,
    *,
    repeats: int = 1,
    use_graphs: bool = True,
    audit: bool = False,
) -> list[Cell]:
    """(axes, run directory, summary) of every cell, in order, the whole grid `repeats` times over: repeats
    lie far apart in time.

    The second run of a cell is in a directory that ends in `-r2`. A cell interrupted by Ctrl-C is the last
    one. Every cell is checked before the first runs. A cell that fails ends the sweep with its error;
    finished ones stay, and the next call goes on from there.
    """
    labels = workload_labels([(axes, config.resolved) for axes, config in grid])
    plan = [
        (
            axes,
            config,
            label,
            out / "cells" / (_directory_name(config, device) + (f"-r{repeat}" if repeat > 1 else "")),
        )
        for repeat in range(1, repeats + 1)
        for (axes, config), label in zip(grid, labels, strict=True)
    ]
    with_graphs = use_graphs and device == "cuda"
    done = [finished_summary(place, inputs_sha256(config, with_graphs)) for _, config, _, place in plan]
    todo = [config for (_, config, _, _), summary in zip(plan, done, strict=True) if summary is None]
    session = Session(todo, device, use_graphs=use_graphs) if todo else None
    runs = iter(session.runs) if session else iter(())
    if session is not None:
        _check_card(
            session.card, [(place, found) for (*_, place), found in zip(plan, done, strict=True) if found]
        )
    if len(todo) < len(plan):
        print(f"{len(plan) - len(todo)} of {len(plan)} cells are finished already", file=sys.stderr)
    cells: list[Cell] = []
    for (axes, _, label, place), summary in zip(plan, done, strict=True):
        if summary is None:
            assert session is not None
            _, summary, _ = execute(session, next(runs), place, label=label, plots=False, audit=audit)
        cells.append((axes, place, summary))
        if summary["status"] == "interrupted":
            break
    return cells


def _check_card(card: str, done: Sequence[tuple[Path, dict[str, Any]]]) -> None:
    """Raise `InputError` for a finished cell of another card: one table would hold the times of two."""
    for place, summary in done:
        if summary.get("card") != card:
            raise InputError(f"{place}: was run on {summary.get('card')}, this is {card}; give another --out")


def _directory_name(config: RunConfig, device: str) -> str:
    return RunIdentity.from_config(config.resolved, "executor", 0, device=device).directory_name
