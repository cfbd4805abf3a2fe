"""The two tables of a run in fewer bytes, and back to the very same bytes: what a packed run holds instead of
them.

A table becomes one part per column, so that a compressor meets like beside like. Of `batches.csv`, times are
kept as differences that the device and the host really made (idle, duration, detection), and ranges by how
far each request has moved; of `requests.csv`, token times by which batch delivered them. A table that does
not come back byte for byte is kept as it is.
"""

import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Parts = dict[str, bytes]
INTEGERS, TEXTS = ".i64", ".txt"
RAW = "as-it-is"
TIMES = ("seq", "after_seq", "submitted_ns", "started_ns", "finished_ns", "collected_ns")


def encode_batches(table: bytes) -> Parts:
    """Parts of a `batches.csv` by name; `decode_batches` gives `table` back."""
    return _checked(table, _encode_batches, decode_batches)


def decode_batches(parts: Mapping[str, bytes]) -> bytes:
    if RAW in parts:
        return parts[RAW]
    columns: dict[str, Ints | list[str]] = {}
    for at, part in enumerate(sorted(parts)):
        if not part.startswith(f"{at:02d}."):
            raise ValueError(f"column {at} is missing")
        name, is_integers = part[3:-4], part.endswith(INTEGERS)
        columns[name] = _integers(parts[part]) if is_integers else parts[part].decode().split("\n")[:-1]
    columns |= _add_times(
        {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    )
    if "ranges" in columns:
        columns["ranges"] = _moved(
            columns["ranges"], lambda start, last: start + last, lambda _, result: result
        )
    texts = [
        map(str, column.tolist()) if isinstance(column, np.ndarray) else column for column in columns.values()
    ]
    return _lines([list(columns), *zip(*texts, strict=True)])


def encode_requests(table: bytes, delivered_ns: Ints | None) -> Parts:
    """Parts of a `requests.csv`. `delivered_ns` are the ends of the run's batches, None when they are not
    kept."""
    if delivered_ns is None:
        return {RAW: table}
    return _checked(
        table,
        lambda text: {"requests" + TEXTS: _retimed(text, lambda times: _batch_numbers(times, delivered_ns))},
        lambda parts: decode_requests(parts, delivered_ns),
    )


def decode_requests(parts: Mapping[str, bytes], delivered_ns: Ints | None) -> bytes:
    if RAW in parts:
        return parts[RAW]
    if delivered_ns is None:
        raise ValueError("token times name batches and there are none")
    return _retimed(parts["requests" + TEXTS], lambda steps: delivered_ns[np.cumsum(steps)])


def finished_ns(table: bytes) -> Ints:
    """The column `finished_ns` of a `batches.csv`. Raises `ValueError` for another table."""
    lines = table.decode().split("\n")[:-1]
    at = lines[0].split(",").index("finished_ns")
    return np.array([line.split(",")[at] for line in lines[1:]], dtype=np.int64)


def _checked(table: bytes, encode: Callable[[bytes], Parts], decode: Callable[[Parts], bytes]) -> Parts:
    try:
        parts = encode(table)
        return parts if decode(parts) == table else {RAW: table}
    except (ValueError, KeyError, IndexError, OverflowError, csv.Error):
        return {RAW: table}


def _encode_batches(table: bytes) -> Parts:
    header, *rows = (line.split(",") for line in table.decode().split("\n")[:-1])
    columns: dict[str, Ints | list[str]] = {}
    for name, texts in zip(header, zip(*rows, strict=True), strict=True):
        is_integers = all(text.removeprefix("-").isdigit() for text in texts)
        columns[name] = np.array(texts, dtype=np.int64) if is_integers else list(texts)
    columns |= _subtract_times(
        {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    )
    if "ranges" in columns:
        columns["ranges"] = _moved(
            columns["ranges"], lambda start, last: start - last, lambda start, _: start
        )
    return {
        f"{at:02d}.{name}{INTEGERS if isinstance(column, np.ndarray) else TEXTS}": _bytes_of(column)
        for at, (name, column) in enumerate(columns.items())
    }


def _subtract_times(columns: Mapping[str, Ints]) -> dict[str, Ints]:
    """`TIMES` as differences: idle before the batch, its duration, its detection, and its forming after the
    last collection.

    A batch formed at 50 when the last collected one was collected at 50, started at 70 after one that
    finished at 65, finished at 90 and collected at 93: submitted 0, started 5, finished 20, collected 3.
    """
    seq, after_seq, submitted, started, finished, collected = (columns[name] for name in TIMES)
    before = np.concatenate(([0], finished[:-1]))
    differences = (
        seq - np.arange(len(seq)), after_seq - seq, submitted - _collected_before(collected, after_seq),
        started - before, finished - started, collected - finished,
    )  # fmt: skip
    return dict(zip(TIMES, differences, strict=True))


def _add_times(columns: Mapping[str, Ints]) -> dict[str, Ints]:
    seq, after_seq, submitted, idle, duration, detection = (columns[name] for name in TIMES)
    seq = seq + np.arange(len(seq))
    after_seq = after_seq + seq
    finished = np.cumsum(idle + duration)
    collected = finished + detection
    times = (
        seq,
        after_seq,
        submitted + _collected_before(collected, after_seq),
        finished - duration,
        finished,
        collected,
    )
    return dict(zip(TIMES, times, strict=True))


def _collected_before(collected: Ints, after_seq: Ints) -> Ints:
    """When the batch `after_seq` was collected, 0 where there was none."""
    return np.where(after_seq >= 0, collected[np.maximum(after_seq, 0)], 0)


def _moved(
    ranges: Ints | list[str], change: Callable[[int, int], int], remember: Callable[[int, int], int]
) -> list[str]:
    """`ranges` with the start of every range changed by the request's last true start, which
    `remember(before, after)` picks."""
    last: dict[str, int] = {}
    found = []
    for text in ranges:
        items = []
        for item in str(text).split(" "):
            request, stage, depth, start, *rest = item.split(":")
            value = change(int(start), last.get(request, 0))
            last[request] = remember(int(start), value)
            items.append(":".join((request, stage, depth, str(value), *rest)))
        found.append(" ".join(items))
    return found


def _retimed(table: bytes, change: Callable[[Ints], Ints]) -> bytes:
    """`requests.csv` with the numbers in its column `token_ns` changed, per request."""
    csv.field_size_limit(sys.maxsize)  # the token times of one long request are more than csv's 128 KiB
    header, *rows = csv.reader(io.StringIO(table.decode(), newline=""))
    at = header.index("token_ns")
    for row in rows:
        numbers = change(np.array(row[at].split(), dtype=np.int64))
        row[at] = " ".join(map(str, numbers.tolist()))
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue().encode()


def _batch_numbers(times: Ints, delivered_ns: Ints) -> Ints:
    """Which batch ended at each of `times`, as steps from one token to the next. Raises `ValueError` when
    none did."""
    numbers = np.searchsorted(delivered_ns, times)
    if not np.array_equal(delivered_ns[numbers], times):
        raise ValueError("a token came between two batches")
    return np.diff(numbers, prepend=0)


def _bytes_of(column: Ints | Sequence[str]) -> bytes:
    """Integers byte plane by byte plane, the lowest bytes of all first; texts one a line."""
    if isinstance(column, np.ndarray):
        return column.astype("<i8").view(np.uint8).reshape(-1, 8).T.tobytes()
    return "".join(f"{text}\n" for text in column).encode()


def _integers(data: bytes) -> Ints:
    return np.frombuffer(data, dtype=np.uint8).reshape(8, -1).T.copy().view("<i8")[:, 0].astype(np.int64)


def _lines(rows: Sequence[Sequence[str]]) -> bytes:
    return "".join(f"{','.join(row)}\n" for row in rows).encode()
