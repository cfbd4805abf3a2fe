"""The engine loop, written once: mail, batch formation, submission, completion. An actor that any world can
drive.

Mail comes from its inbox; its generator yields `Submit` or `Wait` and is sent what happened. It reads no
clock, no device and no random source, and owns no list of the future: time is a value it is sent, in integer
nanoseconds. Whatever mail is due by then is taken before a completion is applied and before a batch is
formed.
"""

from collections.abc import Generator, Sequence

from policies.core.engine.rhythm import Plan
from policies.core.engine.runlog import RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.engine.stretch import Stretches
from policies.core.errors import InvariantError, StuckError
from policies.core.progress.state import RequestState
from policies.core.seam.events import (
    Arrival,
    Command,
    Completion,
    Event,
    Foresee,
    Foreseen,
    HangUp,
    Lost,
    Received,
    Repeat,
    Sent,
    Stretch,
    Submit,
    Tick,
    Wait,
)
from policies.core.seam.inbox import Inbox
from policies.core.seam.request import Request, Status


class Engine:
    """One run: `scheduler` and `log` are its state, `inbox` where its mail lies, `run()` its loop. Use an
    engine once.

    A backend drives `run()`, and may look into `inbox` to know when to wake; the rest is not its business.
    """

    def __init__(self, scheduler: Scheduler, inbox: Inbox, log: RunLog) -> None:
        self.scheduler = scheduler
        self.inbox = inbox
        self.log = log
        self.now_ns = 0
        self.num_stretches = self.num_repeated = 0
        """Stretches that were taken in one step, and the batches in them."""
        self._device_free_ns = 0

    def run(self, repeats: bool = False) -> Generator[Command, Event, None]:
        """Drive the run to its end: no more mail will come, and nothing is left to do. Raises when an
        invariant breaks, a policy errs, or requests are stuck.

        Where `repeats`, it asks for stretches of batches that it need not decide one by one (`Repeat`); what
        comes of them is the same. With `inflight` n the loop submits up to n batches before it waits for the
        first: selection reads scheduled progress.
        """
        scheduler, inbox = self.scheduler, self.inbox
        stretches = Stretches(scheduler, scheduler.rhythm) if repeats and scheduler.rhythm else None
        in_flight, inflight = scheduler.in_flight, scheduler.settings.inflight
        while True:
            self._take_mail()
            while scheduler.handover.commands:
                self._hear(_plain((yield scheduler.handover.commands.popleft())))
            if len(in_flight) < inflight:
                if stretches is not None:
                    until_ns = inbox.quiet_until_ns()
                    if stretches.may_begin(until_ns):
                        foreseen = yield Foresee(until_ns)
                        assert isinstance(foreseen, Foreseen), "Foresee is answered with Foreseen"
                        plan = stretches.plan() if foreseen.is_free else None
                        if plan is not None:
                            stretch = yield Repeat(plan.first_seq, plan.works, plan.most, until_ns)
                            assert isinstance(stretch, Stretch), "Repeat is answered with a Stretch"
                            if stretch.num_batches:
                                self._repeat(stretches, plan, stretch)
                                continue
                        elif not foreseen.is_free:
                            stretches.declined(until_ns)
                batch = scheduler.form_batch(self.now_ns)
                if batch is not None:
                    self.log.formed(self.now_ns, scheduler.lacks)
                    for item in batch.transfers.preemptions:
                        self.log.records[item.request_id].preemptions += 1
                    self._hear(_plain((yield Submit(batch))))
                    continue
                if scheduler.handover.commands:
                    continue
                until_ns = inbox.next_ns()
                if until_ns is None and not in_flight and (inbox.is_exhausted or not inbox.is_open):
                    self._check_end()
                    return
                self._hear(_plain((yield Wait(until_ns))))
            else:
                self._hear(_plain((yield Wait(None))))

    def _repeat(self, stretches: Stretches, plan: Plan, stretch: Stretch) -> None:
        """Take in a stretch: batches of `plan` were formed, as many as were collected."""
        scheduler, log = self.scheduler, self.log
        (earlier, times), count = stretch, stretch.num_batches
        self.num_stretches += 1
        self.num_repeated += count
        formed_ns = [self.now_ns, *[item.now_ns for item in earlier], *times.now_ns][:count]
        log.formed(formed_ns[0], scheduler.lacks)
        log.formed(formed_ns[-1], scheduler.lacks)
        stretches.form(plan, formed_ns)
        for completion in earlier:
            self._hear(completion)
        if not times.now_ns:
            return
        after_seq = plan.first_seq - len(earlier) - 1
        self._device_free_ns = log.repeated(plan.works, plan.first_seq, after_seq, formed_ns, times)
        self.now_ns = times.now_ns[-1]
        size, tokens_ns = len(plan.works), dict[int, list[int]]()
        for state, at in stretches.collect(plan, len(times.now_ns)):
            if at not in tokens_ns:
                tokens_ns[at] = times.finished_ns[at::size]
            self._deliver(state, tokens_ns[at])

    def _deliver(self, state: RequestState, finished_ns: Sequence[int]) -> None:
        record = self.log.records[state.request_id]
        if record.first_scheduled_ns is None:
            record.status = Status.RUNNING
            record.first_scheduled_ns = state.first_scheduled_ns
        record.token_ns.extend(finished_ns)

    def _take_mail(self) -> None:
        """Let in whoever has arrived, cancel for whoever has hung up, and hear of transfers by now. Room is
        given out after each, so that it does not matter when the engine looks."""
        scheduler, role = self.scheduler, self.scheduler.handover.role
        while (mail := self.inbox.pop(self.now_ns)) is not None:
            if isinstance(mail, Arrival):
                self._let_in(mail.request)
            elif mail.request_id not in self.log.records:
                continue
            elif isinstance(mail, HangUp):
                self._leave(mail.at_ns, mail.request_id, Status.CANCELLED)
            elif isinstance(mail, Sent) and role == "prefill":
                self.log.handed(mail)
                self._leave(mail.at_ns, mail.request_id, Status.SENT)
            elif isinstance(mail, Received) and role == "decode":
                self.log.handed(mail)
                scheduler.handover.received(mail)
            elif isinstance(mail, Lost) and role == "decode":
                self.log.handed(mail)
                scheduler.handover.lost(mail)
            else:
                raise TypeError(f"an engine that does {role} of its requests has no use for {mail!r}")
            if role == "decode":
                scheduler.reserve()

    def _let_in(self, request: Request) -> None:
        record = self.log.arrived(request)
        reason = self.scheduler.refusal(request)
        if reason is None:
            self.scheduler.enqueue(request)
        else:
            record.reason = reason
            self._end(request.request_id, Status.REFUSED, self.now_ns, self.now_ns)

    def _leave(self, at_ns: int, request_id: int, status: Status) -> None:
        state = self.scheduler.cancel(request_id)
        if state is not None and state.first_scheduled_ns >= 0:
            self.log.records[request_id].first_scheduled_ns = state.first_scheduled_ns
        self._end(request_id, status, at_ns, at_ns)

    def _end(self, request_id: int, status: Status, finished_ns: int, known_ns: int) -> None:
        """The one place where a request ends; the world is told when the engine knows, at `known_ns`."""
        request = self.log.ended(request_id, status, finished_ns).request
        self.inbox.ended(request, status, known_ns)

    def _hear(self, event: Tick | Completion) -> None:
        """Take in an event. A client that hung up before the engine learnt of a completion does not get its
        token."""
        if event.now_ns < self.now_ns:
            raise InvariantError(f"invariant 6: time went back from {self.now_ns} to {event.now_ns} ns")
        self.now_ns = event.now_ns
        if isinstance(event, Completion):
            self._take_mail()
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
            self._deliver(state, (completion.finished_ns,))
            if has_ended:
                self.scheduler.handover.forget(state.request_id)
                self._end(state.request_id, Status.FINISHED, completion.finished_ns, completion.now_ns)
        self.log.completed(batch, completion)

    def _check_end(self) -> None:
        if not self.inbox.is_exhausted or self.scheduler.has_requests:
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


def _plain(event: Event) -> Tick | Completion:
    assert not isinstance(event, Foreseen | Stretch), "only what was foreseen is answered so"
    return event


def advance(loop: Generator[Command, Event, None], event: Event) -> Command | None:
    """The engine's next command, or None when the run has ended."""
    try:
        return loop.send(event)
    except StopIteration:
        return None
