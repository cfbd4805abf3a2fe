"""A recorded run decided again: the same policies and engine, fed the times that the log holds, must form the
same batches.

This is the exact half of comparing two worlds. A SimPy process drives the engine as `sim.backend` does, but
its clock goes from one recorded instant to the next, and the order of events is the log's and not the
clock's: `after_seq` says how many batches had been collected when a batch was formed, so the events are

    collect .. after_seq of batch 0, form batch 0, collect .. after_seq of batch 1, form batch 1, ...

also where several share one instant. A device process with recorded *durations* would have to guess that
order again. Events that decided nothing are not in the log and need not be: an attempt to form a batch that
forms none moves nothing, so leaving one out changes nothing. Where the log collects next, handing the last
batch over takes the logged time of choosing and launching it, and no more: who hung up by then is gone, and
who arrived by then was not scheduled before that completion, or the log would hold the batch. Measured times
pass through; decisions are what is compared.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simpy

from policies.assembly import assemble
from policies.core.engine.batchlines import BATCH_COLUMNS, batch_line
from policies.core.engine.engine import Engine, advance
from policies.core.engine.runlog import REQUEST_COLUMNS, RequestRecord
from policies.core.errors import InputError, InvariantError, SelectionError
from policies.core.seam.batch import ExecutionBatch
from policies.core.seam.events import Command, Completion, Handed, Submit, Tick, Wait
from policies.core.seam.oracle import Foresight
from policies.core.seam.request import Status
from results.batchlog import LoggedBatch
from results.csvlog import Fields
from results.requestlog import request_row
from results.rundir import BATCHES
from sim.recorded import RecordedRun

DECISIONS = (
    "seq",
    "stage",
    "loop_count",
    "num_requests",
    "rows",
    "submitted_ns",
    "ranges",
    "after_seq",
    "allocated",
    "grown",
    "preempted",
    "resumed",
    "reused",
)
"""Columns of `batches.csv` that the scheduler decides; the others are measured or predicted by a backend."""
SimProcess = Generator[simpy.Event, Any, None]
Observer = Callable[[LoggedBatch, ExecutionBatch], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the replay is not the log: a sentence, and the line of either side (None: it has
    none there)."""

    sentence: str
    logged: str | None
    replayed: str | None

    def __str__(self) -> str:
        nothing = "(nothing)"
        return f"{self.sentence}\n  log:    {self.logged or nothing}\n  replay: {self.replayed or nothing}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay found: `num_batches` equal ones, and then perhaps a difference."""

    run: RecordedRun
    num_batches: int
    difference: Difference | None

    def __str__(self) -> str:
        if self.difference is not None:
            return f"{self.run.path}: {self.num_batches} batches are equal; {self.difference}"
        end = (
            "; the run was interrupted or broke off, and this is what it had logged"
            if self.run.is_cut
            else ""
        )
        return (
            f"{self.run.path}: {self.num_batches} batches of {len(self.run.requests)} requests, all "
            f"equal{end}"
        )


def replay(path: Path, observe: Observer | None = None) -> Outcome:
    """Replay the run directory at `path`, of either world, and show `observe` every batch that was formed as
    logged.

    Raises `InputError` when the directory holds no run that can be replayed.
    """
    run = RecordedRun.read(path)
    ended: list[RequestRecord] = []
    engine = assemble(run.config, run.model, run.clients(), on_ended=ended.append)
    backend = ReplayBackend(engine, run, observe)
    difference = backend.run() or (None if run.is_cut else _request_difference(run, ended))
    return Outcome(run, backend.num_equal, difference)


class _Differs(Exception):
    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.sentence)
        self.difference = difference


