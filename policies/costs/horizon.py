"""What the next T batches will take under a wavefront, and whether every decoding request gets its tokens in
time meanwhile."""

from collections.abc import Callable, Sequence

from policies.core.seam.batch import HEADS, ExecutionBatch, Proposal, ScheduledRange, Stage, Work, new_range
from policies.core.seam.events import COMPONENTS
from policies.core.seam.view import RequestView, View
from policies.costs.clock import Clock, Step
from policies.costs.latency import LatencyModel, Prediction

DECODE = Stage.RECURRENT
ATTENTION = COMPONENTS.index("attention")
NEVER = float("inf")
MOST_KEPT = 64
"""Batches in flight whose times are kept."""


class Costs:
    """What single batches cost by `latency`, `margin` longer than it says; remembers what depends on rows
    alone."""

    def __init__(self, latency: LatencyModel, margin: float) -> None:
        self.latency = latency
        self.factor = 1 + margin
        self._thin: dict[int, int] = {}
        self._flat: dict[tuple[Stage, int], Prediction] = {}
        self._steps: dict[tuple[Stage, int, float], Step] = {}
        self._times: dict[int, tuple[ExecutionBatch, Prediction]] = {}

    def thin_ns(self, rows: int) -> int:
        """One loop of `rows` rows without attention."""
        found = self._thin.get(rows)
        if found is None:
            work = Work.of(Stage.RECURRENT, 1, [ScheduledRange(0, Stage.RECURRENT, 0, 0, rows)])
            parts = self.latency.predict(work).components_ns
            found = self._thin[rows] = sum(parts) - parts[ATTENTION]
        return found

    def flat(self, stage: Stage, rows: int) -> Prediction:
        """A PRELUDE or CODA batch."""
        found = self._flat.get((stage, rows))
        if found is None:
            ranges = [ScheduledRange(at, stage, 0, 1, 1) for at in range(rows)]
            found = self._flat[stage, rows] = self.latency.predict(Work.of(stage, 0, ranges))
        return found

    def step(self, stage: Stage, rows: int, factor: float) -> Step:
        """The same, as a clock of that factor feels it."""
        found = self._steps.get((stage, rows, factor))
        if found is None:
            found = self._steps[stage, rows, factor] = Step.of(self.flat(stage, rows), factor)
        return found

    def times(self, batch: ExecutionBatch) -> Prediction:
        """Of a batch in flight, which several decisions ask of."""
        known = self._times.get(batch.seq)
        if known is None or known[0] is not batch:
            if len(self._times) >= MOST_KEPT:
                self._times.clear()
            prediction = self.latency.times(batch.work, batch.transfers.swapped_bytes)
            known = self._times[batch.seq] = (batch, prediction)
        return known[1]

    def prompt_ns(self, tokens: int, num_loops: int) -> float:
        """About what is left to a prompt: its rows at the price of a batch of 512, and the depths of the
        last."""
        return num_loops * (tokens * self.thin_ns(512) / 512 + self.thin_ns(64))


