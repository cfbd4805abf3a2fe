"""The real world's side of an engine: the wall clock, mail as it comes due, and a device that runs batches in
order.

Drives the same generator as the simulator. With several batches in flight the host plans the next ones while
the device runs the first; it waits for the device only when the engine waits. Of the engine it knows what it
is sent; requests come with their allocations.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from executor.apart.side import Side
from executor.asking import Asking
from executor.outputs import Outputs
from executor.runner import Launched, Runner
from executor.timeline import Timeline
from policies.core.engine.engine import Engine, advance
from policies.core.seam.batch import HEADS, Allocation, ExecutionBatch, Stage, Work
from policies.core.seam.events import Completion, Event, Repeat, Submit, Tick, Wait
from policies.core.seam.guesses import Refusals
from policies.core.seam.oracle import NONE_REFUSED, Foresight, Refused
from policies.costs.limit import Roofline

SPIN_NS = 200_000
"""Closer to an arrival than this the host spins; sleeping would overshoot."""
LONGEST_SLEEP_NS = 50_000_000
"""A waiting host looks up this often, so that Ctrl-C need not wait for the next arrival."""
OPEN_SLEEP_NS = 1_000_000
"""And this often where mail may come from others at any time."""


class Observer(Protocol):
    """Sees batches as they are launched, after what is transferred, and as they are collected; for
    diagnostics and displays."""

    def launching(self, batch: ExecutionBatch) -> None: ...

    def collected(self, batch: ExecutionBatch, launched: Launched, stops: frozenset[int]) -> None: ...


class DeviceBackend:
    """Runs `engine` on `runner`.

    Of the future it knows what `foresight` says: where a gate on the device decides who leaves early, it asks
    the gate. `asking` gives prompts and says which token ends an answer early; `roofline` the limit of every
    batch (None: not known, logged as 0); `is_stopped` whether the user wants the run to end; `outputs` takes
    the output token ids of every request as they are collected, and `tell` hears of them; `side` is what a
    run with several engines says and hears (None: it has one).
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        timeline: Timeline,
        foresight: Foresight,
        asking: Asking,
        roofline: Roofline | None,
        observers: tuple[Observer, ...] = (),
        is_stopped: Callable[[], bool] = lambda: False,
        outputs: Outputs | None = None,
        tell: Callable[[list[tuple[int, int]]], None] = lambda tokens: None,
        side: Side | None = None,
    ) -> None:
        self._engine = engine
        self._inbox = engine.inbox
        self._runner = runner
        self._timeline = timeline
        self._foresight = foresight
        self._asking = asking
        self._roofline = roofline
        self._observers = observers
        self._is_stopped = is_stopped
        self._side = side
        self._outputs = Outputs() if outputs is None else outputs
        self._tell = tell
        self._in_flight: deque[tuple[ExecutionBatch, int, int]] = deque()
        """Launched batches with the host's times for choosing and for launching each."""
        self._sent_ns = 0
        self._refusals = Refusals()
        self._prompt_tokens: dict[int, int] = {}

    def run(self) -> None:
        """Run to the end. Raises what engine and runner raise, and `KeyboardInterrupt` between two steps once
        the run is stopped.

        After any of them batches may still be on the device: synchronise before their memory is used for
        something else.
        """
        if self._side is not None:
            self._side.start(self._timeline, self._runner.pools)
        loop = self._engine.run()
        asked_ns = self._timeline.now_ns()
        command = next(loop, None)
        while command is not None:
            answered_ns = self._timeline.now_ns()
            if self._is_stopped():
                raise KeyboardInterrupt
            if self._side is not None:
                self._side.look()
            event: Event
            if isinstance(command, Submit):
                event = self._submit(command.batch, answered_ns - asked_ns, answered_ns)
            elif isinstance(command, Wait):
                event = self._wait(command.until_ns)
            else:
                assert self._side is not None and not isinstance(command, Repeat)
                self._side.heard(command)
                event = Tick(self._sent_ns)  # its time goes on with what the engine does next
            self._sent_ns = event.now_ns
            asked_ns = self._timeline.now_ns()
            command = advance(loop, event)

    def _submit(self, batch: ExecutionBatch, select_ns: int, answered_ns: int) -> Tick:
        self._foresight.see(batch.transfers)
        for request_id in batch.transfers.released:
            self._prompt_tokens.pop(request_id, None)
        prompts = {item.request_id: self._prompt(item) for item in batch.transfers.allocations}
        self._runner.transfer(batch.transfers, prompts)
        for observer in self._observers:
            observer.launching(batch)
        known = self._known_tokens(batch.work)
        self._runner.launch(batch.work, self._foresight.surplus_rows(batch.work), known)
        now_ns = self._timeline.now_ns()
        self._in_flight.append((batch, select_ns, now_ns - answered_ns))
        return Tick(max(now_ns, self._sent_ns))

    def _known_tokens(self, work: Work) -> dict[tuple[int, int], int]:
        """Tokens that decode rows of `work` embed and that have been collected: what is in flight behind a
        guess that was wrong may have left others in their places on the device."""
        known = {}
        for item in work.ranges if work.loop_count else ():
            if item.embeds and item.stage is Stage.RECURRENT:
                tokens = self._outputs.by_request.get(item.request_id, ())
                at = item.token_start - self._prompt_tokens[item.request_id]
                if at < len(tokens):
                    known[item.request_id, item.token_start] = tokens[at]
        return known

    def _prompt(self, allocation: Allocation) -> np.ndarray:
        """What a request that is let in runs as its prompt. Kept output tokens are on the host: nothing of it
        was in flight."""
        prompt = self._asking.prompt(allocation.request)
        self._prompt_tokens[allocation.request_id] = allocation.request.prompt_tokens
        if not allocation.num_kept_tokens:
            return prompt
        kept = self._outputs.of(allocation.request_id)[: allocation.num_kept_tokens]
        return np.concatenate((prompt, np.array(kept, dtype=prompt.dtype)))

    def _wait(self, until_ns: int | None) -> Event:
        runner, timeline, inbox = self._runner, self._timeline, self._inbox
        while not self._is_stopped():
            if runner.oldest_is_done():
                return self._collect()
            if self._side is not None:
                self._side.look()
            now_ns = timeline.now_ns()
            if inbox.is_open:
                until_ns = inbox.next_ns()
                if inbox.is_exhausted and not runner.launched:
                    return Tick(now_ns)
            if until_ns is not None and now_ns >= until_ns:
                return Tick(now_ns)
            if not runner.launched:
                longest_ns = OPEN_SLEEP_NS if inbox.is_open else LONGEST_SLEEP_NS
                left_ns = longest_ns if until_ns is None else until_ns - now_ns - SPIN_NS
                if left_ns > 0:
                    time.sleep(min(left_ns, longest_ns) / 1e9)
        raise KeyboardInterrupt

    def _collect(self) -> Completion:
        """The completion of the oldest batch.

        Device times are mapped to the host's clock once, so they may be some microseconds off; they are held
        between the time the batch was formed and the time it was seen to be done.
        """
        launched, started_ns, finished_ns = self._runner.collect()
        batch, select_ns, host_ns = self._in_flight.popleft()
        work = batch.work
        now_ns = max(self._timeline.now_ns(), self._sent_ns)
        finished_ns = min(max(finished_ns, batch.formed_ns), now_ns)
        started_ns = min(max(started_ns, batch.formed_ns), finished_ns)
        tokens: list[tuple[int, int]] = []
        last: frozenset[int] = frozenset()
        if work.stage is Stage.CODA:
            tokens, last = self._sampled(batch, launched)
        refused = launched.refused
        stops = self._outputs.unended(self._foresight.stops(work, refused)) | last
        for observer in self._observers:
            observer.collected(batch, launched, stops)
        for request_id, token in tokens:
            self._outputs.sampled(request_id, token)
        if tokens:
            self._tell(tokens)
        exits = self._foresight.early_exits(work) | frozenset(left_by_gate(launched))
        limit_ns = 0
        if self._roofline is not None:
            transfer_ns = self._roofline.device.transfer_ns(batch.transfers.swapped_bytes)
            limit_ns = self._roofline.limit_ns(work) + transfer_ns
        return Completion(
            batch.seq, now_ns, started_ns, finished_ns, stops, select_ns, host_ns, limit_ns, exits=exits,
            refused=refused
        )  # fmt: skip

    def _refused(self, launched: Launched) -> Refused:
        """Guesses that a collected batch shows to be wrong: by the device's word, or, where it is forced, by
        a draw."""
        wrong = NONE_REFUSED
        if launched.work.stage is Stage.CODA and launched.decisions is not None:
            rows = zip(launched.work.ranges, launched.decisions.tolist(), strict=True)
            if not self._foresight.is_asked_of_guesses:
                wrong = frozenset(
                    [(item.request_id, item.token_start) for item, is_right in rows if not is_right]
                )
        return self._foresight.refused(launched.work, wrong)

    def _sampled(
        self, batch: ExecutionBatch, launched: Launched
    ) -> tuple[list[tuple[int, int]], frozenset[int]]:
        """(request, token) of every CODA row whose client still waits for tokens, and whose answer one of
        them ends. Leaves in `launched` which guesses are wrong: those behind an end are, too."""
        assert launched.tokens is not None
        ranges, refused = launched.work.ranges, self._refused(launched)
        counts = self._refusals.counting(batch.seq, batch.after_seq, ranges, refused)
        waiting = self._outputs.unended([item.request_id for item in ranges])
        tokens: list[tuple[int, int]] = []
        last: set[int] = set()
        for item, token, is_true in zip(ranges, launched.tokens.tolist(), counts, strict=True):
            request_id = item.request_id
            if not is_true or item.stage not in HEADS or request_id not in waiting or request_id in last:
                continue
            tokens.append((request_id, token))
            if self._asking.is_last(request_id, token):
                last.add(request_id)
                if item.stage is Stage.VERIFY:
                    refused |= {(request_id, item.token_start)}
        launched.refused = refused
        return tokens, frozenset(last)


def left_by_gate(launched: Launched) -> Iterator[int]:
    """Requests whose decode row in a collected batch the gate has let go."""
    if launched.decisions is None or launched.work.stage is Stage.CODA:
        return
    decisions, row = launched.decisions.tolist(), 0
    for item in launched.work.ranges:
        if decisions[row]:
            yield item.request_id
        row += item.token_count
