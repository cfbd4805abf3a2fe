"""A run's CSV logs read back: the one place that opens them, holds them to their columns, and says which line
and which column is wrong. Knows no log's meaning: `results.batchlog` and `results.requestlog` do.

A log that a full disk or a kill cut inside a line is refused; one that was recorded before a column existed
reads as if that column were empty.
"""

import csv
import io
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from policies.core.errors import InputError
from policies.process.documents import open_regular
from policies.process.sentences import shown

Fields = Mapping[str, str]
INT64_DIGITS = 18
"""Every whole number of so many digits fits into 64 bits."""


class Columns(NamedTuple):
    """What a log of ours has: all its columns, and those of them that came after the first recorded runs."""

    names: Sequence[str]
    later: Collection[str]


class Row(NamedTuple):
    """One line: where it is and its fields as text, by name."""

    path: Path
    line: int
    fields: Fields

    def whole(self, name: str) -> int:
        """The field as a 64-bit whole number. Raises `InputError`."""
        text = self.fields[name]
        if (len(text) <= INT64_DIGITS and text.isdecimal() and text.isascii()) or _is_whole(text):
            return int(text)
        raise self.wrong(name, "a whole number")

    def whole_or_none(self, name: str) -> int | None:
        """The same, None of an empty field: what never came."""
        return self.whole(name) if self.fields[name] else None

    def wholes(self, name: str) -> list[int]:
        """Whole numbers with blanks between, perhaps none."""
        if not self.fields[name]:
            return []
        texts = self.fields[name].split(" ")
        if not all(map(_is_whole, texts)):
            raise self.wrong(name, "whole numbers with blanks between")
        return list(map(int, texts))

    def wrong(self, name: str, expected: str) -> InputError:
        """The sentence for a field that is not what was `expected`."""
        return InputError(
            f"{self.path} line {self.line}: {name}: {shown(self.fields[name])}, expected {expected}"
        )


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """Every line of the log at `path`, streamed.

    Raises `InputError` naming file and line when it is missing, no text, cut inside a line, lacks a column or
    has one twice, or holds a line with more or fewer fields than columns.
    """
    csv.field_size_limit(sys.maxsize)  # the token times of one long request are more than csv's 128 KiB
    try:
        with io.TextIOWrapper(open_regular(path, "a log"), encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            not_yet = dict.fromkeys(_check_header(header, path, columns), "")
            _check_end(file, path)
            for values in reader:
                if len(values) != len(header):
                    raise InputError(
                        f"{path} line {reader.line_num}: {len(values)} fields, expected {len(header)}"
                    )
                fields = dict(zip(header, values, strict=True))
                yield Row(path, reader.line_num, {**fields, **not_yet} if not_yet else fields)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is not a CSV file ({error})") from None


def _check_header(header: Sequence[str], path: Path, columns: Columns) -> list[str]:
    """Which columns came later than this log. Raises `InputError` for one that is missing or there twice."""
    absent = [name for name in columns.names if name not in header]
    missing = [name for name in absent if name not in columns.later]
    twice = [name for name in columns.names if header.count(name) > 1]
    if missing or twice:
        fault = f"{missing[0]} is missing" if missing else f"{twice[0]} is there twice"
        raise InputError(f"{path} line 1: column {fault}, expected {','.join(columns.names[:10])} and so on")
    return absent


def _check_end(file: IO[str], path: Path) -> None:
    """Raise `InputError` unless the file ends with a whole line."""
    with os.fdopen(os.dup(file.fileno()), "rb") as raw:
        at = raw.tell()
        raw.seek(-1, os.SEEK_END)
        is_whole = raw.read(1) == b"\n"
        raw.seek(at)
    if not is_whole:
        raise InputError(f"{path}: its last line has no end, so the file was cut; expected whole lines")


def _is_whole(text: str) -> bool:
    digits = text[1:] if text[:1] == "-" else text
    if not (digits.isdecimal() and digits.isascii()):
        return False
    return len(digits) <= INT64_DIGITS or (len(digits) == 19 and -(1 << 63) <= int(text) < 1 << 63)