class Horizon:
    """The batches from the one that is chosen in `view` on, with `ring` in the rings.

    Batch k runs the decode rows, whoever has joined them, and of the ring and of what is injected whatever
    has not left the last depth; who comes out of its last depth has its token after a CODA batch, and goes on
    after a PRELUDE batch. Contexts are those of now, and rows that leave early or stop are load that goes
    away, as are guesses: tokens are counted as if none were right. Each row's next token is due at `due_ns`,
    and the one after it `itl_ns` later: a batch that loads the second token's way without need is refused
    too.
    """

    def __init__(
        self,
        costs: Costs,
        view: View,
        ring: Sequence[Proposal],
        due_ns: Callable[[RequestView, float], float],
        itl_ns: int,
        is_banked: bool,
    ) -> None:
        self.costs, self.itl_ns, self.is_banked = costs, itl_ns, is_banked
        self.num_loops = num_loops = view.num_loops
        self.view = view
        self.clock, ends_ns = self._clock(costs.factor)
        last_ns: dict[int, float] = {}
        for batch, end_ns in zip(view.in_flight, ends_ns, strict=True):
            if batch.stage is Stage.CODA:
                last_ns.update([(item.request_id, end_ns) for item in batch.ranges if item.stage in HEADS])
        self.prompt_ends = {request.request_id: request.prompt_tokens for request in view.prompts}
        self.ring = ring
        rows = [
            new_range((request.request_id, DECODE, request.depth, request.position, 1, 0, None, False))
            for request in view.looping
        ]
        self.num_rows = len(rows)
        """Rows that decode."""
        self._beside_rows = costs.latency.beside(rows)
        self.done = [0] * num_loops
        """Rows whose token comes after batch k."""
        self.due_ns = [NEVER] * num_loops
        for request in view.looping:
            if request.num_before:
                continue
            k = max(view.exits.max_loops - request.depth - 1, 0)
            self.done[k] += 1
            due = due_ns(request, last_ns.get(request.request_id, request.last_token_ns))
            self.due_ns[k] = min(self.due_ns[k], due)
        self.second_ns = list(self.due_ns)
        """When the token after the next is due, of rows under banked gaps."""
        self.ring_rows = [0] * num_loops
        self.ring_joins = [0] * num_loops
        for item in ring:
            self._add(item, self.ring_rows, self.ring_joins)
        self.decode_ns = self._predict(()).components_ns[ATTENTION] if rows else 0
        self.context_ns = [
            self._predict(left).components_ns[ATTENTION]
            if (left := [item for item in ring if item.depth < num_loops - k])
            else self.decode_ns
            for k in range(num_loops)
        ]
        """Attention of batch k when nothing is injected."""

    def is_feasible(self, injected: Sequence[Proposal]) -> bool:
        """Whether all tokens within reach are in time when `injected` rows join at depth 0."""
        late, second = self._late(injected, is_patient=False)
        return not (late or second)

    def forgive(self) -> bool:
        """Give rows that would be late with nothing injected, and no margin, a whole gap from now on; return
        whether with the margin nobody would be. Who is late anyway must not stop prompts for ever, nor be
        forgotten; who may yet be in time is not given up for a margin."""
        late, second = self._late(())
        if late:
            lost, _ = self._late((), self._clock(1.0)[0])
            for k in lost:
                self.due_ns[k] = max(self.due_ns[k], self.clock.device_ns + self.itl_ns)
        return not (late or second)

    def _clock(self, factor: float) -> tuple[Clock, list[float]]:
        """A clock at the batch that is chosen, and the ends of those in flight."""
        view = self.view
        clock = Clock(self.costs.latency, view.limits.inflight, factor, view.device_free_ns)
        return clock, clock.catch_up(view.in_flight, self.costs.times, view.now_ns)

    def _late(
        self, injected: Sequence[Proposal], clock: Clock | None = None, is_patient: bool = True
    ) -> tuple[list[int], list[int]]:
        """Steps after which a row's next token is late, and those of rows whose second one is; by another
        `clock` than the horizon's own, which it runs ahead, where one is given; without `is_patient` up to
        the first of them."""
        num_loops, costs = self.num_loops, self.costs
        rows, joins = self.ring_rows.copy(), self.ring_joins.copy()
        for item in injected:
            self._add(item, rows, joins)
        full = self._predict((*self.ring, *injected))
        attention_ns = full.components_ns[ATTENTION]
        clock, decoding = clock or self.clock.fork(), self.num_rows
        factor = clock.factor
        step = Step.of(full, factor)
        token_ns: list[float] = []
        late, second = [], []
        arriving = [0] * (2 * num_loops)
        for k in range(num_loops):
            arriving[k] += self.done[k] + joins[k]
        for k in range(2 * num_loops):
            is_loaded = k < num_loops and rows[k]
            count = decoding + (rows[k] if is_loaded else 0)
            if count:
                context_ns = self.decode_ns
                if is_loaded:
                    # What has left the ring by then is counted on as long as anything is injected.
                    context_ns = attention_ns if injected else self.context_ns[k]
                clock.run(step, factor * (costs.thin_ns(count) + context_ns))
            come = arriving[k]
            if not come:
                token_ns.append(NEVER)
                continue
            coda, prelude = costs.step(Stage.CODA, come, factor), costs.step(Stage.PRELUDE, come, factor)
            end_ns = clock.run(coda, coda.device_ns)
            clock.run(prelude, prelude.device_ns)
            token_ns.append(end_ns)
            if k < num_loops:
                decoding += joins[k]
                arriving[k + num_loops] += come
                if end_ns > self.due_ns[k]:
                    late.append(k)
            else:
                first = k - num_loops
                due_ns = self.second_ns[first] if self.is_banked else token_ns[first]
                if end_ns > due_ns + self.itl_ns:
                    second.append(first)
            if not is_patient and (late or second):
                break
        return late, second

    def _predict(self, prompts: Sequence[Proposal]) -> Prediction:
        """A batch of the decode rows and `prompts`; a small one where there are none, which is not run."""
        if not (self.num_rows or prompts):
            return self.costs.flat(Stage.PRELUDE, 1)
        return self._beside_rows(
            [
                new_range((request_id, Stage.PREFILLING_RECURRENT, depth, start, end - start, 0, None, False))
                for request_id, depth, start, end in prompts
            ]
        )

    def _add(self, item: Proposal, rows: list[int], joins: list[int]) -> None:
        """A prompt range runs in every batch until it leaves its last depth, and a prompt's end joins."""
        steps = self.num_loops - item.depth
        for k in range(steps):
            rows[k] += item.end - item.start
        if item.end == self.prompt_ends[item.request_id]:
            joins[steps - 1] += 1