class ReplayBackend:
    """Drives one `engine` through the events of `run`. `num_equal` counts the batches that were formed as
    logged."""

    def __init__(self, engine: Engine, run: RecordedRun, observe: Observer | None = None) -> None:
        self.num_equal = 0
        self._observe = observe
        self._run = run
        rule = run.config.rule(run.model)
        self._foresight = Foresight(run, None, rule)
        """Exits are the log's: the replay asks only whom a batch ends."""
        self._env = simpy.Environment()
        self._loop = engine.run()
        self._command: Command | None = None
        self._in_flight: deque[tuple[LoggedBatch, ExecutionBatch]] = deque()

    def run(self) -> Difference | None:
        """Go through the whole log; return the first difference. Raises `InputError` when the log's own times
        go back."""
        try:
            self._env.run(self._env.process(self._host()))
        except _Differs as found:
            return found.difference
        except (InvariantError, SelectionError) as error:
            return Difference(f"then the replay breaks a rule: {error}", None, None)
        return None

    def _host(self) -> SimProcess:
        self._command = next(self._loop, None)
        while isinstance(self._command, Handed):
            self._command = advance(self._loop, Tick(0))
        for row in self._run.batches():
            while self._in_flight and self._in_flight[0][0].seq <= row.after_seq:
                yield from self._collect(row)
            if self._new_batch is None:
                yield from self._until(row.submitted_ns, f"line {row.line}: submitted_ns")
                self._send(Tick(row.submitted_ns))
            self._match(row)
        if not self._run.is_cut:
            yield from self._finish()

    def _finish(self) -> SimProcess:
        """The log is at its end: what is in flight completes, requests that are refused still come, and no
        batch is formed."""
        while self._in_flight:
            yield from self._collect(None)
        while isinstance(self._command, Wait) and self._command.until_ns is not None:
            yield from self._until(self._command.until_ns, "the end")
            self._send(Tick(self._command.until_ns))
        self._match(None)

    @property
    def _new_batch(self) -> ExecutionBatch | None:
        """The batch that the engine has just formed, until it is matched with the log."""
        command = self._command
        return command.batch if isinstance(command, Submit) and command.batch.seq == self.num_equal else None

    def _match(self, row: LoggedBatch | None) -> None:
        """Compare what the engine has just decided with the log's next line (None: there is none)."""
        batch = self._new_batch
        replayed = None if batch is None else _decisions(batch)
        if row is None:
            if replayed is not None:
                raise _Differs(
                    Difference(
                        f"batch {self.num_equal} is not in the log, which has ended", None, _line(replayed)
                    )
                )
            return
        if batch is None or replayed is None:
            sentence = f"batch {row.seq} is in the log, the replay forms none at {row.submitted_ns} ns"
            raise _Differs(Difference(sentence, _line(row.fields), None))
        column = next((name for name in DECISIONS if replayed[name] != row.fields[name]), None)
        if column is not None:
            sentence = (
                f"batch {row.seq} differs in {column}: {row.fields[column]!r} in the log, "
                f"{replayed[column]!r} in the replay"
            )
            raise _Differs(Difference(sentence, _line(row.fields), _line({**row.fields, **replayed})))
        self.num_equal += 1
        self._in_flight.append((row, batch))
        self._foresight.see(batch.transfers)
        if self._observe is not None:
            self._observe(row, batch)

    def _collect(self, following: LoggedBatch | None) -> SimProcess:
        """Report the oldest completion; `following` is the batch that the log forms next, after this."""
        if isinstance(self._command, Submit) and self._new_batch is None:
            self._send(Tick(self._launched_ns()))
        if self._new_batch is not None:
            self._match(following)
        row, batch = self._in_flight.popleft()
        yield from self._until(row.collected_ns, f"line {row.line}: collected_ns")
        stops = self._foresight.stops(batch.work, row.refused)
        self._send(
            Completion(
                row.seq,
                row.collected_ns,
                row.started_ns,
                row.finished_ns,
                stops,
                exits=row.exits,
                refused=row.refused,
            )
        )

    def _launched_ns(self) -> int:
        """When the host had launched the last batch, or a little earlier, and before it collected the oldest:
        a client may have hung up meanwhile."""
        (oldest, _), (last, _) = self._in_flight[0], self._in_flight[-1]
        return min(last.submitted_ns + last.busy_ns, oldest.collected_ns)

    def _send(self, event: Tick | Completion) -> None:
        self._command = advance(self._loop, event)
        while isinstance(self._command, Handed):
            self._command = advance(self._loop, Tick(event.now_ns))

    def _until(self, at_ns: int, what: str) -> SimProcess:
        now_ns = int(self._env.now)
        if at_ns < now_ns:
            where = f"{self._run.path / BATCHES} {what}"
            raise InputError(f"{where}: {at_ns}, expected at least {now_ns}, the time of the event before")
        if at_ns > now_ns:
            yield self._env.timeout(at_ns - now_ns)


def _decisions(batch: ExecutionBatch) -> dict[str, str]:
    line = batch_line(batch, Completion(batch.seq, 0, 0, 0)).rstrip("\n")
    fields = dict(zip(BATCH_COLUMNS, line.split(","), strict=True))
    return {name: fields[name] for name in DECISIONS}


def _request_difference(run: RecordedRun, ended: Iterable[RequestRecord]) -> Difference | None:
    """The first request whose story is another one. When a refusal was noticed is no decision: the log's
    batches do not say it."""
    records = {record.request.request_id: record for record in ended}
    for request, logged in zip(run.requests, run.request_fields, strict=True):
        record = records.get(request.request_id)
        if record is None:
            return Difference(
                f"request {request.request_id} never arrives in the replay", _line(logged), None
            )
        values = ("" if value is None else str(value) for value in request_row(record))
        replayed = dict(zip(REQUEST_COLUMNS, values, strict=True))
        if record.status is Status.REFUSED:
            replayed["finished_ns"] = logged["finished_ns"]
        column = next((name for name in REQUEST_COLUMNS if replayed[name] != logged[name]), None)
        if column is not None:
            return Difference(
                f"request {request.request_id} differs in {column}", _line(logged), _line(replayed)
            )
    return None


def _line(fields: Fields) -> str:
    return ",".join(fields.values())
