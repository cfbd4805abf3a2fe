"""The engine loop, written once: arrivals, batch formation, submission, completion. A generator that any
world can drive.

It yields `Submit` or `Wait` and is sent what happened. It reads no clock, no device and no random source:
time is a value it is sent, in integer nanoseconds. At equal times arrivals come before completions'
consequences, because every request with `arrival_ns <= now_ns` is let in before a batch is formed.
"""

import heapq
from collections.abc import Generator, Mapping

from policies.core.engine.arrivals import Arrivals
from policies.core.engine.runlog import RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import InvariantError, StuckError
from policies.core.seam.events import Command, Completion, Event, Submit, Wait
from policies.core.seam.request import Request, Status


class Engine:
    """One run: `scheduler` and `log` are its state, `run()` its loop. Use an engine once.

    `patience_ns` says of some requests how long after their arrival the client hangs up; nothing else here
    knows it beforehand.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        arrivals: Arrivals,
        log: RunLog,
        patience_ns: Mapping[int, int] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.arrivals = arrivals
        self.log = log
        self.now_ns = 0
        self._patience_ns = patience_ns or {}
        self._hang_ups: list[tuple[int, int]] = []
        self._device_free_ns = 0

    def run(self) -> Generator[Command, Event, None]:
        """Drive the run to its end. Raises when an invariant breaks, a policy errs, or requests are stuck.

        With `inflight` n the loop submits up to n batches before it waits for the first: selection reads
        scheduled progress.
        """
        scheduler = self.scheduler
        in_flight, inflight = scheduler.in_flight, scheduler.settings.inflight
        while True:
            self._catch_up()
            if len(in_flight) < inflight:
                batch = scheduler.form_batch(self.now_ns)
                if batch is not None:
                    for item in batch.transfers.preemptions:
                        self.log.records[item.request_id].preemptions += 1
                    self._hear((yield Submit(batch)))
                    continue
                until_ns = self._next_ns()
                if until_ns is None and not in_flight:
                    self._check_end()
                    return
                self._hear((yield Wait(until_ns)))
            else:
                self._hear((yield Wait(None)))

    def _catch_up(self) -> None:
        """Let in whoever has arrived and cancel for whoever has hung up by now, in the order of their times,
        arrivals first."""
        if not self._patience_ns:
            while (request := self.arrivals.pop(self.now_ns)) is not None:
                self._let_in(request)
            return
        while True:
            hang_up_ns = self._next_hang_up_ns()
            until_ns = self.now_ns if hang_up_ns is None else min(hang_up_ns, self.now_ns)
            arrived = self.arrivals.pop(until_ns)
            if arrived is not None:
                self._let_in(arrived)
            elif hang_up_ns == until_ns:
                self._cancel(*heapq.heappop(self._hang_ups))
            else:
                return

    def _let_in(self, request: Request) -> None:
        record = self.log.arrived(request)
        reason = self.scheduler.refusal(request)
        if reason is None:
            self.scheduler.enqueue(request)
            patience_ns = self._patience_ns.get(request.request_id)
            if patience_ns is not None:
                heapq.heappush(self._hang_ups, (request.arrival_ns + patience_ns, request.request_id))
        else:
            record.reason = reason
            self._end(request.request_id, Status.REFUSED, self.now_ns, self.now_ns)

    def _cancel(self, at_ns: int, request_id: int) -> None:
        state = self.scheduler.cancel(request_id)
        if state is not None and state.first_scheduled_ns >= 0:
            self.log.records[request_id].first_scheduled_ns = state.first_scheduled_ns
        self._end(request_id, Status.CANCELLED, at_ns, at_ns)

    def _end(self, request_id: int, status: Status, finished_ns: int, known_ns: int) -> None:
        """The one place where a request ends; a closed loop's next client may come when the engine knows, at
        `known_ns`."""
        self.log.ended(request_id, status, finished_ns)
        self.arrivals.ended(known_ns)

    def _next_ns(self) -> int | None:
        """When the next request arrives or the next client hangs up; None when neither comes by itself."""
        arrival_ns, hang_up_ns = self.arrivals.next_ns(), self._next_hang_up_ns()
        if arrival_ns is None or hang_up_ns is None:
            return hang_up_ns if arrival_ns is None else arrival_ns
        return min(arrival_ns, hang_up_ns)

    def _next_hang_up_ns(self) -> int | None:
        """When the next client hangs up on a request that has not ended; None when none will."""
        while self._hang_ups and self._hang_ups[0][1] not in self.log.records:
            heapq.heappop(self._hang_ups)
        return self._hang_ups[0][0] if self._hang_ups else None

    def _hear(self, event: Event) -> None:
        """Take in an event. A client that hung up before the engine learnt of a completion does not get its
        token."""
        if event.now_ns < self.now_ns:
            raise InvariantError(f"invariant 6: time went back from {self.now_ns} to {event.now_ns} ns")
        self.now_ns = event.now_ns
        if isinstance(event, Completion):
            if self._patience_ns:
                self._catch_up()
            self._apply(event)

    def _apply(self, completion: Completion) -> None:
        batch, delivered = self.scheduler.collect(completion)
        if not batch.formed_ns <= completion.started_ns <= completion.finished_ns <= completion.now_ns:
            raise InvariantError(
                f"invariant 6: batch {batch.seq} formed at {batch.formed_ns}, started at "
                f"{completion.started_ns}, finished at {completion.finished_ns}, collected at "
                f"{completion.now_ns} ns"
            )
        if completion.started_ns < self._device_free_ns:
            raise InvariantError(
                f"invariant 6: batch {batch.seq} started at {completion.started_ns} ns, the one before it "
                f"finished at {self._device_free_ns}"
            )
        self._device_free_ns = completion.finished_ns
        for state, has_ended in delivered:
            record = self.log.records[state.request_id]
            if record.first_scheduled_ns is None:
                record.status = Status.RUNNING
                record.first_scheduled_ns = state.first_scheduled_ns
            record.token_ns.append(completion.finished_ns)
            if has_ended:
                self._end(state.request_id, Status.FINISHED, completion.finished_ns, completion.now_ns)
        self.log.completed(batch, completion)

    def _check_end(self) -> None:
        if not self.arrivals.is_exhausted or self.scheduler.has_requests:
            unfinished = "; ".join(str(item) for item in list(self.scheduler.running.values())[:8])
            raise StuckError(
                f"invariant 9: nothing runs and nothing arrives at {self.now_ns} ns, but "
                f"{len(self.scheduler.waiting)} requests wait and {len(self.scheduler.running)} are "
                f"unfinished: {unfinished}"
            )
        self.scheduler.check_drained()
        if self.log.records:
            left = ", ".join(map(str, list(self.log.records)[:8]))
            raise InvariantError(
                f"invariant 7: the run ended and {len(self.log.records)} of its requests did not: {left}"
            )


def advance(loop: Generator[Command, Event, None], event: Event) -> Command | None:
    """The engine's next command, or None when the run has ended."""
    try:
        return loop.send(event)
    except StopIteration:
        return None
