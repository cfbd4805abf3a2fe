"""Runs as one file that is small enough to be kept: packed, and unpacked into run directories with the same
logs, byte for byte.

A pack is a `.tar.xz` with a folder per run: `config.yaml` (of its workload's files the names, no folders of
the machine), `summary.json`, and, of every run or of the first of several repeats, `requests.csv` and
`batches.csv` as `results.logcode` writes them. Output tokens stay as the SHA-256 in the summary; pictures and
traces are left out, they can be made again.
"""

import io
import lzma
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from policies.core.errors import InputError
from results.identity import comparable
from results.logcode import (
    Parts,
    decode_batches,
    decode_requests,
    encode_batches,
    encode_requests,
    finished_ns,
)
from results.rundir import BATCHES, CONFIG, MARKER, REQUESTS, SUMMARY

if TYPE_CHECKING:
    from results.load import Run

SUFFIX = ".tar.xz"
MOST_BYTES = 1 << 30
"""Of one file in a pack; a column of a hundred million batches has less."""
Logs = Literal["first", "all", "none"]


def pack(runs: "Sequence[Run]", out: Path, logs: Logs = "first") -> None:
    """Write `runs` to the file `out`; the same runs give the same bytes.

    `logs` says whose requests and batches are kept: of runs with one config and world (repeats) only the
    first's, everyone's, or no one's. Raises `InputError` when a run has no log that should be kept, or `out`
    has another ending or cannot be written.
    """
    if not out.name.endswith(SUFFIX):
        raise InputError(f"{out}: expected a name that ends in {SUFFIX}")
    seen: set[tuple[str, str]] = set()
    draft = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            lzma.open(draft, "wb", preset=9 | lzma.PRESET_EXTREME) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for name, run in zip(_unique([run.path.name for run in runs]), runs, strict=True):
                identity = (str(run.summary["world"]), str(run.summary["config_sha256"]))
                keeps_logs = logs == "all" or (logs == "first" and identity not in seen)
                seen.add(identity)
                for file, data in _parts_of(run, keeps_logs).items():
                    member = tarfile.TarInfo(f"{name}/{file}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        os.replace(draft, out)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)


def unpack(path: Path, folder: Path) -> list[Path]:
    """Write every run of the pack at `path` as a run directory below `folder`; return them. Raises
    `InputError`."""
    places = []
    try:
        for name, files in _runs_in(path):
            place = folder / name
            decoded = _decoded(files)
            place.mkdir(parents=True, exist_ok=True)
            for file, data in decoded.items():
                (place / file).write_bytes(data)
            places.append(place)
        if not places:
            raise ValueError("it holds no run")
    except (
        tarfile.TarError,
        lzma.LZMAError,
        EOFError,
        ValueError,
        IndexError,
        KeyError,
        OverflowError,
    ) as error:
        raise InputError(f"{path}: is not a whole pack of runs ({error})") from None
    except OSError as error:
        raise InputError(f"{error.filename or path}: {error.strerror or error}") from None
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


def _parts_of(run: "Run", keeps_logs: bool) -> Parts:
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


def _runs_in(path: Path) -> Iterator[tuple[str, Parts]]:
    """(name, files by name within its folder) of every run, in the pack's order."""
    with lzma.open(path) as stream:
        while stream.read(
            1 << 20
        ):  # to the checksum at the end, so that of a damaged pack nothing is written
            pass
    with tarfile.open(path, "r:xz") as archive:
        for name, members in groupby(archive, lambda member: member.name.partition("/")[0]):
            files: Parts = {}
            for member in members:
                place, _, file = member.name.partition("/")
                table, _, part = file.partition("/")
                is_ours = file in (CONFIG, SUMMARY) or (table in (REQUESTS, BATCHES) and part)
                content = archive.extractfile(member) if member.isreg() else None
                if (
                    content is None
                    or place in ("", ".", "..")
                    or not is_ours
                    or file in files
                    or member.size > MOST_BYTES
                ):
                    raise ValueError(f"it holds {member.name!r}")
                files[file] = content.read()
            yield name, files


def _decoded(files: Parts) -> Parts:
    """The files of a run directory, the summary last: without it a directory never looks whole. Raises for
    what was not packed."""
    tables: dict[str, Parts] = {REQUESTS: {}, BATCHES: {}}
    for name, data in files.items():
        table, _, part = name.partition("/")
        if part:
            tables[table][part] = data
    found: Parts = {CONFIG: files[CONFIG]}
    ends_ns = None
    if tables[BATCHES]:
        found[BATCHES] = decode_batches(tables[BATCHES])
        ends_ns = finished_ns(found[BATCHES])
    if tables[REQUESTS]:
        found[REQUESTS] = decode_requests(tables[REQUESTS], ends_ns)
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
