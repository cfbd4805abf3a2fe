"""`requests.csv`, written while a run goes on and read back as a stream: one record at a time, whatever the
size of the file.

One line per request in order of arrival, as `RequestRecord.number` counts it; a time that never came is
empty. `token_ns` is the delivery time of every token, joined by spaces; `content` is `tokens:id id id` where
a prompt has content ids. Until its run has ended the file holds the requests that have, in the order in which
they did.
"""

import csv
import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from policies.core.engine.runlog import REQUEST_COLUMNS, RequestRecord
from policies.core.errors import InputError
from policies.core.seam.request import Request, Status
from results.files import GrowingFile, drafted


class RequestFile:
    """`path` while it is being written: `write` takes each record that has ended, `finish` those that have
    not.

    The line of columns is on the disk from the beginning: a file that holds no request can be read, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GrowingFile(path)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(REQUEST_COLUMNS)
        self._file.flush()
        self._numbers = array("q")

    def write(self, record: RequestRecord) -> None:
        """Add a line. Raises `WriteError` when the disk does not take it."""
        self._writer.writerow(request_row(record))
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
        return read_requests(self._path)


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


def read_requests(path: Path) -> Iterator[RequestRecord]:
    """Every record of a `requests.csv` with today's columns, in its order; its line counts for its `number`.

    Raises `InputError` naming file and line when the file is missing, has other columns, or holds a line that
    is no request.
    """
    csv.field_size_limit(sys.maxsize)  # the token times of one long request are more than csv's 128 KiB
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if tuple(header) != REQUEST_COLUMNS:
                raise InputError(
                    f"{path} line 1: columns {','.join(header)}, expected {','.join(REQUEST_COLUMNS)}"
                )
            for number, fields in enumerate(reader):
                try:
                    yield _record(fields, number)
                except ValueError as error:
                    raise InputError(f"{path} line {number + 2}: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is not a CSV file ({error})") from None


def _record(fields: list[str], number: int) -> RequestRecord:
    if len(fields) != len(REQUEST_COLUMNS):
        raise ValueError(f"{len(fields)} fields, expected {len(REQUEST_COLUMNS)}")
    (
        request_id, arrival_ns, prompt_tokens, _, status, first_scheduled_ns, _, finished_ns, preemptions,
        max_tokens, priority, reason, token_ns, content,
    ) = fields  # fmt: skip
    content_ids, content_tokens = parse_content(content)
    return RequestRecord(
        Request(
            int(request_id),
            int(arrival_ns),
            int(prompt_tokens),
            int(max_tokens),
            int(priority),
            content_ids,
            content_tokens,
        ),
        number,
        Status(status),
        int(first_scheduled_ns) if first_scheduled_ns else None,
        int(finished_ns) if finished_ns else None,
        int(preemptions),
        reason,
        array("q", map(int, token_ns.split())),
    )


def parse_content(text: str) -> tuple[tuple[int, ...], int]:
    """(ids, tokens of one id) of a `content` field. Raises `ValueError` for other text."""
    tokens, _, ids = text.partition(":")
    return (tuple(map(int, ids.split())), int(tokens)) if tokens else ((), 0)
