"""`trace.json.gz`: a run as Chrome trace events, which https://ui.perfetto.dev opens. Streamed: memory does
not grow with the run.

Process `device` has one track per depth and one each for the prelude (embedding) and the coda (LM head): one
slice for every range at every depth it runs, named `r12 c3` for chunk 3 of request 12's prompt and `r12
@1034` for the decode row at position 1034. A batch of several loops is divided into that many equal parts,
because the device reports the batch as a whole. Ranges of one batch share their time, so Perfetto draws them
below one another. Counters tell prompt and decode rows per invocation and requests in service. Process
`requests` has a slice per request from arrival to its end, with queue, prefill and decode inside it.
"""

import gzip
import heapq
import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from policies.core.engine.runlog import RequestRecord
from policies.core.seam.batch import Stage
from results.batchlog import LoggedBatch, LoggedRange

MAX_BATCHES = 50_000
"""Batches in a trace unless told otherwise: a few MB compressed, a few seconds to write."""

DEVICE_PID, REQUESTS_PID = 1, 2
PRELUDE_TID, DEPTH_TID, CODA_TID = 1, 10, 9_999


def write_trace(
    path: Path,
    batches: Iterable[LoggedBatch],
    records: Iterable[RequestRecord],
    *,
    num_loops: int,
    chunk_tokens: int,
    label: str = "",
    max_batches: int | None = MAX_BATCHES,
) -> int | None:
    """Write the trace and return the number of batches in it when it was cut at `max_batches` (None: nothing
    was cut).

    A cut trace says so under `otherData` and with a mark at the cut, and leaves out requests that arrive
    after it. The same run always gives the same bytes.
    """
    cut: int | None = None
    end_ns = 0
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=5, mtime=0) as file,
    ):
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        _write(file, _names(num_loops), first=True)
        origins: dict[int, int] = {}
        for number, batch in enumerate(batches):
            if max_batches is not None and number == max_batches:
                cut = number
                _write(file, _cut_mark(batch, cut))
                break
            end_ns = batch.finished_ns
            _write(file, _batch_events(batch, chunk_tokens, origins))
        for events in _request_events(records, end_ns if cut is not None else None):
            _write(file, events)
        note = "all batches" if cut is None else f"the first {cut} batches; the rest is in batches.csv"
        file.write(b'\n],"otherData":' + json.dumps({"run": label, "holds": note}).encode() + b"}\n")
    return cut


def track(stage: str, depth: int) -> int:
    """Thread id of the track that shows `stage` at `depth`."""
    if stage in (Stage.PRELUDE, Stage.PREFILLING_PRELUDE):
        return PRELUDE_TID
    is_head = stage in (Stage.CODA, Stage.VERIFY, Stage.DRAFT)
    return CODA_TID if is_head else DEPTH_TID + depth


def range_name(item: LoggedRange, chunk_tokens: int, origin: int = 0) -> str:
    """`r12 c3` for a range in chunk 3 of a prompt whose window starts at token `origin`, `r12 @1034` for a
    decode or coda row."""
    if item.is_prompt:
        return f"r{item.request_id} c{(item.token_start - origin) // chunk_tokens}"
    return f"r{item.request_id} @{item.token_start}"


def _write(file: gzip.GzipFile, events: Iterable[str], first: bool = False) -> None:
    text = ",\n".join(events)
    if text:
        file.write((text if first else ",\n" + text).encode())


