"""Recorded traces of every format, as columns: what a row means, which rows count, and what must be told to
the user."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from policies.core.errors import InputError
from workloads.columns import Columns, IntLists
from workloads.formats import Layout, normalise, recognise
from workloads.rows import Records, Row, RowReader
from workloads.servegen import dataset_beside, draw_servegen, looks_like_servegen
from workloads.spec import TraceSpec
from workloads.synthetic import arrival_times
from workloads.textfile import open_text


def read_trace(spec: TraceSpec, seed: int, base_dir: Path) -> Columns:
    """The usable rows of the file `spec.path` (relative to `base_dir`), the first `spec.limit` of them in
    file order.

    Rows with zero prompt or output tokens failed when they were recorded: they are counted in `skipped_rows`
    and left out. Nothing after the row that fills the limit is read. Raises `InputError` for anything that
    cannot be used.
    """
    path = base_dir / Path(spec.path).expanduser()
    with open_text(path) as text:
        records = Records(path, text)
        is_headless = not records.is_json and looks_like_servegen(records.columns)
        if spec.format == "servegen" or (spec.format == "auto" and is_headless):
            return _read_servegen(spec, path, base_dir, records, seed)
        _refuse_servegen_keys(spec)
        layout = recognise(records.columns, spec.format, f"{path}: line {records.header_line}")
        if layout.arrival is None and spec.arrival is None:
            columns = "|".join(layout.format.arrival)
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
    dataset = dataset_beside(path) if spec.dataset is None else base_dir / Path(spec.dataset).expanduser()
    return draw_servegen(spec, path, dataset, records.cells(), seed)


def _refuse_servegen_keys(spec: TraceSpec) -> None:
    for key in ("dataset", "start_s", "duration_s"):
        value = getattr(spec, key)
        if value is not None:
            raise InputError(
                f"workload.{key}: {value!r}, expected none: it belongs to ServeGen traces, and {spec.path} "
                "is not one"
            )


def _read_rows(spec: TraceSpec, path: Path, layout: Layout, records: Records, seed: int) -> Columns:
    columns = Columns(path.name, block_tokens=layout.format.block_tokens)
    if layout.format.blocks:
        columns.prefix_blocks = IntLists()
    if layout.format.exit_loops in [normalise(name) for name in records.columns]:
        columns.exit_loops = IntLists()
    reader = RowReader(path, layout, spec.timestamp_unit)
    usable = _usable_rows(reader, records, columns)
    for row in islice(usable, spec.limit):
        if row.arrival_ns is not None:
            columns.arrival_ns.append(row.arrival_ns)
        if row.patience_ns is not None:
            columns.patience_ns[len(columns)] = row.patience_ns
        columns.append(row.prompt_tokens, row.output_tokens, row.max_tokens, row.priority)
        if columns.prefix_blocks is not None:
            columns.prefix_blocks.append(row.blocks)
        if columns.exit_loops is not None:
            columns.exit_loops.append(row.exit_loops)
    if not len(columns):
        if columns.skipped_rows:
            raise InputError(
                f"{path}: all {columns.skipped_rows} rows failed (zero tokens), expected at least one that "
                "did not"
            )
        raise InputError(f"{path}: has column names and no rows, expected at least one request")
    if reader.unit_note is not None:
        columns.notes.append(reader.unit_note)
    if spec.arrival is not None:
        columns.arrival_ns = arrival_times(spec.arrival, len(columns), seed)
        columns.concurrency = spec.arrival.concurrency
        if layout.arrival is not None:
            columns.notes.append(f"recorded arrival times are replaced by a {spec.arrival.process} process")
    return columns


def _usable_rows(reader: RowReader, records: Records, columns: Columns) -> Iterator[Row]:
    """Rows that produced something; the others are counted in `columns` as they pass."""
    for row in reader.read(records):
        if row.prompt_tokens and row.output_tokens:
            yield row
        else:
            columns.skipped_rows += 1
