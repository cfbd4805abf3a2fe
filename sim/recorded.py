"""A run directory of either world read back as the inputs of a replay: settings, requests, and the events of
the batch log.

Reads `config.yaml`, `requests.csv` and `batches.csv`, and holds them to what any run leaves: numbers, and
times in order. Whether the decisions in them are right is `sim.replay`'s question.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from policies.config.runconfig import RunConfig, load_config, model_shape
from policies.core.engine.runlog import HANDOVER_COLUMNS
from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.core.seam.clients import Clients
from policies.core.seam.events import Arrival, Lost, Mail, Received, Sent
from policies.core.seam.request import Request, Status
from results.batchlog import LoggedBatch, read_batches
from results.csvlog import Columns, Fields, read_rows
from results.load import load_run
from results.requestlog import read_requests
from results.rundir import BATCHES, CONFIG, HANDOVERS, REQUESTS
from workloads.presets import resolve_preset
from workloads.spec import LiveSpec, PresetSpec, TraceSpec, WorkloadSpec, parse_workload


class LoggedClients(Clients):
    """Requests at the times at which they really arrived, in the order in which the run let them in.

    A closed loop's logged time already says when a place came free, so only the count of free places is kept
    here. It cannot be dropped: when a batch was formed at the very instant at which a request ended, but
    before that end was collected, the request that the end let in bears the same time and was not there yet.
    """

    def __init__(
        self, requests: Iterable[Request], concurrency: int | None, patience_ns: Mapping[int, int]
    ) -> None:
        super().__init__(requests, None, patience_ns)
        self._places = concurrency

    def _next_arrival_ns(self) -> int | None:
        return super()._next_arrival_ns() if self._places != 0 else None

    def _check_order(self, request: Request) -> None:
        """The log's order is the run's own; times were checked as they were read."""

    def _arrive(self, arrival_ns: int) -> Arrival:
        if self._places is not None:
            self._places -= 1
        return super()._arrive(arrival_ns)

    def ended(self, request: Request, status: Status, known_ns: int) -> None:
        super().ended(request, status, known_ns)
        if self._places is not None:
            self._places += 1


class LoggedMail(LoggedClients):
    """The same, and the news of transfers that an engine with a role heard, each after all other mail of its
    time."""

    def __init__(
        self,
        requests: Iterable[Request],
        concurrency: int | None,
        patience_ns: Mapping[int, int],
        handovers: Iterable[Sent | Received | Lost],
    ) -> None:
        super().__init__(requests, concurrency, patience_ns)
        self._handovers = deque(handovers)

    @property
    def is_exhausted(self) -> bool:
        return super().is_exhausted and not self._handovers

    def next_ns(self) -> int | None:
        next_ns = super().next_ns()
        if self._handovers and (next_ns is None or self._handovers[0].at_ns < next_ns):
            return self._handovers[0].at_ns
        return next_ns

    def pop(self, now_ns: int) -> Mail | None:
        next_ns = super().next_ns()
        news = self._handovers
        if news and news[0].at_ns <= now_ns and (next_ns is None or news[0].at_ns < next_ns):
            return news.popleft()
        return super().pop(now_ns)


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
    handovers: tuple[Sent | Received | Lost, ...]
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
        requests, fields, outputs, patience_ns = _requests(path / REQUESTS)
        is_cut = summary["status"] == "interrupted" or "error" in summary
        handovers = () if config.role == "whole" else tuple(_handovers(path / HANDOVERS))
        return cls(
            path, config, model, requests, fields, outputs, patience_ns, concurrency, handovers, is_cut
        )

    def clients(self) -> LoggedClients:
        """Whoever sent these requests, as the log knows them."""
        if self.config.role == "whole":
            return LoggedClients(self.requests, self.concurrency, self.patience_ns)
        return LoggedMail(self.requests, None, self.patience_ns, self.handovers)

    def output_tokens(self, request_id: int) -> int:
        return self.outputs[request_id]

    def batches(self) -> Iterator[LoggedBatch]:
        """Every logged batch, streamed. Raises `InputError` at a line that no run can have written, and, of a
        run that was cut off, at a request whose own line a full disk did not take."""
        known = set(map(str, self.outputs))
        seq = after_seq = -1
        finished_ns = collected_ns = 0
        for batch in read_batches(self.path / BATCHES):
            where = f"{self.path / BATCHES} line {batch.line}"
            if batch.seq != seq + 1 or not after_seq <= batch.after_seq < batch.seq:
                raise InputError(
                    f"{where}: batch {batch.seq} after batch {batch.after_seq} was collected, expected batch "
                    f"{seq + 1} after one from {after_seq} to {batch.seq - 1}"
                )
            times = [batch.submitted_ns, batch.started_ns, batch.finished_ns, batch.collected_ns]
            if times != sorted(times) or times[1] < finished_ns or times[3] < collected_ns:
                raise InputError(
                    f"{where}: submitted, started, finished, collected at {', '.join(map(str, times))} ns, "
                    f"expected times that do not fall and a start after {finished_ns} ns, the end of "
                    "the batch before"
                )
            for item in batch.fields["allocated"].split() if self.is_cut else ():
                if item.partition(":")[0] not in known:
                    raise InputError(
                        f"{where}: allocated: {item}, expected a request of {REQUESTS}, which lacks some "
                        "when the disk was full"
                    )
            yield batch
            seq, after_seq, finished_ns, collected_ns = batch.seq, batch.after_seq, times[2], times[3]


def _handovers(path: Path) -> Iterator[Sent | Received | Lost]:
    """What an engine heard of transfers, in order. Raises `InputError` for a line that none has heard."""
    latest_ns = 0
    for row in read_rows(path, Columns(HANDOVER_COLUMNS, ())):
        at_ns, request_id, what = row.whole("at_ns"), row.whole("request_id"), row.fields["what"]
        if at_ns < latest_ns:
            raise row.wrong("at_ns", f"at least {latest_ns}, the time before")
        latest_ns = at_ns
        if what == "received":
            yield Received(at_ns, request_id, row.whole("end"))
        elif what in ("sent", "lost"):
            yield Sent(at_ns, request_id) if what == "sent" else Lost(at_ns, request_id)
        else:
            raise row.wrong("what", "sent, received or lost")


def _limits(spec: WorkloadSpec) -> tuple[int | None, int | None]:
    """(concurrency, max_context) of a workload, without reading its files."""
    if isinstance(spec, TraceSpec):
        replaced = spec.arrival.concurrency if spec.arrival is not None else None
        return (replaced if spec.concurrency is None else spec.concurrency), spec.max_context
    if isinstance(spec, LiveSpec):
        return None, spec.max_context
    synthetic = resolve_preset(spec) if isinstance(spec, PresetSpec) else spec
    return synthetic.arrival.concurrency, synthetic.max_context


def _requests(
    path: Path,
) -> tuple[tuple[Request, ...], tuple[Fields, ...], dict[int, int], dict[int, int]]:
    """The requests in order of arrival, their lines, what each produces, and the patience of the cancelled
    ones."""
    requests: list[Request] = []
    lines: list[Fields] = []
    outputs: dict[int, int] = {}
    patience_ns: dict[int, int] = {}
    latest_ns = 0
    for row, record, delivered in read_requests(path):
        request, where = record.request, f"{path} line {row.line}"
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
        outputs[request.request_id] = delivered if record.status is Status.FINISHED else request.max_tokens
        if record.status is Status.CANCELLED:
            patience_ns[request.request_id] = row.whole("finished_ns") - request.arrival_ns
        requests.append(request)
        lines.append(row.fields)
    return tuple(requests), tuple(lines), outputs, patience_ns
