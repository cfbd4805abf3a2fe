"""Runs as one file that is small enough to be kept: packed, and unpacked into run directories with the same
logs, byte for byte.

A pack is a `.tar.xz` with a folder per run: `config.yaml` (of its workload's files the names, no folders of
the machine), `summary.json`, and, of every run or of the first of several repeats, `requests.csv` and
`batches.csv` as `results.logcode` writes them. Output tokens stay as the SHA-256 in the summary; pictures and
traces are left out, they can be made again.
"""

import csv
import io
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import yaml

from policies.core.errors import InputError
from results.batchlog import COLUMNS
from results.files import cannot_write, user_file
from results.identity import comparable
from results.load import Run
from results.logcode import (
    Parts,
    decode_batches,
    decode_requests,
    encode_batches,
    encode_requests,
    finished_ns,
)
from results.rundir import BATCHES, CONFIG, MARKER, REQUESTS, SUMMARY, is_run_directory

SUFFIX = ".tar.xz"
MOST_FILE_BYTES, MOST_RUN_BYTES, MOST_PACK_BYTES, MOST_FILES = 1 << 28, 1 << 29, 1 << 32, 200_000
"""Of one file in a pack (a column of thirty million batches has less), of one run, and of a whole pack, all
unpacked; and how many files it may hold."""
FAULTS = (
    tarfile.TarError, lzma.LZMAError, csv.Error, EOFError, ValueError, IndexError, KeyError, OverflowError,
    MemoryError,
)  # fmt: skip
"""What reading something raises that is no pack."""
Logs = Literal["first", "all", "none"]


