"""A notebook's way in: a config as a dict or a path in, an object with the summary and tables out."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from policies.config.overrides import apply_overrides
from policies.config.runconfig import RunConfig, load_config, parse_config
from policies.core.errors import InputError
from policies.process.sentences import shown
from results.find import replicas_of
from results.frames import requests_frame
from results.load import Run, load_run
from results.sweep import tidy
from sim.run import simulate as simulate_to
from sim.sweeping import load_cells, run_sweep

Source = Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class Simulated:
    """One simulation that has ended. Columns of tables have their units in their names (`_ns`, `_tokens`)."""

    run: Run
    summary: Mapping[str, Any]
    _keeps: object = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.run.path

    def requests(self) -> pd.DataFrame:
        """One row for each request, in order of arrival: times, tokens, how it ended."""
        return requests_frame(self.path / "requests.csv")

    def batches(self) -> pd.DataFrame:
        """One row for each batch, in order: what ran, when, and what it took; of a fleet one replica after
        another, which `replica` names."""
        parts = replicas_of(self.path)
        if not parts:
            return pd.concat(list(self.run.batch_frames()), ignore_index=True)
        frames = [
            frame.assign(replica=int(part.name)) for part in parts for frame in load_run(part).batch_frames()
        ]
        return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class Swept:
    """A grid of simulations that have ended, in order of the grid."""

    runs: tuple[Simulated, ...]
    axes: tuple[Mapping[str, Any], ...]

    def summaries(self) -> pd.DataFrame:
        """One row for each cell: its axes as `axis.<key>`, then its figures (`ttft_ms.p99`)."""
        cells = zip(self.axes, self.runs, strict=True)
        return tidy([(axes, run.path, run.summary) for axes, run in cells])

    def __iter__(self) -> Iterator[Simulated]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)


def simulate(config: Source, *, set: Sequence[str] = (), out: str | Path | None = None) -> Simulated:
    """Simulate `config`, a mapping or the path of a YAML file, with overrides like `policy=mixed`.

    Without `out` the run directory lasts as long as what is returned. Raises `InputError` for a wrong config.
    """
    keeps = None if out is not None else tempfile.TemporaryDirectory(prefix="sim-")
    place = Path(out) if keeps is None else Path(keeps.name) / "run"  # type: ignore[arg-type]
    path, summary = simulate_to(_config(config, set), place, plots=out is not None)
    if summary["status"] == "interrupted":
        raise KeyboardInterrupt
    return Simulated(load_run(path), summary, keeps)


def sweep(config: Source, *, set: Sequence[str] = (), out: str | Path | None = None, jobs: int = -1) -> Swept:
    """Simulate every cell of a sweep, a mapping with `base` and `grid` or the path of a YAML file, in
    parallel.

    With `out` cells that are finished there are not simulated again. Raises `InputError`.
    """
    keeps = tempfile.TemporaryDirectory(prefix="sim-")
    place = Path(out) if out is not None else Path(keeps.name) / "sweep"
    path = _written(config, Path(keeps.name))
    cells = load_cells(path, set, place)
    found = {id(cell): summary for cell, summary in run_sweep(cells, jobs)}
    runs = tuple(Simulated(load_run(cell.directory), found[id(cell)], keeps) for cell in cells)
    return Swept(runs, tuple(cell.axes for cell in cells))


def _config(config: Source, overrides: Sequence[str]) -> RunConfig:
    if isinstance(config, str | Path):
        return load_config(Path(config), overrides)
    return parse_config(apply_overrides(_mapping(config), overrides), Path(), "config")


def _mapping(config: object) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise InputError(f"config: {shown(config)}, expected a mapping or the path of a YAML file")
    return config


def _written(config: Source, folder: Path) -> Path:
    """The path of a sweep; a mapping becomes a file."""
    if isinstance(config, str | Path):
        return Path(config)
    path = folder / "config.yaml"
    try:
        path.write_text(yaml.safe_dump(dict(_mapping(config)), sort_keys=False), encoding="utf-8")
    except yaml.YAMLError as error:
        raise InputError(f"config: cannot be written as YAML: {error}") from None
    return path