def _us(time_ns: int) -> str:
    """Nanoseconds as the format's microseconds, exactly: 1234567 is 1234.567."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _names(num_loops: int) -> Iterator[str]:
    tracks = {PRELUDE_TID: "prelude (embed)", CODA_TID: "coda (LM head)"}
    tracks |= {DEPTH_TID + depth: f"depth {depth}" for depth in range(num_loops)}
    for pid, process in ((DEVICE_PID, "device"), (REQUESTS_PID, "requests")):
        yield f'{{"ph":"M","name":"process_name","pid":{pid},"args":{{"name":"{process}"}}}}'
        yield f'{{"ph":"M","name":"process_sort_index","pid":{pid},"args":{{"sort_index":{pid}}}}}'
    for tid in sorted(tracks):
        where = f'"pid":{DEVICE_PID},"tid":{tid}'
        yield f'{{"ph":"M","name":"thread_name",{where},"args":{{"name":"{tracks[tid]}"}}}}'
        yield f'{{"ph":"M","name":"thread_sort_index",{where},"args":{{"sort_index":{tid}}}}}'


def _batch_events(batch: LoggedBatch, chunk_tokens: int, origins: dict[int, int]) -> Iterator[str]:
    ranges = batch.ranges()
    named = []
    for item in ranges:
        origin = origins.setdefault(item.request_id, item.token_start)
        span = f'"tokens":{item.token_count},"token_start":{item.token_start}'
        args = f'"batch":{batch.seq},"stage":"{item.stage}",{span}'
        named.append((range_name(item, chunk_tokens, origin), args, item))
    prompt_rows = sum(item.token_count for item in ranges if item.is_prompt)
    for part, (start_ns, end_ns) in enumerate(batch.invocations()):
        if batch.loop_count:
            rows = f'"prompt":{prompt_rows},"decode":{batch.rows - prompt_rows}'
            where = f'"pid":{DEVICE_PID},"ts":{_us(start_ns)}'
            yield f'{{"ph":"C","name":"rows per invocation",{where},"args":{{{rows}}}}}'
        when = f'"ts":{_us(start_ns)},"dur":{_us(end_ns - start_ns)}'
        for name, args, item in named:
            depth = item.depth + part
            yield (
                f'{{"ph":"X","name":"{name}","pid":{DEVICE_PID},"tid":{track(item.stage, depth)},{when},'
                f'"args":{{{args},"depth":{depth},"rows_in_batch":{batch.rows}}}}}'
            )


def _cut_mark(batch: LoggedBatch, cut: int) -> Iterator[str]:
    name = f"trace cut after {cut} batches; the rest is in batches.csv"
    where = f'"pid":{DEVICE_PID},"tid":{PRELUDE_TID},"ts":{_us(batch.started_ns)}'
    yield f'{{"ph":"i","s":"g","name":"{name}",{where}}}'


def _request_events(records: Iterable[RequestRecord], until_ns: int | None) -> Iterator[Iterable[str]]:
    """Nested async slices, request by request, and the number of them in service (first scheduled to
    finished) as a counter.

    Slices that end after `until_ns` are drawn to their real end; requests that arrive after it are left out.
    """
    scheduled_ns, ended_ns = array("q"), array("q")
    for record in records:
        request = record.request
        if until_ns is not None and request.arrival_ns > until_ns:
            continue
        if record.first_scheduled_ns is not None:
            scheduled_ns.append(record.first_scheduled_ns)
            if record.finished_ns is not None:
                ended_ns.append(record.finished_ns)
        yield _slices(record)
    steps = heapq.merge(
        ((time_ns, -1) for time_ns in sorted(ended_ns)), ((time_ns, 1) for time_ns in sorted(scheduled_ns))
    )
    running = 0
    for time_ns, step in steps:
        running += step
        where = f'"pid":{DEVICE_PID},"ts":{_us(time_ns)}'
        yield (f'{{"ph":"C","name":"requests in service",{where},"args":{{"requests":{running}}}}}',)


def _slices(record: RequestRecord) -> Iterator[str]:
    """One request from arrival to end, with its queue, prefill and decode."""
    request = record.request
    name, end_ns = f"r{request.request_id}", record.finished_ns
    edges = [("queue", request.arrival_ns, _first(record.first_scheduled_ns, end_ns))]
    if record.first_scheduled_ns is not None:
        edges.append(("prefill", record.first_scheduled_ns, _first(record.first_token_ns, end_ns)))
    if record.first_token_ns is not None and record.output_tokens > 1:
        edges.append(("decode", record.first_token_ns, end_ns))
    info = (
        f'"prompt_tokens":{request.prompt_tokens},"output_tokens":{record.output_tokens},"status":"{record.status.value}",'
        f'"reason":{json.dumps(record.reason)}'
    )
    yield _async("b", name, request.request_id, request.arrival_ns, info)
    for part, start_ns, stop_ns in edges:
        if stop_ns is not None:
            yield _async("b", part, request.request_id, start_ns)
            yield _async("e", part, request.request_id, stop_ns)
    if end_ns is not None:
        yield _async("e", name, request.request_id, end_ns)


def _first(time_ns: int | None, other_ns: int | None) -> int | None:
    return other_ns if time_ns is None else time_ns


def _async(phase: str, name: str, request_id: int, time_ns: int, args: str = "") -> str:
    return (
        f'{{"ph":"{phase}","cat":"request","name":"{name}","id":{request_id},"pid":{REQUESTS_PID},"tid":0,"ts":{_us(time_ns)},'
        f'"args":{{{args}}}}}'
    )
