"""`requests.csv`, written while a run goes on and read back as a stream: one record at a time, whatever the
size of the file.

One line per request in order of arrival, as `RequestRecord.number` counts it; a time that never came is
empty. `token_ns` is the delivery time of every token, joined by spaces; `content` is `tokens:id id id` where
a prompt has content ids. Until its run has ended the file holds the requests that have, in the order in which
they did.
"""

import csv
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policies.core.engine.runlog import REQUEST_COLUMNS, RequestRecord
from policies.core.seam.request import Request, Status
from results.csvlog import Columns, Row, read_rows
from results.files import GrowingFile, drafted

COLUMNS = Columns(REQUEST_COLUMNS, ("content",))
"""Runs recorded before there were shared prefixes lack the later one."""
STATUSES = frozenset(map(str, Status))


class LoggedRequest(NamedTuple):
    """One line of `requests.csv`: its fields as text, the record they tell, and what its column
    `output_tokens` says (of a record: the number of its token times)."""

    row: Row
    record: RequestRecord
    output_tokens: int


class RequestFile:
    """`path` while it is being written: `write` takes each record that has ended, `finish` those that have
    not.

    The line of columns is on the disk from the beginning: a file that holds no request can be read, too.
    """

    def __init__(self, path: Path, more: Sequence[str] = ()) -> None:
        """`more` are columns beside those of every run."""
        self._path = path
        self._nothing = ("",) * len(more)
        self._file = GrowingFile(path)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow((*REQUEST_COLUMNS, *more))
        self._file.flush()
        self._numbers = array("q")

    def write(self, record: RequestRecord, more: Sequence[object] = ()) -> None:
        """Add a line, with the fields of the further columns. Raises `WriteError` when the disk does not take
        it."""
        self._writer.writerow((*request_row(record), *(more or self._nothing)))
        self._numbers.append(record.number)

    def finish(self, unfinished: Iterable[RequestRecord]) -> None:
        """Write `unfinished`, close the file, and put its lines in order of arrival.

        Raises `WriteError` when the disk does not take it all: then the file holds what it took, in whole
        lines and in no order.
        """
        try:
            for record in unfinished:
                self.write(record)
        finally:
            self.close()
        with open(self._path, "rb") as file:
            starts = array("q", [0])
            for line in file:
                starts.append(starts[-1] + len(line))
            header, *spans = pairwise(starts)
            numbers = np.array(self._numbers[: len(spans)])
            with drafted(self._path) as draft, open(draft, "wb") as ordered:
                for start, end in (header, *(spans[at] for at in np.argsort(numbers))):
                    file.seek(start)
                    ordered.write(file.read(end - start))

    def close(self) -> None:
        """Close it once, as it is; later calls do nothing."""
        self._file.close()

    def records(self) -> Iterator[RequestRecord]:
        """What the file holds, once it is closed."""
        return (request.record for request in read_requests(self._path))


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


def read_requests(path: Path) -> Iterator[LoggedRequest]:
    """Every request of a `requests.csv`, in its order; its line counts for its record's `number`.

    Raises `InputError` naming file, line and column when the file cannot be used (see
    `results.csvlog.read_rows`) or holds a line that is no request.
    """
    for number, row in enumerate(read_rows(path, COLUMNS)):
        fields, whole = row.fields, row.whole
        if fields["status"] not in STATUSES:
            raise row.wrong("status", f"one of {', '.join(Status)}")
        request = Request(
            whole("request_id"),
            whole("arrival_ns"),
            whole("prompt_tokens"),
            whole("max_tokens"),
            whole("priority"),
            *_content(row),
        )
        record = RequestRecord(
            request,
            number,
            Status(fields["status"]),
            row.whole_or_none("first_scheduled_ns"),
            row.whole_or_none("finished_ns"),
            whole("preemptions"),
            fields["reason"],
            array("q", row.wholes("token_ns")),
        )
        yield LoggedRequest(row, record, whole("output_tokens"))


def _content(row: Row) -> tuple[tuple[int, ...], int]:
    """(ids, tokens of one id) of a `content` field."""
    tokens, _, ids = row.fields["content"].partition(":")
    try:
        return (tuple(map(int, ids.split())), int(tokens)) if tokens else ((), 0)
    except ValueError:
        raise row.wrong("content", "tokens:id id id") from None
