"""From lines of text to checked rows, one at a time: CSV and JSON lines alike. Holds no more than one row.

A row that cannot be used is an `InputError` naming file, physical line, column, value and what was expected.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from policies.core.errors import InputError
from policies.process.documents import LARGEST_ID, parse_json
from policies.process.sentences import shown
from workloads.drawn import MAX_TOKENS
from workloads.formats import Layout, normalise
from workloads.timestamps import UNIT_NAMES, TimestampError, guess_unit, is_number, iso_ns, number_ns

Record = tuple[int, Mapping[str, Any]]
"""A line number, counted from 1, and the cells of that line by normalised column name."""


class Row(NamedTuple):
    """One usable line. Tokens are as recorded: zero means that the request failed. `arrival_ns` is not
    rebased yet."""

    line: int
    arrival_ns: int | None
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None
    priority: int
    blocks: tuple[int, ...]
    patience_ns: int | None
    exit_loops: tuple[int, ...]
    guessed: tuple[int, ...]


class Records:
    """The records of a text stream, read as they are asked for, and the `columns` of its header or first
    object.

    A first character `{` means JSON lines, anything else CSV with a header. Iterate once. Blank lines are
    passed over.
    """

    def __init__(self, path: Path, text: Iterable[str]) -> None:
        self.path = path
        lines = iter(text)
        self._blank_lines = 0
        for first in lines:
            if first.strip():
                break
            self._blank_lines += 1
        else:
            raise InputError(f"{path}: is empty, expected a trace")
        self.is_json = first.lstrip().startswith(("{", "["))
        self.header_line = self._blank_lines + 1
        self._objects: Iterator[tuple[int, dict[str, Any]]] = iter(())
        self._cells: Iterator[tuple[int, list[str]]] = iter(())
        self.columns: tuple[str, ...]
        if self.is_json:
            self._objects = self._read_json(chain([first], lines))
            head = next(self._objects)
            self._objects = chain([head], self._objects)
            self.columns = tuple(head[1])
        else:
            self._cells = self._read_csv(chain([first], lines))
            self.columns = tuple(next(self._cells, (1, []))[1])

    def __iter__(self) -> Iterator[Record]:
        if self.is_json:
            for line, item in self._objects:
                cells = {normalise(name): value for name, value in item.items()}
                if len(cells) < len(item):
                    raise InputError(
                        f"{self.path}: line {line}: two keys differ in case or blanks only, expected one"
                    )
                yield line, cells
            return
        names = [normalise(name) for name in self.columns]
        for line, row in self._cells:
            yield line, dict(zip(names, row, strict=False))

    def cells(self) -> Iterator[tuple[int, list[str]]]:
        """Every CSV row by position, the first one too: for files without a header."""
        return chain([(self.header_line, list(self.columns))], self._cells)

    def _read_csv(self, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(lines, strict=True)
        width = 0
        while True:
            line = self._blank_lines + reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise InputError(f"{self.path}: line {line}: not valid CSV ({error})") from None
            width = width or len(cells)
            if len(cells) > width and any(cell.strip() for cell in cells[width:]):
                raise InputError(
                    f"{self.path}: line {line}: {len(cells)} cells, expected {width} (a thousands separator "
                    "needs quotes)"
                )
            if cells and (cells[0].strip() or any(cell.strip() for cell in cells)):
                yield line, cells

    def _read_json(self, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for line, text in enumerate(lines, self._blank_lines + 1):
            if not text.strip():
                continue
            item = parse_json(
                text,
                f"{self.path}: line {line}",
                "one whole object a line",
                parse_float=Decimal,
                parse_constant=str,
            )
            if not isinstance(item, dict):
                raise InputError(f"{self.path}: line {line}: {shown(item)}, expected one JSON object a line")
            yield line, item


class RowReader:
    """Checks the records of one file against its layout. Owns what the first row settles: how times are
    written."""

    def __init__(
        self, path: Path, layout: Layout, timestamp_unit: str = "auto", block_tokens: int | None = None
    ) -> None:
        self._path = path
        self._layout = layout
        self._wanted_unit = timestamp_unit
        self._block_tokens = block_tokens or layout.format.block_tokens
        self._fraction: int | None = None
        self._sparse: tuple[int, int, int] | None = None
        self.unit: str | None = layout.fixed_unit or (None if timestamp_unit == "auto" else timestamp_unit)
        self._is_iso: bool | None = None
        self._is_guessed = False
        self._keys = {
            name: normalise(name)
            for name in (layout.format.prompt, layout.format.output, layout.arrival or "")
        }
        if layout.fixed_unit and timestamp_unit not in ("auto", layout.fixed_unit):
            raise InputError(
                f"workload.timestamp_unit: {timestamp_unit!r}, expected auto: column {layout.arrival} says "
                "its unit"
            )

    def read(self, records: Iterable[Record]) -> Iterator[Row]:
        """Yield the rows in file order. Raises `InputError` at the first bad one."""
        fmt = self._layout.format
        for line, cells in records:
            arrival_ns = self._arrival(line, cells)
            prompt_tokens = self._tokens(line, cells, fmt.prompt)
            yield Row(
                line,
                arrival_ns,
                prompt_tokens,
                self._tokens(line, cells, fmt.output),
                self._max_tokens(line, cells),
                self._priority(line, cells),
                self._blocks(line, cells, prompt_tokens),
                self._patience(line, cells, arrival_ns),
                self._whole_numbers(line, cells, fmt.exit_loops, 1, MAX_TOKENS, "whole numbers from 1 on"),
                self._whole_numbers(line, cells, fmt.guessed, 0, 1, "1 or 0 for each token"),
            )

    def _arrival(self, line: int, cells: Mapping[str, Any]) -> int | None:
        column = self._layout.arrival
        if column is None:
            return None
        value = cells.get(self._keys[column])
        text = "" if value is None or isinstance(value, bool | list | dict) else str(value).strip()
        if not text:
            self._refuse(line, column, value, "an arrival time")
        if self._is_iso is None:
            self._is_iso = not is_number(text)
            if self._is_iso and self._wanted_unit != "auto":
                self._refuse(
                    line,
                    column,
                    value,
                    f"a number of {UNIT_NAMES[self._wanted_unit]}, as workload.timestamp_unit says",
                )
            if not self._is_iso and self.unit is None:
                self.unit = guess_unit(text, self._layout.format.unit)
                self._is_guessed = self.unit != self._layout.format.unit
        if self._fraction is None and self.unit == "ms" and self._wanted_unit == "auto" and "." in text:
            self._fraction = line
        try:
            return iso_ns(text) if self._is_iso else number_ns(text, self.unit or "s")
        except TimestampError as error:
            self._refuse(line, column, value, str(error).removeprefix("expected "))

    def _tokens(self, line: int, cells: Mapping[str, Any], column: str) -> int:
        value = cells.get(self._keys[column])
        count = _whole(value)
        if count is None or not 0 <= count <= MAX_TOKENS:
            self._refuse(line, column, value, f"a whole number of tokens from 0 to {MAX_TOKENS}")
        return count

    def _max_tokens(self, line: int, cells: Mapping[str, Any]) -> int | None:
        column = self._layout.format.max_tokens
        if column is None or _is_blank(cells.get(column)):
            return None
        count = _whole(cells[column])
        if count is None or not 1 <= count <= MAX_TOKENS:
            self._refuse(
                line, column, cells[column], f"nothing or a whole number of tokens from 1 to {MAX_TOKENS}"
            )
        return count

    def _priority(self, line: int, cells: Mapping[str, Any]) -> int:
        column = self._layout.format.priority
        if column is None or _is_blank(cells.get(column)):
            return 0
        priority = _whole(cells[column])
        if priority is None or abs(priority) > MAX_TOKENS:
            self._refuse(line, column, cells[column], "nothing or a whole number, lower first")
        return priority

    def _patience(self, line: int, cells: Mapping[str, Any], arrival_ns: int | None) -> int | None:
        """From the arrival to the hang-up, which the file has in nanoseconds on the clock of its arrivals."""
        column = self._layout.format.cancel
        if column is None or _is_blank(cells.get(column)):
            return None
        if arrival_ns is None:
            self._refuse(line, column, cells[column], "nothing in a file without arrival times")
        try:
            cancel_ns = number_ns(str(cells[column]).strip(), "ns")
        except TimestampError as error:
            self._refuse(line, column, cells[column], str(error).removeprefix("expected "))
        if cancel_ns < arrival_ns:
            self._refuse(line, column, cells[column], f"nothing or at least the arrival, {arrival_ns} ns")
        return cancel_ns - arrival_ns

    def _blocks(self, line: int, cells: Mapping[str, Any], prompt_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt's blocks. More than the prompt has blocks contradict the block size; fewer are
        remembered for `notes`."""
        column = self._layout.format.blocks
        if column is None or column not in cells:
            return ()
        value = cells[column]
        ids = value
        if isinstance(value, str):
            try:
                ids = json.loads(value)
            except (ValueError, RecursionError):
                ids = None
        if not isinstance(ids, list) or any(
            type(item) is not int or not 0 <= item <= LARGEST_ID for item in ids
        ):
            self._refuse(line, column, value, "a list of block ids, whole numbers from 0 to 2**64 - 1")
        size = self._block_tokens
        if prompt_tokens and len(ids) > -(-prompt_tokens // size):
            self._refuse(
                line,
                column,
                value,
                f"at most {-(-prompt_tokens // size)} ids for {prompt_tokens} tokens in blocks of {size}; "
                "workload.block_tokens says another size",
            )
        if ids and len(ids) < prompt_tokens // size and self._sparse is None:
            self._sparse = line, len(ids), prompt_tokens
        return tuple(ids)

    def _whole_numbers(
        self, line: int, cells: Mapping[str, Any], column: str | None, low: int, high: int, expected: str
    ) -> tuple[int, ...]:
        """The numbers in one cell, with blanks between; none where it is empty."""
        if column is None or _is_blank(cells.get(column)):
            return ()
        value = cells[column]
        found = [_whole(item) for item in (value if isinstance(value, list) else str(value).split())]
        if not all(item is not None and low <= item <= high for item in found):
            self._refuse(line, column, value, f"nothing or {expected} with blanks between")
        return tuple(item for item in found if item is not None)

    def _refuse(self, line: int, column: str, value: object, expected: str) -> NoReturn:
        found = "missing" if _is_blank(value) else shown(str(value) if isinstance(value, Decimal) else value)
        raise InputError(f"{self._path}: line {line}: {column}: {found}, expected {expected}")

    def notes(self) -> Iterator[str]:
        """Sentences on what the file's numbers were taken for, where they leave a doubt."""
        if self._is_guessed:
            yield f"{self._layout.arrival} was read as {UNIT_NAMES[self.unit or 's']}"
        if self._fraction is not None:
            yield (
                f"line {self._fraction}: {self._layout.arrival} has a fraction and was read as milliseconds; "
                "workload.timestamp_unit: s reads seconds"
            )
        if self._sparse is not None:
            line, num_ids, prompt_tokens = self._sparse
            yield (
                f"line {line}: {num_ids} ids for {prompt_tokens} tokens leave the end of the prompt without "
                f"one, in blocks of {self._block_tokens} tokens; workload.block_tokens says another size"
            )

    @property
    def assumed_unit(self) -> str | None:
        """What the numbers of the arrival column were taken for where nobody said it."""
        is_said = self._layout.fixed_unit or self._wanted_unit != "auto"
        return None if self._is_iso or is_said or self.unit is None else UNIT_NAMES[self.unit]


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _whole(value: object) -> int | None:
    """`value` as a whole number: `374`, `"374"` and `"374.0"` are 374; anything else is None."""
    if isinstance(value, str):
        value = value.strip()
        if value.isascii() and value.isdigit() and len(value) < 20:
            return int(value)
        try:
            value = Decimal(value) if "_" not in value else None
        except InvalidOperation:
            return None
    if isinstance(value, Decimal):
        if not value.is_finite() or value.adjusted() > 20 or value != value.to_integral_value():
            return None
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
