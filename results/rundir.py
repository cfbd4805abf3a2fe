"""A run directory while it is being written. `summary.json` comes last and in one step, so an unfinished run never looks whole.

Layout: `config.yaml`, `batches.csv` (streamed), `requests.csv`, `trace.json.gz`, `plots/*.png`, `summary.json`. Reading one back is
`results.load`.
"""

import csv
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from policies.core.errors import InputError, WriteError
from policies.core.runlog import REQUEST_COLUMNS, RequestRecord
from results.identity import RunIdentity

TAIL_BYTES = 1 << 16
RUNS_ROOT = Path("results/runs")
MARKER = "# The resolved configuration of one run; `results` wrote it and knows its directory by this line.\n"
CONFIG, BATCHES, REQUESTS, SUMMARY, TRACE, PLOTS, REPLAY, PREDICTED = (
    "config.yaml", "batches.csv", "requests.csv", "summary.json", "trace.json.gz", "plots", "replay.json", "predicted.csv",
)  # fmt: skip


class RunDirectory:
    """One run's output. Use `create`, hand `batches` to the `RunLog`, and finish with `results.finish.write_outputs`.

    As a context manager it closes `batches.csv` whatever happens; without a summary the directory then reads as unfinished. What
    the disk does not take raises `WriteError`, and no file is left by half.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.batches = GrowingFile(path / BATCHES)

    @classmethod
    def create(cls, config: Mapping[str, Any], identity: RunIdentity, out: str | os.PathLike[str] | None = None) -> "RunDirectory":
        """Make `out` (default: `results/runs/<identity.directory_name>`) and write `config.yaml`.

        An earlier run's directory is taken over: its summary goes first, then its other files; files that no run writes stay.
        Raises `InputError` when `out` holds something else or cannot be written.
        """
        path = Path(out) if out is not None else RUNS_ROOT / identity.directory_name
        try:
            _check_ours(path)
            path.mkdir(parents=True, exist_ok=True)
            lock = _locked(path)
            _clear(path)
            text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)
            (path / CONFIG).write_text(MARKER + text, encoding="utf-8")
            return cls(path, lock)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None

    def write_requests(self, records: Iterable[RequestRecord]) -> None:
        """Write `requests.csv`: one line per request in arrival order; a time that never came is empty.

        `token_ns` is the delivery time of every token, joined by spaces.
        """
        with drafted(self.path / REQUESTS) as draft, open(draft, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(REQUEST_COLUMNS)
            writer.writerows(map(request_row, records))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` in one step. Raises `ValueError` for a NaN or an infinity, which JSON has no word for."""
        self.batches.close()
        with drafted(self.path / SUMMARY) as draft, open(draft, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.batches.close()
        finally:
            os.close(self._lock)


class GrowingFile:
    """A text file that is written line by line, `path`. What the disk does not take is cut off, so that its lines are whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "w", buffering=1 << 20, encoding="ascii", newline="\n")  # noqa: SIM115

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError as error:
            raise WriteError(f"{self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close it once; later calls do nothing."""
        try:
            self._file.close()
        except OSError as error:
            _cut_to_lines(self._path)
            raise WriteError(f"{self._path}: {error.strerror or error}") from error


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Where to write what is to become `path`: a draft that takes its place when the block ends, and is gone when it fails."""
    draft = path.with_name(path.name + ".tmp")
    try:
        yield draft
        os.replace(draft, path)
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _cut_to_lines(path: Path) -> None:
    """Cut a file after its last whole line."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        file.truncate(end)


def request_row(record: RequestRecord) -> tuple[object, ...]:
    """The fields of one request in the order of `REQUEST_COLUMNS`."""
    request = record.request
    return (
        request.request_id,
        request.arrival_ns,
        request.prompt_tokens,
        record.output_tokens,
        record.status.value,
        record.first_scheduled_ns,
        record.first_token_ns,
        record.finished_ns,
        record.preemptions,
        request.max_tokens,
        request.priority,
        record.reason,
        " ".join(map(str, record.token_ns)),
        f"{request.content_tokens}:{' '.join(map(str, request.content_ids))}" if request.content_ids else "",
    )


def is_run_directory(path: Path) -> bool:
    """Whether `results` made this directory: its `config.yaml` starts with our marker."""
    try:
        with open(path / CONFIG, encoding="utf-8") as file:
            return file.readline() == MARKER
    except (OSError, UnicodeDecodeError):
        return False


def _check_ours(path: Path) -> None:
    """Raise `InputError` for a file, and for a directory that holds what no run wrote."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file, expected a directory to write the run to")
    if path.is_dir() and any(path.iterdir()) and not is_run_directory(path):
        raise InputError(f"{path}: holds files and is not a run directory; choose an empty or a new one")


def _locked(path: Path) -> int:
    """A descriptor of the directory `path`, locked until it is closed or the process dies. Raises `InputError` when it is held."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InputError(f"{path}: another process is writing a run there; wait for it or choose another directory") from None
    return lock


def _clear(path: Path) -> None:
    """Remove what an earlier run wrote into `path`, its summary first."""
    for name in (SUMMARY, BATCHES, REQUESTS, TRACE, REPLAY, PREDICTED):
        (path / (name + ".tmp")).unlink(missing_ok=True)
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path / PLOTS, ignore_errors=True)


def _plain(value: Any) -> Any:
    """`value` with mappings as dicts and sequences as lists, which is what YAML's safe writer takes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
