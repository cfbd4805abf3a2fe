"""What a result follows from, as one hash: a sweep's cell is finished only for the same code, files and
facts."""

import hashlib
import inspect
import os
from functools import cache
from pathlib import Path

from policies.config.runconfig import RunConfig, input_sha256
from policies.core.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (".py", ".yaml", ".json")
APART = {"configs", "plots", "comparison", "checks", "lab", "runs", "reference", "__pycache__"}
"""Folders that no summary follows from: they hold inputs or results, show them, or have commands of their
own."""


def result_sha256(config: RunConfig, world: str, *facts: object) -> str:
    """A hash of all that a result of `world` (`sim` or `executor`) follows from beside its config: the
    source, the trace, the model's files, and `facts`. Raises `InputError` for a file that cannot be read."""
    parts = (
        source_sha256(ROOT, ("policies", "workloads", "results", world)),
        _written_elsewhere(config),
        input_sha256(config),
        _model_files(config),
        *facts,
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


@cache
def source_sha256(root: Path, rooms: tuple[str, ...]) -> str:
    """SHA-256 over the names and bytes of the files of `rooms` below `root`, read once: a process runs what
    it has loaded."""
    lines = []
    for room in rooms:
        for folder, folders, names in os.walk(root / room):
            folders[:] = [name for name in folders if name not in APART]
            for path in (Path(folder, name) for name in names if name.endswith(SOURCES)):
                bytes_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
                lines.append(f"{path.relative_to(root).as_posix()} {bytes_sha256}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _written_elsewhere(config: RunConfig) -> str:
    """A hash of the policy's file where it is none of ours."""
    path = Path(inspect.getfile(type(config.policy))).resolve()
    return "" if path.is_relative_to(ROOT) else hashlib.sha256(path.read_bytes()).hexdigest()


def _model_files(config: RunConfig) -> str:
    """The text of a model's description, and size and time of its weights, which are too large to be read."""
    path = Path(config.model)
    folder = path if path.is_dir() else None
    try:
        described = [path] if path.is_file() else sorted(folder.glob("*.json")) if folder else []
        texts = [
            f"{item.name} {hashlib.sha256(item.read_bytes()).hexdigest()}"
            for item in described
            if item.is_file()
        ]
        weights = sorted(folder.glob("*.safetensors")) if folder else []
        stats = [(item.name, item.stat()) for item in weights]
    except OSError as error:
        raise InputError(f"{config.where}: model: {config.model}: {error.strerror or error}") from None
    return " ".join([*texts, *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)])
