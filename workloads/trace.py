"""Recorded traces of every format, as columns: what a row means, which rows count, and what must be told to
the user."""

import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from policies.core.errors import InputError
from workloads.columns import Columns, IntLists
from workloads.drawn import MAX_REQUESTS
from workloads.formats import Layout, mapped, normalise, recognise
from workloads.rows import Records, Row, RowReader
from workloads.servegen import dataset_beside, draw_servegen, looks_like_servegen
from workloads.spec import TraceSpec
from workloads.synthetic import arrival_times
from workloads.textfile import bounded_lines, open_text


def read_trace(spec: TraceSpec, seed: int, base_dir: Path) -> Columns:
    """The usable rows of the file `spec.path` (relative to `base_dir`), the first `spec.limit` of them in
    file order.

    Rows with zero prompt or output tokens failed when they were recorded: they are counted in `skipped_rows`
    and left out. Nothing after the row that fills the limit is read. Raises `InputError` for anything that
    cannot be used.
    """
    path = base_dir / os.path.expanduser(spec.path)
    with open_text(path) as text:
        records = Records(path, bounded_lines(path, text))
        is_headless = not records.is_json and looks_like_servegen(records.columns)
        may_be = spec.format == "auto" and spec.columns is None
        if spec.format == "servegen" or (may_be and is_headless):
            return _read_servegen(spec, path, base_dir, records, seed)
        _refuse_keys(spec, ("dataset",), f"it belongs to ServeGen traces, and {spec.path} is not one")
        where = f"{path}: line {records.header_line}"
        if spec.columns is None:
            layout = recognise(records.columns, spec.format, where)
        else:
            layout = mapped(spec.columns, records.columns, where)
        if layout.arrival is None and spec.arrival is None:
            columns = "|".join(layout.format.arrival) or "that workload.columns.arrival names"
            raise InputError(
                f"{path}: has lengths and no arrival times, expected a column {columns} or an arrival "
                "process in workload.arrival"
            )
        return _read_rows(spec, path, layout, records, seed)


def _read_servegen(spec: TraceSpec, path: Path, base_dir: Path, records: Records, seed: int) -> Columns:
    if records.is_json:
        raise InputError(
            f"{path}: line {records.header_line}: JSON, expected the CSV windows of a ServeGen *-trace.csv"
        )
    if spec.arrival is not None:
        raise InputError(
            f"workload.arrival: cannot replace the arrivals of a ServeGen trace ({path}), expected none"
        )
    _refuse_keys(spec, ("timestamp_unit", "block_tokens"), "a ServeGen trace has neither units nor blocks")
    dataset = dataset_beside(path) if spec.dataset is None else base_dir / os.path.expanduser(spec.dataset)
    return draw_servegen(spec, path, dataset, records.cells(), seed)


def _refuse_keys(spec: TraceSpec, keys: Iterable[str], reason: str) -> None:
    for key in keys:
        value = getattr(spec, key)
        if value not in (None, "auto"):
            raise InputError(f"workload.{key}: {value!r}, expected none: {reason}")


