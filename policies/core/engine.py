"""The engine loop, written once: arrivals, batch formation, submission, completion. A generator that any world can drive.

It yields `Submit` or `Wait` and is sent what happened. It reads no clock, no device and no random source: time is a value it is
sent, in integer nanoseconds. At equal times arrivals come before completions' consequences, because every request with
`arrival_ns <= now_ns` is let in before a batch is formed.
"""

from collections import deque
from collections.abc import Generator

from policies.core.arrivals import Arrivals
from policies.core.batch import ExecutionBatch
from policies.core.errors import InvariantError, StuckError
from policies.core.events import Command, Completion, Event, Submit, Wait
from policies.core.request import Status
from policies.core.runlog import RunLog
from policies.core.scheduler import Scheduler


class Engine:
    """One run: `scheduler` and `log` are its state, `run()` its loop. Use an engine once."""

    def __init__(self, scheduler: Scheduler, arrivals: Arrivals, log: RunLog) -> None:
        self.scheduler = scheduler
        self.arrivals = arrivals
        self.log = log
        self.now_ns = 0
        self._device_free_ns = 0
        self._submitted: deque[ExecutionBatch] = deque()

    def run(self) -> Generator[Command, Event, None]:
        """Drive the run to its end. Raises when an invariant breaks, a policy errs, or requests are stuck.

        With `inflight` 2 the loop submits batch n+1 before it waits for batch n: selection reads scheduled progress.
        """
        scheduler, arrivals = self.scheduler, self.arrivals
        inflight = scheduler.settings.inflight
        while True:
            self._let_in()
            if scheduler.num_in_flight < inflight:
                batch = scheduler.form_batch(self.now_ns)
                if batch is not None:
                    self._submitted.append(batch)
                    self._hear((yield Submit(batch)))
                    continue
                until_ns = arrivals.next_ns()
                if until_ns is None and not scheduler.num_in_flight:
                    self._check_end()
                    return
                self._hear((yield Wait(until_ns)))
            else:
                self._hear((yield Wait(None)))

    def _let_in(self) -> None:
        for request in self.arrivals.pop_until(self.now_ns):
            record = self.log.arrived(request)
            reason = self.scheduler.refusal(request)
            if reason is None:
                self.scheduler.enqueue(request)
            else:
                record.status = Status.REFUSED
                record.reason = reason
                record.finished_ns = self.now_ns
                self.arrivals.ended(self.now_ns)

    def _hear(self, event: Event) -> None:
        if event.now_ns < self.now_ns:
            raise InvariantError(f"invariant 6: time went back from {self.now_ns} to {event.now_ns} ns")
        self.now_ns = event.now_ns
        if isinstance(event, Completion):
            self._apply(event)

    def _apply(self, completion: Completion) -> None:
        delivered = self.scheduler.collect(completion)
        batch = self._submitted.popleft()
        if not batch.formed_ns <= completion.started_ns <= completion.finished_ns <= completion.now_ns:
            raise InvariantError(
                f"invariant 6: batch {batch.seq} formed at {batch.formed_ns}, started at {completion.started_ns}, finished at "
                f"{completion.finished_ns}, collected at {completion.now_ns} ns"
            )
        if completion.started_ns < self._device_free_ns:
            raise InvariantError(
                f"invariant 6: batch {batch.seq} started at {completion.started_ns} ns, the one before it finished at "
                f"{self._device_free_ns}"
            )
        self._device_free_ns = completion.finished_ns
        for state, has_ended in delivered:
            record = self.log.records[state.request_id]
            record.status = Status.RUNNING
            record.first_scheduled_ns = state.first_scheduled_ns
            record.token_ns.append(completion.finished_ns)
            if has_ended:
                record.status = Status.FINISHED
                record.finished_ns = completion.finished_ns
                self.arrivals.ended(completion.now_ns)
        self.log.completed(batch, completion)

    def _check_end(self) -> None:
        if not self.arrivals.is_exhausted or self.scheduler.has_requests:
            unfinished = "; ".join(str(item) for item in list(self.scheduler.running.values())[:8])
            raise StuckError(
                f"invariant 9: nothing runs and nothing arrives at {self.now_ns} ns, but {len(self.scheduler.waiting)} requests "
                f"wait and {len(self.scheduler.running)} are unfinished: {unfinished}"
            )
        self.scheduler.check_drained()
        for record in self.log.records.values():
            if record.status not in (Status.FINISHED, Status.CANCELLED, Status.REFUSED):
                raise InvariantError(f"invariant 7: request {record.request.request_id} ended the run as {record.status}")


def advance(loop: Generator[Command, Event, None], event: Event) -> Command | None:
    """The engine's next command, or None when the run has ended."""
    try:
        return loop.send(event)
    except StopIteration:
        return None
