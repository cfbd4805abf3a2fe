"""A grid of configurations from a sweep file: which cells there are, not how they are run."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.config.overrides import apply_overrides, read_yaml, set_key, split_override
from policies.config.runconfig import RunConfig, parse_config
from policies.config.sections import check_keys
from policies.core.errors import InputError
from policies.process.sentences import shown

MAX_CELLS = 10_000


def load_grid(path: Path, overrides: Sequence[str] = ()) -> list[tuple[dict[str, Any], RunConfig]]:
    """Read a sweep file: `base` is a config, `grid` maps dotted keys to lists of values; one (axes, config)
    per combination. A list of such mappings is one grid after another.

    `--set` overrides apply to the base; one of an axis replaces its values, by a list or by one value. Raises
    `InputError`.
    """
    raw = read_yaml(path)
    check_keys(raw, ("base", "grid"), str(path))
    base, grid = raw.get("base", {}), raw.get("grid")
    grids: list[Any] = grid if isinstance(grid, list) and grid else [grid]
    if not isinstance(base, Mapping) or not all(isinstance(item, Mapping) and item for item in grids):
        raise InputError(f"{path}: expected `base`, a mapping, and `grid`, a mapping of config keys to lists")
    return [cell for item in grids for cell in _cells(path, base, dict(item), overrides)]


def _cells(
    path: Path, base: Mapping[str, Any], grid: dict[str, Any], overrides: Sequence[str]
) -> list[tuple[dict[str, Any], RunConfig]]:
    for axis in grid:
        if not isinstance(axis, str):
            raise InputError(
                f"{path}: grid: {shown(axis)} is not a config key like scheduler.prefill_chunk_size"
            )
    for key, value, override in [(*split_override(item), item) for item in overrides]:
        related = [
            axis for axis in grid if axis == key or axis.startswith(f"{key}.") or key.startswith(f"{axis}.")
        ]
        if not related:
            base = apply_overrides(base, [override])
        elif related == [key]:
            grid[key] = value if isinstance(value, list) else [value]
        else:
            raise InputError(f"--set {override}: {related[0]} is an axis of {path}; set {related[0]} itself")
    for axis, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{path}: grid.{axis}: {shown(values)}, expected a list of values")
    if math.prod(len(values) for values in grid.values()) > MAX_CELLS:
        raise InputError(f"{path}: grid: more than {MAX_CELLS:,} combinations, expected fewer")
    cells = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        cell = apply_overrides(base, ())
        for key, value in point.items():
            set_key(cell, key, value)
        spelled = ", ".join(f"{key}={shown(value)}" for key, value in point.items())
        config = parse_config(cell, path.parent, f"{path} at {spelled}")
        point = {key: _as_read(value, config.resolved, key.split(".")) for key, value in point.items()}
        cells.append((point, config))
    return cells


def _as_read(value: Any, section: Any, keys: Sequence[str]) -> Any:
    """`value` of an axis, with `off` for what YAML made of it where `section` has that at `keys`."""
    if isinstance(value, Mapping):
        return {key: _as_read(item, section, [*keys, str(key)]) for key, item in value.items()}
    for key in keys:
        section = section.get(key) if isinstance(section, Mapping) else None
    return section if value is False and section == "off" else value
