"""A run directory of either world read back as the inputs of a replay: settings, requests, and the events of
the batch log.

Reads `config.yaml`, `requests.csv` and `batches.csv`, and holds them to what any run leaves: numbers, and
times in order. Whether the decisions in them are right is `sim.replay`'s question.
"""

import csv
import dataclasses
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from policies.config.runconfig import RunConfig, load_config, model_shape
from policies.core.engine.arrivals import Arrivals
from policies.core.engine.runlog import BATCH_COLUMNS, REQUEST_COLUMNS
from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.core.seam.request import Request, Status
from results.load import load_run
from results.requestlog import parse_content
from results.rundir import BATCHES, CONFIG, REQUESTS
from workloads.presets import resolve_preset
from workloads.spec import PresetSpec, TraceSpec, WorkloadSpec, parse_workload

Fields = Mapping[str, str]
BATCH_TIMES = ("submitted_ns", "started_ns", "finished_ns", "collected_ns")
LATER_COLUMNS = ("exits", "grown", "preempted", "resumed", "reused", "content")
"""Columns that runs recorded before there was early exit, or pressure on the KV pool, or shared prefixes do
not have."""


class LoggedArrivals(Arrivals):
    """Requests at the times at which they really arrived, in the order in which the run let them in.

    A closed loop's logged time already says when a place came free, so only the count of free places is kept
    here. It cannot be dropped: when a batch was formed at the very instant at which a request ended, but
    before that end was collected, the request that the end let in bears the same time and was not there yet.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int | None) -> None:
        super().__init__((), concurrency)
        self._requests = deque(requests)
        self._places = concurrency

    def next_ns(self) -> int | None:
        return self._requests[0].arrival_ns if self._requests and self._places != 0 else None

    @property
    def is_exhausted(self) -> bool:
        return not self._requests

    def pop(self, now_ns: int) -> Request | None:
        arrival_ns = self.next_ns()
        if arrival_ns is None or arrival_ns > now_ns:
            return None
        if self._places is not None:
            self._places -= 1
        return self._requests.popleft()

    def ended(self, now_ns: int) -> None:
        if self._places is not None:
            self._places += 1


class LoggedBatch(NamedTuple):
    """One line of `batches.csv`: its fields as text, and the numbers that a replay is driven by.

    `busy_ns` is how long the host chose, packed and launched it; from when on, the log does not say.
    """

    line: int
    fields: Fields
    seq: int
    after_seq: int
    exits: frozenset[int]
    busy_ns: int
    submitted_ns: int
    started_ns: int
    finished_ns: int
    collected_ns: int


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a replay needs of a run. `outputs` is its oracle: the tokens that every request was given, once it
    had finished; `patience_ns` says of the cancelled ones how long after their arrival that was.

    `request_fields` are the lines of `requests.csv`, in its order. `is_cut` says that the run was interrupted
    or broke off, so that its log ends somewhere in the middle.
    """

    path: Path
    config: RunConfig
    model: ModelShape
    requests: tuple[Request, ...]
    request_fields: tuple[Fields, ...]
    outputs: Mapping[int, int]
    patience_ns: Mapping[int, int]
    concurrency: int | None
    is_cut: bool

    @classmethod
    def read(cls, path: Path) -> "RecordedRun":
        """Raises `InputError` with one sentence for a directory that is no whole run or whose files cannot be
        used."""
        summary = load_run(path).summary
        config = load_config(path / CONFIG)
        if config.cache.num_blocks is None:
            raise InputError(
                f"{path / CONFIG}: cache.num_blocks: null, expected the number of blocks that the run had"
            )
        concurrency, max_context = _limits(parse_workload(config.workload, config.where))
        model = model_shape(config)
        if max_context is not None:
            model = dataclasses.replace(model, max_context_tokens=min(model.max_context_tokens, max_context))
        fields = tuple(_read_csv(path / REQUESTS, REQUEST_COLUMNS))
        requests, outputs, patience_ns = _requests(fields, path / REQUESTS)
        is_cut = summary["status"] == "interrupted" or "error" in summary
        return cls(path, config, model, requests, fields, outputs, patience_ns, concurrency, is_cut)

    def output_tokens(self, request_id: int) -> int:
        return self.outputs[request_id]

    def batches(self) -> Iterator[LoggedBatch]:
        """Every logged batch, streamed. Raises `InputError` at a line that no run can have written, and, of a
        run that was cut off, at a request whose own line a full disk did not take."""
        path = self.path / BATCHES
        known = set(map(str, self.outputs))
        before = LoggedBatch(1, {}, -1, -1, frozenset(), 0, 0, 0, 0, 0)
        for line, fields in enumerate(_read_csv(path, BATCH_COLUMNS), start=2):
            where = f"{path} line {line}"
            seq, after_seq, *times = (
                _whole(fields, name, where) for name in ("seq", "after_seq", *BATCH_TIMES)
            )
            busy_ns = _whole(fields, "select_ns", where) + _whole(fields, "host_ns", where)
            batch = LoggedBatch(line, fields, seq, after_seq, _exits(fields, where), busy_ns, *times)
            if seq != before.seq + 1 or not before.after_seq <= after_seq < seq:
                raise InputError(
                    f"{where}: batch {seq} after batch {after_seq} was collected, expected batch "
                    f"{before.seq + 1} after one from {before.after_seq} to {seq - 1}"
                )
            if (
                times != sorted(times)
                or batch.started_ns < before.finished_ns
                or batch.collected_ns < before.collected_ns
            ):
                raise InputError(
                    f"{where}: submitted, started, finished, collected at {', '.join(map(str, times))} ns, "
                    f"expected times that do not fall and a start after {before.finished_ns} ns, the end of "
                    "the batch before"
                )
            for item in fields["allocated"].split() if self.is_cut else ():
                if item.partition(":")[0] not in known:
                    raise InputError(
                        f"{where}: allocated: {item}, expected a request of {REQUESTS}, which lacks some "
                        "when the disk was full"
                    )
            yield batch
            before = batch


