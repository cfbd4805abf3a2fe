"""The logs of a run as tables for those who compute with columns: the same columns and the same refusals as
the streams of `results.csvlog`, read by pandas.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from policies.core.engine.batchlines import BATCH_COLUMNS
from policies.core.errors import InputError
from policies.process.sentences import one_line
from results import batchlog, requestlog
from results.csvlog import Columns, read_rows

WHOLE, WHOLE_OR_NONE, TEXT = "int64", "Int64", "str"
Types = Mapping[str, str]
REQUEST_TYPES: Types = {
    **dict.fromkeys(requestlog.COLUMNS.names, WHOLE),
    **dict.fromkeys(("first_scheduled_ns", "first_token_ns", "finished_ns"), WHOLE_OR_NONE),
    **dict.fromkeys(("status", "reason", "token_ns", "content"), TEXT),
}
NUMBERS = ("submitted_ns", "started_ns", "finished_ns", "select_ns", "collected_ns", "host_ns")
BATCH_TYPES: Types = {
    **dict.fromkeys(BATCH_COLUMNS, TEXT),
    **dict.fromkeys(("seq", "loop_count", "num_requests", "rows", "after_seq", *NUMBERS), WHOLE),
    **{name: WHOLE_OR_NONE for name in BATCH_COLUMNS if name.endswith("_ns") and name not in NUMBERS},
}
BATCHES_PER_PIECE = 50_000
TOKEN_TIMES = r"(-?\d+( -?\d+)*)?"


def requests_frame(path: Path) -> pd.DataFrame:
    """A `requests.csv`; times that never came are `<NA>`. Raises `InputError` like `read_requests`."""
    requests = pd.concat(list(read_frames(path, requestlog.COLUMNS, REQUEST_TYPES)), ignore_index=True)
    if not requests["token_ns"].str.fullmatch(TOKEN_TIMES).all():
        for _ in requestlog.read_requests(path):
            pass  # which names the line
    twice = requests["request_id"][requests["request_id"].duplicated()]
    if len(twice):
        raise InputError(f"{path}: request {twice.iloc[0]} has two lines, expected one")
    return requests


def batch_frames(
    path: Path, columns: Sequence[str] = BATCH_COLUMNS, num_batches: int = BATCHES_PER_PIECE
) -> Iterator[pd.DataFrame]:
    """A `batches.csv` as tables of at most `num_batches` lines and the wanted columns, so that memory stays
    bounded. Raises `InputError` like `read_batches`."""
    types = {name: BATCH_TYPES[name] for name in columns}
    return read_frames(path, batchlog.COLUMNS, types, num_batches)


def read_frames(
    path: Path, columns: Columns, types: Types, num_lines: int | None = None
) -> Iterator[pd.DataFrame]:
    """The columns of `types` in pieces of `num_lines` lines (None: one piece). Raises `InputError` naming
    file, line and column."""
    first = next(read_rows(path, columns), None)
    found = [name for name in types if first is None or name in _header(path)]
    try:
        with pd.read_csv(
            path,
            usecols=found,
            dtype={name: types[name] for name in found},
            keep_default_na=False,
            na_values={name: [""] for name in found if types[name] == WHOLE_OR_NONE},
            encoding="utf-8",
            chunksize=num_lines or 1 << 40,
        ) as pieces:
            for piece in pieces:
                yield piece.reindex(columns=list(types), fill_value="")
    except (OSError, ValueError, OverflowError) as error:
        _find_fault(path, columns, types)
        raise InputError(f"{path}: cannot be read: {one_line(error)[:200]}") from None


def _header(path: Path) -> Sequence[str]:
    with open(path, encoding="utf-8") as file:
        return file.readline().rstrip("\r\n").split(",")


def _find_fault(path: Path, columns: Columns, types: Types) -> None:
    """Raise the `InputError` that names the field which is not of its type."""
    for row in read_rows(path, columns):
        for name, kind in types.items():
            if kind == WHOLE:
                row.whole(name)
            elif kind == WHOLE_OR_NONE:
                row.whole_or_none(name)
