"""The profile of a device: what batches cost, one line per measured case, as one CSV under a header of `#
key: value` lines.

The executor writes it, the simulator fits it; both only meet here. The columns are a contract:

| column | meaning |
|---|---|
| `kind` | what the case isolates, see `KINDS` |
| `case` | a name for people |
| `stage`, `loop_count`, `rows`, `ranges` | the batch, as `batches.csv` has it; blank for `gap`, `swap` |
| `n` | measurements behind the medians |
| `device_ns`, `device_p10_ns`, `device_p90_ns` | device time behind another batch; of a `gap` its length |
| `idle_device_ns` | median, launched on an idle device, which waits for part of the launch |
| `select_ns` | the engine's choice of the batch, median |
| `prepare_ns`, `launch_ns`, `host_p90_ns` | host: packing; launching; 90th percentile of their sum |
| `clock_mhz`, `temperature_c` | of the device, under the load of the cases measured together with this one |

Blank means not measured. A case may have several lines, one for each visit at another time and in other
company; readers get them as one row. The last line is `# complete: N lines`; without it the file is part of a
profile, which only a resumed profiling run accepts.
"""

import csv
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import TextIO

from policies.core.errors import InputError
from policies.core.seam.batch import Stage, Work
from policies.process.documents import MAX_JSON_BYTES, read_text
from results.batchlog import parse_work

SCHEMA = "1"
KINDS = {
    "linear": (
        "a recurrent batch whose rows see as little context as they can (ranges of up to 16 tokens from "
        "position 0)"
    ),
    "attention": "a recurrent batch of few rows over long context, or of many rows in one range",
    "prelude": "embedding sampled tokens",
    "coda": "LM head and sampling",
    "staging": "embedding prompt ranges into the hidden ring",
    "copies": (
        "LAST_EXITED copies of K/V of rows that leave after their range's depth; the kernel alone, "
        "loop_count 0"
    ),
    "batch": "a batch that a policy formed on a serving workload",
    "served": (
        "batches of real runs without a recurrent loop, by stage and rows, queued behind what ran before "
        "them there"
    ),
    "swap": "K/V of `rows` tokens, all planes, from the device to host memory (`out`) or back",
    "host": (
        "batches of real runs with the same stage, loop count and number of ranges; `ranges` shows one of "
        "them"
    ),
    "gap": "time between two things in real runs; `case` says which",
}
GAPS = {
    "device_gap": "from a batch's end to the start of the next, which was queued",
    "collect": "from a batch's end until the waiting host noticed",
    "after_collect": (
        "from collecting a batch until the next is being chosen, what is between choosing and preparing "
        "included"
    ),
    "after_submit": "from handing a batch over until the next is being chosen, likewise",
    "mark": "from having prepared a batch to its start on an idle device",
    "admit": "what a batch takes the host longer for each request that is let in with it",
    "wake": "what the first batch after an idle millisecond takes the host longer",
}
"""What was seen between batches, by name. The case of a `gap` is the run it was seen in, a colon, and one of
these texts."""
HEADER_KEYS = (
    "schema", "mode", "seed", "date", "commit", "gpu", "driver", "python", "torch", "cuda", "triton", "model",
    "dtype", "kernel_sha256", "cuda_graphs", "block_size", "row_buckets", "tile_rows", "tile_keys",
    "split_keys", "attention_slots", "attention_partials", "attention_spare_items",
)  # fmt: skip
"""Every profile has all of them; a value may be blank. From `row_buckets` on they are what a batch's shape is
rounded to: row counts of the captured programs and heights of query tiles (blank-separated, ascending), keys
of a history tile and of a split, work units of attention that run at once, and the room for splits: rows of
partial results, items beyond one for each bucket row."""
LATER_KEYS = ("short_rows", "few_rows", "tall_margin")
"""Of profiles from executors that have them: items of up to so many query rows run in the lowest tiles, and
buckets of up to so many rows have attention kernels of their own (0: none has); tall tiles are cut beyond so
many times an even share."""
COMPLETE = "# complete: "


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One measured case; the fields are the columns, None where the file has a blank."""

    kind: str
    case: str
    stage: Stage | None = None
    loop_count: int | None = None
    rows: int | None = None
    ranges: str = ""
    n: int | None = None
    device_ns: int | None = None
    device_p10_ns: int | None = None
    device_p90_ns: int | None = None
    idle_device_ns: int | None = None
    select_ns: int | None = None
    prepare_ns: int | None = None
    launch_ns: int | None = None
    host_p90_ns: int | None = None
    clock_mhz: int | None = None
    temperature_c: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What is measured: lines with equal keys are visits of one case."""
        return (self.kind, self.case, f"{self.stage or ''} {self.loop_count} {self.ranges}")

    def work(self) -> Work:
        """What was measured. Raises `ValueError` for a row without one."""
        if self.stage is None or self.loop_count is None:
            raise ValueError(f"profile row {self.case!r} of kind {self.kind} has no batch")
        return Work.of(self.stage, self.loop_count, parse_work(self.ranges))

    def fields(self) -> list[str]:
        """The row as CSV fields in the order of `COLUMNS`."""
        return ["" if value is None else str(value) for value in (getattr(self, name) for name in COLUMNS)]