def _limits(spec: WorkloadSpec) -> tuple[int | None, int | None]:
    """(concurrency, max_context) of a workload, without reading its files."""
    if isinstance(spec, TraceSpec):
        replaced = spec.arrival.concurrency if spec.arrival is not None else None
        return (replaced if spec.concurrency is None else spec.concurrency), spec.max_context
    synthetic = resolve_preset(spec) if isinstance(spec, PresetSpec) else spec
    return synthetic.arrival.concurrency, synthetic.max_context


def _requests(
    lines: Iterable[Fields], path: Path
) -> tuple[tuple[Request, ...], dict[int, int], dict[int, int]]:
    """The requests in order of arrival, what each produces, and the patience of the cancelled ones."""
    requests: list[Request] = []
    outputs: dict[int, int] = {}
    patience_ns: dict[int, int] = {}
    latest_ns = 0
    for number, fields in enumerate(lines, start=2):
        where = f"{path} line {number}"
        names = ("request_id", "arrival_ns", "prompt_tokens", "max_tokens", "priority")
        request_id, arrival_ns, prompt_tokens, max_tokens, priority = (
            _whole(fields, name, where) for name in names
        )
        request = Request(
            request_id, arrival_ns, prompt_tokens, max_tokens, priority, *_content(fields, where)
        )
        delivered = _whole(fields, "output_tokens", where)
        if request.request_id in outputs:
            raise InputError(f"{where}: request {request.request_id} has a line already")
        if request.arrival_ns < latest_ns:
            raise InputError(
                f"{where}: arrival_ns: {request.arrival_ns}, expected at least {latest_ns}, the arrival "
                "before"
            )
        if request.prompt_tokens < 1 or not 0 <= delivered <= request.max_tokens:
            raise InputError(
                f"{where}: {request.prompt_tokens} prompt tokens and {delivered} output tokens of "
                f"{request.max_tokens}, expected at least 1 prompt token and no more output than max_tokens"
            )
        latest_ns = request.arrival_ns
        outputs[request.request_id] = delivered if fields["status"] == Status.FINISHED else request.max_tokens
        if fields["status"] == Status.CANCELLED:
            patience_ns[request.request_id] = _whole(fields, "finished_ns", where) - request.arrival_ns
        requests.append(request)
    return tuple(requests), outputs, patience_ns


def _read_csv(path: Path, columns: tuple[str, ...]) -> Iterator[Fields]:
    """Lines of `path` as fields by name; further columns are let pass, columns that came later may be
    missing: they are empty.

    Raises `InputError`.
    """
    csv.field_size_limit(sys.maxsize)  # the token times of one long request are more than csv's 128 KiB
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            missing = [name for name in columns if name not in header and name not in LATER_COLUMNS]
            if missing:
                raise InputError(
                    f"{path} line 1: column {missing[0]} is missing, expected {','.join(columns)}"
                )
            not_yet = {name: "" for name in columns if name not in header}
            for number, values in enumerate(reader, start=2):
                if len(values) != len(header):
                    raise InputError(f"{path} line {number}: {len(values)} fields, expected {len(header)}")
                yield {**dict(zip(header, values, strict=True)), **not_yet}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is not a CSV file ({error})") from None


def _content(fields: Fields, where: str) -> tuple[tuple[int, ...], int]:
    try:
        return parse_content(fields["content"])
    except ValueError:
        raise InputError(f"{where}: content: {fields['content']!r}, expected tokens:id id id") from None


def _whole(fields: Fields, name: str, where: str) -> int:
    try:
        return int(fields[name])
    except ValueError:
        raise InputError(f"{where}: {name}: {fields[name]!r}, expected a whole number") from None


def _exits(fields: Fields, where: str) -> frozenset[int]:
    try:
        return frozenset(map(int, fields["exits"].split()))
    except ValueError:
        raise InputError(
            f"{where}: exits: {fields['exits']!r}, expected request ids with blanks between"
        ) from None