def pack(runs: Sequence[Run], out: Path, logs: Logs = "first") -> None:
    """Write `runs` to the file `out`; the same runs give the same bytes.

    `logs` says whose requests and batches are kept: of runs with one config and world (repeats) only the
    first's, everyone's, or no one's. Raises `InputError` when a run has no log that should be kept, or `out`
    has another ending or cannot be written.
    """
    if not out.name.endswith(SUFFIX):
        raise InputError(f"{out}: expected a name that ends in {SUFFIX}")
    seen: set[tuple[str, str]] = set()
    with (
        user_file(out) as draft,
        lzma.open(draft, "wb", preset=9 | lzma.PRESET_EXTREME) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, run in zip(_unique([run.path.name for run in runs]), runs, strict=True):
            identity = (str(run.summary["world"]), str(run.summary["config_sha256"]))
            keeps_logs = logs == "all" or (logs == "first" and identity not in seen)
            seen.add(identity)
            parts = _parts_of(run, keeps_logs)
            if (num_bytes := sum(map(len, parts.values()))) > MOST_RUN_BYTES:
                raise InputError(f"{run.path}: has {num_bytes} bytes to keep, expected {MOST_RUN_BYTES}")
            for file, data in parts.items():
                member = tarfile.TarInfo(f"{name}/{file}")
                member.size = len(data)
                try:
                    archive.addfile(member, io.BytesIO(data))
                except ValueError as error:
                    raise InputError(f"{run.path}: cannot be packed under its name: {error}") from None


def unpack(path: Path, folder: Path) -> list[Path]:
    """Write every run of the pack at `path` as a run directory below `folder`; return them.

    Raises `InputError` when it is no whole pack, or when there is something else where a run is to go.
    """
    places = []
    try:
        _check_stream(path)
        for name, files in _runs_in(path):
            place = folder / name
            decoded = _decoded(name, files)
            if place.exists() and not is_run_directory(place) and any(place.iterdir()):
                raise InputError(f"{place}: is there and no run directory; choose another --out")
            place.mkdir(parents=True, exist_ok=True)
            (place / SUMMARY).unlink(missing_ok=True)
            for file, data in decoded.items():
                (place / file).write_bytes(data)
            places.append(place)
        if not places:
            raise ValueError("it holds no run")
    except FAULTS as error:
        raise InputError(f"{path}: is not a whole pack of runs ({str(error)[:200]})") from None
    except OSError as error:
        raise cannot_write(Path(error.filename or path), error) from None
    return places


def is_pack(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and path.is_file()


def unpacked(path: Path) -> Path:
    """A folder with the run directories of the pack at `path`, there until the process ends; a pack is
    unpacked once."""
    return Path(_held(path.resolve()).name) / path.name.removesuffix(SUFFIX)


@cache
def _held(path: Path) -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="loop-twin-")
    try:
        unpack(path, Path(folder.name) / path.name.removesuffix(SUFFIX))
    except InputError:
        shutil.rmtree(folder.name, ignore_errors=True)
        raise
    return folder


def _parts_of(run: Run, keeps_logs: bool) -> Parts:
    parts: Parts = {CONFIG: _config_text(run.config).encode(), SUMMARY: (run.path / SUMMARY).read_bytes()}
    if keeps_logs:
        for name in (REQUESTS, BATCHES):
            if not (run.path / name).is_file():
                raise InputError(f"{run.path}: has no {name} to keep")
        batches = (run.path / BATCHES).read_bytes()
        try:
            ends_ns = finished_ns(batches)
        except (ValueError, IndexError):
            raise InputError(f"{run.path / BATCHES}: is not a whole log of batches") from None
        if len(ends_ns) != run.summary["num_batches"]:
            raise InputError(
                f"{run.path / BATCHES}: has {len(ends_ns)} batches, {SUMMARY} says "
                f"{run.summary['num_batches']}"
            )
        tables = {BATCHES: encode_batches(batches)}
        tables[REQUESTS] = encode_requests((run.path / REQUESTS).read_bytes(), ends_ns)
        parts |= {f"{table}/{part}": data for table, items in tables.items() for part, data in items.items()}
    return parts


def _config_text(config: Mapping[str, Any]) -> str:
    """`config.yaml` without the folders of the machine that ran it."""
    return MARKER + yaml.safe_dump({**config, **comparable(config)}, sort_keys=False, allow_unicode=True)


def _check_stream(path: Path) -> None:
    """Read to the checksum at the end, so that of a damaged pack nothing is written.

    Raises `ValueError` for more than a pack may hold, and unless it ends with the two blocks of zeros that
    end an archive: one that was cut between two files has none.
    """
    num_bytes, end = 0, b""
    with lzma.open(path) as stream:
        while piece := stream.read(1 << 20):
            num_bytes += len(piece)
            end = (end + piece)[-2 * tarfile.BLOCKSIZE :]
            if num_bytes > MOST_PACK_BYTES:
                raise ValueError(f"it has more than {MOST_PACK_BYTES} bytes, unpacked")
    if end != bytes(2 * tarfile.BLOCKSIZE):
        raise ValueError("it has no end, so it was cut")


def _runs_in(path: Path) -> Iterator[tuple[str, Parts]]:
    """(name, files by name within its folder) of every run, in the pack's order."""
    seen: set[str] = set()
    num_files = 0
    with lzma.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for name, members in groupby(archive, lambda member: member.name.partition("/")[0]):
            if name in seen:
                raise ValueError(f"it holds run {name!r} twice")
            seen.add(name)
            files: Parts = {}
            num_bytes = 0
            for member in members:
                place, _, file = member.name.partition("/")
                table, _, part = file.partition("/")
                is_ours = file in (CONFIG, SUMMARY) or (table in (REQUESTS, BATCHES) and part)
                num_files, num_bytes = num_files + 1, num_bytes + member.size
                if member.size > MOST_FILE_BYTES or num_bytes > MOST_RUN_BYTES or num_files > MOST_FILES:
                    raise ValueError(
                        f"more than {MOST_FILE_BYTES} bytes in a file, {MOST_RUN_BYTES} in a run or "
                        f"{MOST_FILES} files"
                    )
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or place in ("", ".", "..") or not is_ours or file in files:
                    raise ValueError(f"it holds {member.name[:80]!r}")
                files[file] = content.read()
            yield name, files
        while piece := stream.read(1 << 20):
            if piece.strip(b"\0"):
                raise ValueError("something follows its end: another pack?")


def _decoded(name: str, files: Parts) -> Parts:
    """The files of a run directory, the summary last: without it a directory never looks whole. Raises for
    what was not packed, and for a run of which a part is missing."""
    tables: dict[str, Parts] = {REQUESTS: {}, BATCHES: {}}
    for file, data in files.items():
        table, _, part = file.partition("/")
        if part:
            tables[table][part] = data
    if {CONFIG, SUMMARY} - files.keys() or bool(tables[BATCHES]) != bool(tables[REQUESTS]):
        raise ValueError(f"run {name!r} is there by half")
    found: Parts = {CONFIG: files[CONFIG]}
    if tables[BATCHES]:
        found[BATCHES] = decode_batches(tables[BATCHES])
        ends_ns = finished_ns(found[BATCHES])
        found[REQUESTS] = decode_requests(tables[REQUESTS], ends_ns)
        header = found[BATCHES].partition(b"\n")[0].decode().split(",")
        missing = [column for column in COLUMNS.names if column not in {*header, *COLUMNS.later}]
        if missing or len(ends_ns) != json.loads(files[SUMMARY])["num_batches"]:
            raise ValueError(f"run {name!r} lacks {missing[0] if missing else 'batches'}")
    return {**found, SUMMARY: files[SUMMARY]}


def _unique(names: Sequence[str]) -> list[str]:
    """`names` with a number behind every one that was there before: a, b, a is a, b, a-2."""
    taken: set[str] = set()
    found = []
    for name in names:
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}-{number}"
        taken.add(free)
        found.append(free)
    return found
