"""What the next batches will take, and whether every decoding request gets its tokens in time meanwhile."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from policies.core.seam.batch import HEADS, ExecutionBatch, Proposal, ScheduledRange, Stage, Work, new_range
from policies.core.seam.events import COMPONENTS
from policies.core.seam.view import RequestView, View
from policies.costs.clock import Clock, Step
from policies.costs.latency import LatencyModel, Prediction

DECODE, PROMPT = Stage.RECURRENT, Stage.PREFILLING_RECURRENT
ATTENTION = COMPONENTS.index("attention")
NEVER = float("inf")
PRICED_ROWS = 1024
"""Rows of the batches at whose price prompts are reckoned."""
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
        self._turns: dict[tuple[int, int], int] = {}
        self._sums: list[float] = [0.0]

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
            prediction = self.latency.times(batch.work, batch.transfers)
            known = self._times[batch.seq] = (batch, prediction)
        return known[1]

    def prompt_ns(self, start: int, end: int, num_loops: int) -> float:
        """About what the rows of a prompt from `start` to `end` take in batches of `PRICED_ROWS`."""
        return num_loops * (self._summed_ns(end) - self._summed_ns(start))

    def _summed_ns(self, tokens: int) -> float:
        sums = self._sums
        at, rest = divmod(tokens, PRICED_ROWS)
        while len(sums) <= at + 1:
            sums.append(sums[-1] + self.turn_ns((len(sums) - 1) * PRICED_ROWS, PRICED_ROWS))
        return sums[at] + rest * (sums[at + 1] - sums[at]) / PRICED_ROWS

    def turn_ns(self, start: int, rows: int) -> int:
        """A batch of one loop of so many rows of one prompt."""
        found = self._turns.get((start, rows))
        if found is None:
            work = Work.of(PROMPT, 1, [ScheduledRange(0, PROMPT, 0, start, rows)])
            found = self._turns[start, rows] = self.latency.predict(work).device_ns
        return found


class Horizon:
    """When the decode rows of `view` have their next tokens, whatever is run beside or before them.

    Step k runs the decode rows, whoever has joined them, and what there is of prompt rows; who comes out
    of its last depth has its token after a CODA batch, and goes on after a PRELUDE batch. Contexts are
    those of now, and rows that leave early or stop are load that goes away, as are guesses: tokens are
    counted as if none were right. Each row's next token is due at `due_ns`, and the one after it `itl_ns`
    later: a batch that loads the second token's way without need is refused too.
    """

    def __init__(
        self,
        costs: Costs,
        view: View,
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
        rows = [
            new_range((request.request_id, DECODE, request.depth, request.position, 1, 0, None, False))
            for request in view.looping
        ]
        self.num_rows = len(rows)
        """Rows that decode."""
        self._beside_rows = costs.latency.beside(rows)
        self.done = [0] * num_loops
        """Rows whose token comes after step k."""
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
        self.alone = self._predict(())
        """A batch of the decode rows."""

    def mixed_ns(self, start: int, rows: int) -> int:
        """A batch of the decode rows and of so many of a prompt from `start` on, a T-th of them at each
        depth."""
        cuts = [start + rows * part // self.num_loops for part in range(self.num_loops + 1)]
        ranges = [Proposal(-1, 0, first, end) for first, end in pairwise(cuts) if end > first]
        return self._predict(ranges).device_ns

    def waits(self, prompts: Sequence[Proposal], loops: int) -> bool:
        """Whether all tokens within reach are in time when a batch of `prompts` runs first, so many loops,
        and then nothing but decode rows."""
        ranges = [prompt_range(item) for item in prompts]
        step = Step.of(self.costs.latency.predict(Work.of(PROMPT, loops, ranges)), self.costs.factor)
        ends = [item for item in prompts if self._is_last(item) and item.depth + loops == self.num_loops]
        clock = self.clock.fork()
        clock.run(step, step.device_ns)
        late, second = self._late(clock, came=len(ends), is_patient=False)
        return not (late or second)

    def flows(self, prompts: Sequence[Proposal]) -> bool:
        """Whether all tokens within reach are in time when `prompts` run beside the decode rows
        until they leave the last depth."""
        rows, joins = [0] * self.num_loops, [0] * self.num_loops
        for item in prompts:
            steps = self.num_loops - item.depth
            for k in range(steps):
                rows[k] += item.end - item.start
            if self._is_last(item):
                joins[steps - 1] += 1
        mix = Mix(self._predict(prompts), rows, joins)
        late, second = self._late(self.clock.fork(), mix, is_patient=False)
        return not (late or second)

    def forgive(self) -> bool:
        """Give rows that would be late with nothing beside them, and no margin, a whole gap from now on;
        return whether with the margin nobody would be. Who is late anyway must not stop prompts for ever,
        nor be forgotten; who may yet be in time is not given up for a margin."""
        late, second = self._late(self.clock.fork())
        if late:
            lost, _ = self._late(self._clock(1.0)[0])
            for k in lost:
                self.due_ns[k] = max(self.due_ns[k], self.clock.device_ns + self.itl_ns)
        return not (late or second)

    def _clock(self, factor: float) -> tuple[Clock, list[float]]:
        """A clock at the batch that is chosen, and the ends of those in flight."""
        view = self.view
        clock = Clock(self.costs.latency, view.limits.inflight, factor, view.device_free_ns)
        return clock, clock.catch_up(view.in_flight, self.costs.times, view.now_ns)

    def _late(
        self, clock: Clock, mix: "Mix | None" = None, came: int = 0, is_patient: bool = True
    ) -> tuple[list[int], list[int]]:
        """Steps after which a row's next token is late, and those of rows whose second one is, by a
        `clock` that is run ahead; without `is_patient` up to the first of them. `came` prompts have come
        to their end before the first step."""
        num_loops, costs, factor = self.num_loops, self.costs, clock.factor
        decoding, alone_ns = self.num_rows, self.alone.components_ns[ATTENTION]
        token_ns: list[float] = []
        late, second = [], []
        arriving = self.done + [0] * num_loops
        joins = mix.joins if mix is not None else ()
        for k, count in enumerate(joins):
            arriving[k] += count
        came_ns = NEVER
        if came:
            coda, prelude = costs.step(Stage.CODA, came, factor), costs.step(Stage.PRELUDE, came, factor)
            came_ns = clock.run(coda, coda.device_ns)
            clock.run(prelude, prelude.device_ns)
            decoding += came
            arriving[num_loops - 1] += came
        step = Step.of(mix.prediction if mix is not None else self.alone, factor)
        for k in range(2 * num_loops):
            beside = mix.rows[k] if mix is not None and k < num_loops else 0
            if decoding or beside:
                attention_ns = (
                    mix.prediction.components_ns[ATTENTION] if mix is not None and beside else alone_ns
                )
                clock.run(step, factor * (costs.thin_ns(decoding + beside) + attention_ns))
            come = arriving[k]
            if not come:
                token_ns.append(NEVER)
                continue
            coda, prelude = costs.step(Stage.CODA, come, factor), costs.step(Stage.PRELUDE, come, factor)
            end_ns = clock.run(coda, coda.device_ns)
            clock.run(prelude, prelude.device_ns)
            token_ns.append(end_ns)
            if k < num_loops:
                if k < len(joins):
                    decoding += joins[k]
                arriving[k + num_loops] += come
                if end_ns > self.due_ns[k]:
                    late.append(k)
                if k == num_loops - 1 and end_ns > came_ns + self.itl_ns:
                    second.append(k)
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
        return self._beside_rows([prompt_range(item) for item in prompts])

    def _is_last(self, item: Proposal) -> bool:
        return item.end == self.prompt_ends[item.request_id]


class Mix(NamedTuple):
    """Prompt rows beside decode rows: their first batch, how many run at step k, and how many prompts are at
    their end after it. What has left the last depth by then is counted on in attention."""

    prediction: Prediction
    rows: list[int]
    joins: list[int]


def prompt_range(item: Proposal) -> ScheduledRange:
    request_id, depth, start, end = item
    return new_range((request_id, PROMPT, depth, start, end - start, 0, None, False))