COLUMNS = tuple(field.name for field in dataclasses.fields(ProfileRow))
NUMBER_COLUMNS = tuple(name for name in COLUMNS if name not in ("kind", "case", "stage", "ranges"))


@dataclass(frozen=True)
class Profile:
    """A profile read back. `is_complete` is False for the beginning of one, which only `read_part`
    returns."""

    path: Path
    header: Mapping[str, str]
    lines: tuple[ProfileRow, ...]
    is_complete: bool = True

    @cached_property
    def rows(self) -> tuple[ProfileRow, ...]:
        """One row per case, in order of first appearance: `merged` visits."""
        visits: dict[tuple[str, str, str], list[ProfileRow]] = {}
        for line in self.lines:
            visits.setdefault(line.key, []).append(line)
        return tuple(merged(lines) for lines in visits.values())

    def of_kind(self, *kinds: str) -> tuple[ProfileRow, ...]:
        return tuple(row for row in self.rows if row.kind in kinds)


def merged(visits: Sequence[ProfileRow]) -> ProfileRow:
    """One row of several visits to a case: medians, the lowest 10th and the highest 90th percentiles, and the
    sum of `n`; of batches with recurrent loops the lowest device time. A device is slower at times, by its
    clocks or by what lies between kernels, and a loop has two hundred of those."""
    choices: dict[str, Callable[[Sequence[int]], int]] = {
        "n": sum, "device_p10_ns": min, "device_p90_ns": max, "host_p90_ns": max,
    }  # fmt: skip
    if visits[0].loop_count:
        choices["device_ns"] = min
    values: dict[str, int | None] = {}
    for name in NUMBER_COLUMNS:
        found = [value for value in (getattr(visit, name) for visit in visits) if value is not None]
        values[name] = (choices.get(name, median_low)(found)) if found else None
    return dataclasses.replace(visits[0], **values)  # type: ignore[arg-type]


def read_profile(path: Path) -> Profile:
    """The whole profile at `path`. Raises `InputError` for another schema, a missing key, a bad or a missing
    line."""
    profile = read_part(path)
    if not profile.is_complete:
        raise InputError(
            f"{path}: ends after {len(profile.lines)} lines without `{COMPLETE}N lines`, expected a whole "
            "profile: it was cut, or is not finished (the same `executor profile` command goes on from here)"
        )
    return profile


