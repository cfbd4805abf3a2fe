"""The real world's side of the engine: the wall clock, arrivals as they come due, and a device that runs
batches in order.

Drives the same generator as the simulator. With several batches in flight the host plans the next ones while
the device runs the first; it waits for the device only when the engine waits.
"""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from executor.runner import Launched, Runner
from executor.timeline import Timeline
from policies.core.engine.engine import Engine, advance
from policies.core.seam.batch import Allocation, ExecutionBatch, Stage
from policies.core.seam.events import Completion, Event, Submit, Tick
from policies.core.seam.oracle import early_exits, last_tokens, surplus_rows
from policies.core.seam.request import ExitOracle, Oracle, Request
from policies.costs.limit import Roofline

SPIN_NS = 200_000
"""Closer to an arrival than this the host spins; sleeping would overshoot."""
LONGEST_SLEEP_NS = 50_000_000
"""A waiting host looks up this often, so that Ctrl-C need not wait for the next arrival."""


class Observer(Protocol):
    """Sees batches as they are launched, after what is transferred, and as they are collected; for
    diagnostics and displays."""

    def launching(self, batch: ExecutionBatch) -> None: ...

    def collected(self, launched: Launched, stops: frozenset[int]) -> None: ...


class DeviceBackend:
    """Runs `engine` on `runner`.

    `make_prompt(request)` gives prompt ids; `roofline` the limit of every batch (None: not known, logged as
    0); `is_stopped` whether the user wants the run to end; `exits` where tokens leave (None: nowhere, or
    where a gate on the device says); `tokens` takes the output token ids of every request as they are
    collected.
    """

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        timeline: Timeline,
        oracle: Oracle,
        make_prompt: Callable[[Request], np.ndarray],
        roofline: Roofline | None,
        observers: tuple[Observer, ...] = (),
        is_stopped: Callable[[], bool] = lambda: False,
        exits: ExitOracle | None = None,
        tokens: dict[int, list[int]] | None = None,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._timeline = timeline
        self._oracle = oracle
        self._make_prompt = make_prompt
        self._roofline = roofline
        self._observers = observers
        self._is_stopped = is_stopped
        self._exits = exits
        self._host_ns: dict[int, tuple[int, int]] = {}
        self._tokens = {} if tokens is None else tokens

    def run(self) -> None:
        """Run to the end. Raises what engine and runner raise, and `KeyboardInterrupt` between two steps once
        the run is stopped.

        After any of them batches may still be on the device: synchronise before their memory is used for
        something else.
        """
        loop = self._engine.run()
        asked_ns = self._timeline.now_ns()
        command = next(loop, None)
        while command is not None:
            answered_ns = self._timeline.now_ns()
            if self._is_stopped():
                raise KeyboardInterrupt
            if isinstance(command, Submit):
                event: Event = self._submit(command.batch, answered_ns - asked_ns, answered_ns)
            else:
                event = self._wait(command.until_ns)
            asked_ns = self._timeline.now_ns()
            command = advance(loop, event)

    def _submit(self, batch: ExecutionBatch, select_ns: int, answered_ns: int) -> Tick:
        self._runner.transfer(
            batch.transfers, {item.request_id: self._prompt(item) for item in batch.allocations}
        )
        for observer in self._observers:
            observer.launching(batch)
        rule = self._engine.scheduler.exits
        self._runner.launch(batch, surplus_rows(batch, rule, self._exits) if self._exits else frozenset())
        now_ns = self._timeline.now_ns()
        self._host_ns[batch.seq] = (select_ns, now_ns - answered_ns)
        return Tick(max(now_ns, self._engine.now_ns))

    def _prompt(self, allocation: Allocation) -> np.ndarray:
        """What a request that is let in runs as its prompt. Kept output tokens are on the host: nothing of it
        was in flight."""
        request = self._engine.log.records[allocation.request_id].request
        prompt = self._make_prompt(request)
        if not allocation.num_kept_tokens:
            return prompt
        kept = self._tokens[request.request_id][: allocation.num_kept_tokens]
        return np.concatenate((prompt, np.array(kept, dtype=prompt.dtype)))

    def _wait(self, until_ns: int | None) -> Event:
        runner, timeline = self._runner, self._timeline
        while not self._is_stopped():
            if runner.oldest_is_done():
                return self._collect()
            now_ns = timeline.now_ns()
            if until_ns is not None and now_ns >= until_ns:
                return Tick(now_ns)
            if not runner.launched and until_ns is not None and until_ns - now_ns > SPIN_NS:
                time.sleep(min(until_ns - now_ns - SPIN_NS, LONGEST_SLEEP_NS) / 1e9)
        raise KeyboardInterrupt

    def _collect(self) -> Completion:
        """The completion of the oldest batch.

        Device times are mapped to the host's clock once, so they may be some microseconds off; they are held
        between the time the batch was formed and the time it was seen to be done.
        """
        launched, started_ns, finished_ns = self._runner.collect()
        batch = launched.batch
        now_ns = max(self._timeline.now_ns(), self._engine.now_ns)
        finished_ns = min(max(finished_ns, batch.formed_ns), now_ns)
        started_ns = min(max(started_ns, batch.formed_ns), finished_ns)
        records = self._engine.log.records
        stops = last_tokens(batch, records, self._oracle)
        for observer in self._observers:
            observer.collected(launched, stops)
        if batch.stage is Stage.CODA:
            assert launched.tokens is not None
            for item, token in zip(batch.ranges, launched.tokens.tolist(), strict=True):
                if item.request_id in records:  # else it had ended: surplus
                    self._tokens.setdefault(item.request_id, []).append(token)
        exits = frozenset(left_by_gate(launched))
        if self._exits:
            exits = early_exits(batch, self._engine.scheduler.exits, self._exits)
        select_ns, host_ns = self._host_ns.pop(batch.seq)
        limit_ns = 0
        if self._roofline is not None:
            limit_ns = self._roofline.limit_ns(batch) + self._roofline.device.transfer_ns(
                batch.transfers.swapped_bytes
            )
        return Completion(
            batch.seq, now_ns, started_ns, finished_ns, stops, select_ns, host_ns, limit_ns, exits=exits
        )


def left_by_gate(launched: Launched) -> Iterator[int]:
    """Requests whose decode row in a collected batch the gate has let go."""
    if launched.decisions is None:
        return
    decisions, row = launched.decisions.tolist(), 0
    for item in launched.batch.ranges:
        if decisions[row]:
            yield item.request_id
        row += item.token_count
