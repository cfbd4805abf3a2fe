"""A run directory while it is being written. `summary.json` comes last and in one step, so an unfinished run
never looks whole.

Layout: `config.yaml`, `batches.csv` and `requests.csv` (both streamed), `trace.json.gz`, `plots/*.png`,
`summary.json`. A fleet's has no `batches.csv` but a run directory per engine in `replicas`. Reading one back
is `results.load`.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from policies.core.errors import InputError
from policies.process.documents import open_regular
from results.files import GrowingFile, cannot_write, drafted, user_file
from results.identity import RunIdentity
from results.requestlog import RequestFile

RUNS_ROOT = Path("results/runs")
REPLICAS = "replicas"
"""Of a fleet's directory, the folder that holds its engines' run directories, called by their numbers."""
MARKER = "# The resolved configuration of one run; `results` wrote it and knows its directory by this line.\n"
HANDOVERS = "handovers.csv"
"""Of an engine that does one part of its requests: what it heard of transfers."""
CONFIG, BATCHES, REQUESTS, SUMMARY, TRACE, PLOTS, REPLAY, PREDICTED = (
    "config.yaml", "batches.csv", "requests.csv", "summary.json", "trace.json.gz", "plots", "replay.json",
    "predicted.csv",
)  # fmt: skip


class RunDirectory:
    """One run's output. Use `create`, hand `batches` and `requests.write` to the `RunLog`, and finish with
    `results.finish.write_outputs`.

    As a context manager it closes both logs whatever happens; without a summary the directory then reads as
    unfinished. What the disk does not take raises `WriteError`; logs then end with a whole line, and no other
    file is left by half.
    """

    def __init__(self, path: Path, lock: int, request_columns: Sequence[str]) -> None:
        self.path = path
        self._lock = lock
        self.batches = GrowingFile(path / BATCHES)
        self._handovers: GrowingFile | None = None
        self.requests = RequestFile(path / REQUESTS, request_columns)

    @classmethod
    def create(
        cls,
        config: Mapping[str, Any],
        identity: RunIdentity,
        out: str | os.PathLike[str] | None = None,
        request_columns: Sequence[str] = (),
    ) -> "RunDirectory":
        """Make `out` (default: `results/runs/<identity.directory_name>`) and write `config.yaml`.
        `request_columns` are columns of `requests.csv` that this kind of run has beside those of every run.

        An earlier run's directory is taken over: its summary goes first, then its other files; files that no
        run writes stay. Raises `InputError` when `out` holds something else or cannot be
        written, `WriteError` when the disk is full.
        """
        path = Path(out) if out is not None else RUNS_ROOT / identity.directory_name
        try:
            _check_ours(path)
            path.mkdir(parents=True, exist_ok=True)
            lock = _locked(path)
            _clear(path)
            text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)
            with user_file(path / CONFIG) as draft:
                draft.write_text(MARKER + text, encoding="utf-8")
            return cls(path, lock, request_columns)
        except OSError as error:
            raise cannot_write(path, error) from None

    def handovers(self) -> GrowingFile:
        """Where an engine that does one part of its requests writes what it hears of transfers."""
        self._handovers = GrowingFile(self.path / HANDOVERS)
        return self._handovers

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` in one step. Raises `ValueError` for a NaN or an infinity, which JSON has no
        word for."""
        self.batches.close()
        with drafted(self.path / SUMMARY) as draft, open(draft, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with closing(self._handovers or self.batches), closing(self.requests), closing(self.batches):
            os.close(self._lock)


def is_run_directory(path: Path) -> bool:
    """Whether `results` made this directory: its `config.yaml` starts with our marker."""
    try:
        with open_regular(path / CONFIG, "the config of a run") as file:
            return file.read(len(MARKER.encode())) == MARKER.encode()
    except (InputError, OSError):
        return False


def _check_ours(path: Path) -> None:
    """Raise `InputError` for a file, and for a directory that holds what no run wrote."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file, expected a directory to write the run to")
    if path.is_dir() and any(path.iterdir()) and not is_run_directory(path):
        raise InputError(f"{path}: holds files and is not a run directory; choose an empty or a new one")


def _locked(path: Path) -> int:
    """A descriptor of the directory `path`, locked until it is closed or the process dies. Raises
    `InputError` when it is held."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InputError(
            f"{path}: another process is writing a run there; wait for it or choose another directory"
        ) from None
    return lock


def _clear(path: Path) -> None:
    """Remove what an earlier run wrote into `path`, its summary first."""
    for name in (SUMMARY, HANDOVERS, BATCHES, REQUESTS, TRACE, REPLAY, PREDICTED):
        for file in (path / name, *path.glob(f"{name}.*tmp")):
            file.unlink(missing_ok=True)
    for folder in (PLOTS, REPLICAS):
        shutil.rmtree(path / folder, ignore_errors=True)


def _plain(value: Any) -> Any:
    """`value` with mappings as dicts and sequences as lists, which is what YAML's safe writer takes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