def read_part(path: Path) -> Profile:
    """What there is of a profile; a last line that was not written to its end is left out. Otherwise like
    `read_profile`."""
    text = read_text(path, "a profile", MAX_JSON_BYTES)
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines.pop()
    num_header = next((at for at, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    header = _header(lines[:num_header], path)
    body = lines[num_header:]
    if body[:1] != [",".join(COLUMNS)]:
        raise InputError(f"{path} line {num_header + 1}: expected the columns {','.join(COLUMNS)}")
    is_complete = body[-1].startswith(COMPLETE)
    measured = tuple(
        _row(line, path, num_header + at)
        for at, line in enumerate(body[1 : len(body) - is_complete], start=2)
    )
    if is_complete and body[-1] != f"{COMPLETE}{len(measured)} lines":
        raise InputError(
            f"{path}: has {len(measured)} lines, its last one says {body[-1].removeprefix(COMPLETE)!r}"
        )
    return Profile(path, header, measured, is_complete)


def _header(lines: Iterable[str], path: Path) -> dict[str, str]:
    header: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.removeprefix("# ").partition(":")
        if colon:
            header[key.strip()] = value.strip()
    if header.get("schema", SCHEMA) != SCHEMA:
        raise InputError(
            f"{path}: profile schema {header['schema']}, expected {SCHEMA}: profile the device again"
        )
    missing = [key for key in HEADER_KEYS if key not in header]
    if missing:
        raise InputError(
            f"{path}: the header has no `# {missing[0]}: ...` line, expected a profile written by `executor "
            "profile`"
        )
    return header


def _row(line: str, path: Path, number: int) -> ProfileRow:
    try:
        fields = next(csv.reader([line], strict=True), [])
        if len(fields) != len(COLUMNS):
            raise ValueError(f"{len(fields)} fields, expected {len(COLUMNS)}")
        named = dict(zip(COLUMNS, fields, strict=True))
        if named["kind"] not in KINDS:
            raise ValueError(f"kind {named['kind']!r}, expected one of {', '.join(KINDS)}")
        numbers = {name: int(named[name]) if named[name] else None for name in NUMBER_COLUMNS}
        negative = next((name for name, value in numbers.items() if value is not None and value < 0), None)
        if negative is not None:
            raise ValueError(f"{negative}: {numbers[negative]}, expected at least 0")
        row = ProfileRow(
            named["kind"],
            named["case"],
            Stage(named["stage"]) if named["stage"] else None,
            ranges=named["ranges"],
            **numbers,
        )
        if row.stage is not None and row.work().rows != row.rows:
            raise ValueError(f"{row.rows} rows, its ranges have {row.work().rows}")
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path} line {number}: {error}") from None
    return row


class ProfileWriter:
    """Writes a profile, every line safe on disk once `append` returns. `lines` begins with those that were
    there before.

    Use as a context manager, `append` what `visits` does not count yet, and `finish` at the end; a profile
    that `is_complete` takes no more.
    """

    def __init__(self, path: Path, header: Mapping[str, str], resumes: frozenset[str]) -> None:
        """Begin `path`, or go on with what is there when its header is equal in the keys `resumes`.

        Raises `InputError` when it is another profile, or cannot be read or written.
        """
        assert set(header) >= set(HEADER_KEYS), set(HEADER_KEYS) - set(header)
        self.path = path
        self.lines: list[ProfileRow] = []
        self.is_complete = False
        if path.exists():
            part = read_part(path)
            for key in HEADER_KEYS:
                if key in resumes and part.header[key] != header[key]:
                    raise InputError(
                        f"{path}: was begun with {key} {part.header[key]!r} and this is {header[key]!r}: "
                        "choose another --out"
                    )
            header, self.lines, self.is_complete = part.header, list(part.lines), part.is_complete
        self._visits = Counter(line.key for line in self.lines)
        draft = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"# {key}: {value}\n" for key, value in header.items())
                file.write(",".join(COLUMNS) + "\n")
                _write_lines(file, self.lines)
                if self.is_complete:
                    file.write(self._last_line())
            os.replace(draft, path)
            self._file = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> "ProfileWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def visits(self, row: ProfileRow) -> int:
        """How many lines the case of `row` has."""
        return self._visits[row.key]

    def append(self, lines: Iterable[ProfileRow]) -> None:
        lines = list(lines)
        _write_lines(self._file, lines)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines += lines
        self._visits.update(line.key for line in lines)

    def finish(self) -> None:
        """Write the last line, which makes the profile whole."""
        self._file.write(self._last_line())
        self._file.flush()
        self.is_complete = True

    def _last_line(self) -> str:
        return f"{COMPLETE}{len(self.lines)} lines\n"


def _write_lines(file: TextIO, lines: Iterable[ProfileRow]) -> None:
    csv.writer(file, lineterminator="\n").writerows(line.fields() for line in lines)
