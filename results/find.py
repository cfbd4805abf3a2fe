"""Runs wherever they lie: a run directory, a folder that holds some, a pack, a folder with packs."""

from collections.abc import Sequence
from pathlib import Path

from policies.core.errors import InputError
from results.load import Run, load_run
from results.pack import SUFFIX, is_pack, unpacked
from results.rundir import CONFIG, REPLICAS, SUMMARY, is_run_directory


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Run], list[Path]]:
    """The runs at `paths`: run directories, packs (`results.pack`), or folders that hold some of either, in
    order of path. A fleet is one run; its replicas are found when they are named.

    The second list holds unfinished runs found inside a folder. Raises `InputError` for a path with no run at
    all.
    """
    runs: list[Run] = []
    unfinished: list[Path] = []
    for path in map(Path, paths):
        packs = [path] if is_pack(path) else sorted(path.rglob(f"*{SUFFIX}"))
        for folder in (path, *map(unpacked, packs)):
            inner = sorted(item.parent for item in folder.rglob(CONFIG) if is_run_directory(item.parent))
            inner = [item for item in inner if not _is_replica(item)]
            if is_run_directory(folder) or not (inner or packs):
                runs.append(load_run(folder))
                break
            for item in inner:
                if (item / SUMMARY).is_file():
                    runs.append(load_run(item))
                else:
                    unfinished.append(item)
    if not runs:
        raise InputError(f"{', '.join(map(str, paths))}: no finished run")
    return runs, unfinished


def replicas_of(path: Path) -> list[Path]:
    """The run directories of a fleet's engines, in order of their numbers; none of another run's."""
    folders = [
        item for item in path.glob(f"{REPLICAS}/*") if item.name.isdecimal() and is_run_directory(item)
    ]
    return sorted(folders, key=lambda item: int(item.name))


def _is_replica(path: Path) -> bool:
    return path.parent.name == REPLICAS and is_run_directory(path.parent.parent)
