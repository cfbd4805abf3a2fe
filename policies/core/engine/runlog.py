"""What a run leaves behind while it runs: one CSV line per batch, and one record per request, handed on as
soon as it has ended.

The batch log is the evidence: every invariant can be checked from it alone. The log computes no statistics.
However long a run, it holds records of requests that wait or run, of all others their ids, and counts of
batches by host time. `batchlines.py` knows how batches become text.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add, gt, sub
from typing import Protocol

from policies.core.engine.batchlines import BATCH_COLUMNS, batch_line, repeated_lines
from policies.core.errors import InvariantError
from policies.core.seam.batch import ExecutionBatch, Stage, Work
from policies.core.seam.events import COMPONENTS, Completion, Lost, Received, Sent, Times
from policies.core.seam.request import Request, Status

REQUEST_COLUMNS = (
    "request_id", "arrival_ns", "prompt_tokens", "output_tokens", "status", "first_scheduled_ns",
    "first_token_ns", "finished_ns", "preemptions", "max_tokens", "priority", "reason", "token_ns", "content",
)  # fmt: skip


HANDOVER_COLUMNS = ("at_ns", "what", "request_id", "end")


@dataclass(slots=True)
class RequestRecord:
    """The story of one request. Times are None until they happen; `token_ns` holds the delivery time of every
    token.

    `number` counts the requests that arrived before it: the order in which the run let them in, also where
    times are equal.
    """

    request: Request
    number: int
    status: Status = Status.WAITING
    first_scheduled_ns: int | None = None
    finished_ns: int | None = None
    preemptions: int = 0
    reason: str = ""
    token_ns: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def first_token_ns(self) -> int | None:
        return self.token_ns[0] if self.token_ns else None

    @property
    def output_tokens(self) -> int:
        return len(self.token_ns)


@dataclass(slots=True)
class StageTotals:
    """Sums over the batches of one stage; `components_ns` in the order of `COMPONENTS`, zeros where batches
    are not split."""

    num_batches: int = 0
    device_ns: int = 0
    limit_ns: int = 0
    host_ns: int = 0
    components_ns: list[int] = field(default_factory=lambda: [0] * len(COMPONENTS))


@dataclass(slots=True)
class BatchTotals:
    """Running sums over all batches, so that a summary needs no second pass over the log.

    `idle_ns` is device time between batches: from one's end to the next one's start. Of it, `idle_host_ns` is
    while the host chose, packed and launched the next one, and `idle_launch_ns` after that; the rest is
    before the next batch was thought of. `select_ns` and `host_ns` count batches by their host time to 10 ns:
    few entries, however long the run. Somebody waited `waited_for_places_ns` because all places were taken,
    and `waited_for_kv_ns` because the KV pool had no room, each from one batch's forming to the next one's.
    """

    recurrent_invocations: int = 0
    recurrent_rows: int = 0
    idle_ns: int = 0
    idle_host_ns: int = 0
    idle_launch_ns: int = 0
    by_stage: dict[Stage, StageTotals] = field(default_factory=dict)
    waited_for_places_ns: int = 0
    waited_for_kv_ns: int = 0
    first_started_ns: int | None = None
    last_finished_ns: int = 0
    select_ns: Counter[int] = field(default_factory=Counter)
    host_ns: Counter[int] = field(default_factory=Counter)

    def add_idle(self, free_ns: int, formed_ns: int, started_ns: int, busy_ns: int) -> None:
        """The device was idle from `free_ns` until a batch started that the host formed and was busy with."""
        launched_ns = min(started_ns, max(free_ns, formed_ns + busy_ns))
        self.idle_ns += started_ns - free_ns
        self.idle_host_ns += max(0, launched_ns - max(free_ns, formed_ns))
        self.idle_launch_ns += started_ns - launched_ns

    @property
    def num_batches(self) -> int:
        return sum(stage.num_batches for stage in self.by_stage.values())

    @property
    def device_ns(self) -> int:
        return sum(stage.device_ns for stage in self.by_stage.values())

    @property
    def limit_ns(self) -> int:
        return sum(stage.limit_ns for stage in self.by_stage.values())


class Lines(Protocol):
    """Where lines go: a text file, or anything that takes them."""

    def write(self, text: str, /) -> object: ...


class RunLog:
    """Writes `batches.csv` lines to `batches` as batches complete (None: keeps totals only) and keeps the
    records of requests. News of transfers, of an engine that has any, are lines of `handovers`.

    `records` are those of requests that have arrived and not ended. One that has ended goes to `on_ended`,
    once, and is forgotten.
    """

    def __init__(
        self,
        batches: Lines | None = None,
        on_ended: Callable[[RequestRecord], object] = lambda record: None,
        handovers: Lines | None = None,
    ) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.totals = BatchTotals()
        self._batches = batches
        self._on_ended = on_ended
        self._handovers = handovers
        if handovers is not None:
            handovers.write(",".join(HANDOVER_COLUMNS) + "\n")
        self._arrived: set[int] = set()
        self._lacks: str | None = None
        self._formed_ns = 0
        if batches is not None:
            batches.write(",".join(BATCH_COLUMNS) + "\n")

    def arrived(self, request: Request) -> RequestRecord:
        """The record of a request that arrives. Raises `InvariantError` when it has before."""
        if request.request_id in self._arrived:
            raise InvariantError(f"invariant 7: request {request.request_id} arrives twice")
        record = RequestRecord(request, len(self._arrived))
        self._arrived.add(request.request_id)
        self.records[request.request_id] = record
        return record

    def ended(self, request_id: int, status: Status, finished_ns: int) -> RequestRecord:
        """A request has come to its end; return its record. Raises `InvariantError` when it had, or never
        arrived, and what `on_ended` raises."""
        record = self.records.pop(request_id, None)
        if record is None:
            raise InvariantError(
                f"invariant 7: request {request_id} ends as {status} and is not among those that wait or run"
            )
        record.status = status
        record.finished_ns = finished_ns
        self._on_ended(record)
        return record

    def handed(self, mail: Sent | Received | Lost) -> None:
        """News of a transfer that the engine acts on."""
        if self._handovers is not None:
            end = mail.end if isinstance(mail, Received) else ""
            self._handovers.write(f"{mail.at_ns},{type(mail).__name__.lower()},{mail.request_id},{end}\n")

    def formed(self, now_ns: int, lacks: str | None) -> None:
        """A batch is formed, and whoever still waits `lacks` a place or room in the KV pool (None: nobody
        waits). The time until the next one is formed counts for that."""
        if self._lacks == "places":
            self.totals.waited_for_places_ns += now_ns - self._formed_ns
        elif self._lacks == "kv":
            self.totals.waited_for_kv_ns += now_ns - self._formed_ns
        self._lacks, self._formed_ns = lacks, now_ns

    def completed(self, batch: ExecutionBatch, completion: Completion) -> None:
        totals, work = self.totals, batch.work
        loops = work.loop_count
        started_ns, finished_ns = completion.started_ns, completion.finished_ns
        totals.recurrent_invocations += loops
        totals.recurrent_rows += loops * work.rows
        stage = totals.by_stage.get(work.stage)
        if stage is None:
            stage = totals.by_stage[work.stage] = StageTotals()
        stage.num_batches += 1
        stage.device_ns += finished_ns - started_ns
        stage.limit_ns += completion.limit_ns
        stage.host_ns += completion.host_ns
        if completion.components_ns:
            stage.components_ns = list(map(add, stage.components_ns, completion.components_ns))
        select_ns, host_ns = _rounded(completion.select_ns), _rounded(completion.host_ns)
        totals.select_ns[select_ns] = totals.select_ns.get(select_ns, 0) + 1
        totals.host_ns[host_ns] = totals.host_ns.get(host_ns, 0) + 1
        if totals.first_started_ns is None:
            totals.first_started_ns = started_ns
        elif started_ns > totals.last_finished_ns:
            busy_ns = completion.select_ns + completion.host_ns
            totals.add_idle(totals.last_finished_ns, batch.formed_ns, started_ns, busy_ns)
        totals.last_finished_ns = finished_ns
        if self._batches is not None:
            self._batches.write(batch_line(batch, completion))

    def repeated(
        self, works: Sequence[Work], first_seq: int, after_seq: int, formed_ns: Sequence[int], times: Times
    ) -> int:
        """The same as `completed` for each batch of `times`, which come again and again as `works`, the rows
        a token further each time; nothing is transferred with them and nobody leaves early. Return when the
        device is through.

        Raises `InvariantError` where times go back.
        """
        totals, size = self.totals, len(works)
        now_ns, started_ns, finished_ns, select_ns, host_ns, limit_ns, parts_ns = times
        free_ns = [totals.last_finished_ns, *finished_ns[:-1]]
        for earlier, later in (
            (formed_ns, started_ns), (free_ns, started_ns), (started_ns, finished_ns), (finished_ns, now_ns),
        ):  # fmt: skip
            if any(map(gt, earlier, later)):
                raise InvariantError(
                    f"invariant 6: of batches from {first_seq} on each is formed, started, finished and "
                    f"collected in this order, after the one before it, found {formed_ns[:8]}, "
                    f"{started_ns[:8]}, {finished_ns[:8]} and {now_ns[:8]} ns"
                )
        device_ns = list(map(sub, finished_ns, started_ns))
        for at, work in enumerate(works[: len(now_ns)]):
            count = len(now_ns[at::size])
            totals.recurrent_invocations += work.loop_count * count
            totals.recurrent_rows += work.loop_count * work.rows * count
            stage = totals.by_stage.setdefault(work.stage, StageTotals())
            stage.num_batches += count
            stage.device_ns += sum(device_ns[at::size])
            stage.limit_ns += sum(limit_ns[at::size])
            stage.host_ns += sum(host_ns[at::size])
            for components_ns, times_ns in Counter(parts_ns[at::size]).items():
                if components_ns:
                    split_ns = [times_ns * item for item in components_ns]
                    stage.components_ns = list(map(add, stage.components_ns, split_ns))
        totals.select_ns.update([(item + 5) // 10 * 10 for item in select_ns])
        totals.host_ns.update([(item + 5) // 10 * 10 for item in host_ns])
        busy_ns = list(map(add, select_ns, host_ns))
        if any(map(gt, map(add, formed_ns, busy_ns), free_ns)):
            for free, formed, started, busy in zip(free_ns, formed_ns, started_ns, busy_ns, strict=False):
                if started > free:
                    totals.add_idle(free, formed, started, busy)
        else:  # all were launched while the device was busy
            idle_ns = sum(started_ns) - sum(free_ns)
            totals.idle_ns += idle_ns
            totals.idle_launch_ns += idle_ns
        totals.last_finished_ns = finished_ns[-1]
        if self._batches is not None:
            self._batches.write("".join(repeated_lines(works, first_seq, after_seq, formed_ns, times)))
        return finished_ns[-1]


def _rounded(host_ns: int) -> int:
    return (host_ns + 5) // 10 * 10