def _read_rows(spec: TraceSpec, path: Path, layout: Layout, records: Records, seed: int) -> Columns:
    names = [normalise(name) for name in records.columns]
    if layout.arrival is None:
        _refuse_keys(spec, ("timestamp_unit", "start_s", "end_s"), f"{path.name} has no arrival times")
    if layout.format.blocks not in names:
        _refuse_keys(spec, ("block_tokens",), f"{path.name} has no column of block ids")
    columns = Columns(path.name, block_tokens=spec.block_tokens or layout.format.block_tokens)
    if layout.format.blocks:
        columns.prefix_blocks = IntLists()
    if layout.format.exit_loops in names:
        columns.exit_loops = IntLists()
    if layout.format.guessed in names:
        columns.guessed = IntLists()
    reader = RowReader(path, layout, spec.timestamp_unit, spec.block_tokens)
    window = _Window(spec)
    usable = _usable_rows(filter(window.has, reader.read(records)), columns)
    for row in islice(usable, spec.limit):
        if row.arrival_ns is not None:
            columns.arrival_ns.append(row.arrival_ns)
        if row.patience_ns is not None:
            columns.patience_ns[len(columns)] = row.patience_ns
        if len(columns) == MAX_REQUESTS:
            raise InputError(
                f"{path}: more than {MAX_REQUESTS} requests, expected workload.limit to take fewer"
            )
        columns.append(row.prompt_tokens, row.output_tokens, row.max_tokens, row.priority)
        if columns.prefix_blocks is not None:
            columns.prefix_blocks.append(row.blocks)
        if columns.exit_loops is not None:
            columns.exit_loops.append(row.exit_loops)
        if columns.guessed is not None:
            columns.guessed.append(row.guessed)
    if not len(columns):
        if window.latest_s is not None and (spec.start_s is not None or spec.end_s is not None):
            raise InputError(
                f"{path}: no request {_window_words(spec)}, expected a window in its own time, which is from "
                f"0 to {window.latest_s:,.12g} s"
            )
        if columns.skipped_rows:
            raise InputError(
                f"{path}: all {columns.skipped_rows} rows failed (zero tokens), expected at least one that "
                "did not"
            )
        raise InputError(f"{path}: has column names and no rows, expected at least one request")
    columns.notes.append(_account(spec, columns, reader.assumed_unit))
    columns.notes.extend(reader.notes())
    if spec.arrival is not None:
        columns.arrival_ns = arrival_times(spec.arrival, len(columns), seed)
        columns.concurrency = spec.arrival.concurrency
        if layout.arrival is not None:
            columns.notes.append(f"recorded arrival times are replaced by a {spec.arrival.process} process")
    return columns


class _Window:
    """Whether a row lies in the part of the file that is asked for: seconds after the file's first row."""

    def __init__(self, spec: TraceSpec) -> None:
        self._from_ns = 1e9 * (spec.start_s or 0)
        self._to_ns = math.inf if spec.end_s is None else 1e9 * spec.end_s
        self._is_whole = spec.start_s is None and spec.end_s is None
        self._origin_ns: int | None = None
        self.latest_s: float | None = None

    def has(self, row: Row) -> bool:
        if self._is_whole or row.arrival_ns is None:
            return True
        if self._origin_ns is None:
            self._origin_ns = row.arrival_ns
        at_ns = row.arrival_ns - self._origin_ns
        self.latest_s = max(self.latest_s or 0.0, at_ns / 1e9)
        return self._from_ns <= at_ns < self._to_ns


def _window_words(spec: TraceSpec) -> str:
    end = "its end" if spec.end_s is None else f"{spec.end_s:g} s"
    return f"from {spec.start_s or 0:g} s to {end}"


def _account(spec: TraceSpec, columns: Columns, assumed_unit: str | None) -> str:
    """What part of the file was taken, and what it is like as it was recorded."""
    count = len(columns)
    part = f"the first {count} requests" if count == spec.limit else f"all {count} requests"
    prompts, outputs = sum(columns.prompt_tokens) / count, sum(columns.output_tokens) / count
    if spec.start_s is not None or spec.end_s is not None:
        part += f" {_window_words(spec)}"
    words = f"{part} of {columns.name}: {prompts:,.0f} prompt and {outputs:,.0f} output tokens a request"
    span_ns = max(columns.arrival_ns, default=0) - min(columns.arrival_ns, default=0)
    if span_ns:
        words += f", {1e9 * (count - 1) / span_ns:,.4g} requests/s over {span_ns / 1e9:,.4g} s"
        if assumed_unit is not None:
            words += f" (times read as {assumed_unit}; workload.timestamp_unit says otherwise)"
    return words + ("; what follows was not read and may differ" if count == spec.limit else "")


def _usable_rows(rows: Iterable[Row], columns: Columns) -> Iterator[Row]:
    """Rows that produced something; the others are counted in `columns` as they pass."""
    for row in rows:
        if row.prompt_tokens and row.output_tokens:
            yield row
        else:
            columns.skipped_rows += 1
