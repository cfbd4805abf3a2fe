"""slo: a wavefront whose chunks are as large as the latencies allow that were promised, batch by batch.

What is injected at depth 0 now loads the next T batches, and a decoded token needs T batches: one decision
commits a known horizon. The policy asks a latency model what these batches will take and injects as many
prompt rows as leave every decoding request its next tokens in time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from policies.building_blocks import beside_decode, decode_comes_next, prompt_selection
from policies.core.bounds import Within
from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.core.seam.batch import Proposal, Selection, Stage
from policies.core.seam.exits import ExitRule
from policies.core.seam.policy import Policy
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.core.seam.view import RequestView, View
from policies.costs.alone import token_ns
from policies.costs.fitted import FittedModel
from policies.costs.horizon import Costs, Horizon
from policies.costs.latency import LatencyModel
from policies.costs.models import load_device

STEP_ROWS = 16
"""Injected rows are a multiple of this, or all that there are."""
MOST_BATCHES = 512
"""A prompt that no batch has touched for so many goes first, whatever was promised to others."""
Milliseconds = Annotated[float, Within(gt=0, le=1e9)]


@dataclass(frozen=True)
class Slo(Policy):
    """Keeps `itl_ms` between the tokens of a request, and `ttft_ms` to its first one as far as that leaves
    room.

    `gaps` strict wants every token `itl_ms` after the one before; banked wants token j at arrival + `ttft_ms`
    + j x `itl_ms`, so that early tokens save for later ones. Predictions of `model`, the name of a latency
    model, are taken `margin` longer; auto is the model's own worst error on held-out batches, 0 where it
    knows none. `scheduler.prefill_chunk_size` is the most that is injected of one prompt at a time.
    """

    name: ClassVar[str] = "slo"
    is_wavefront: ClassVar[bool] = True

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    gaps: Literal["strict", "banked"] = "strict"
    model: str = "h200"
    margin: Literal["auto"] | Annotated[float, Within(0, le=10)] = "auto"

    def check(self, model: ModelShape, scheduler: SchedulerSettings, cache: CacheSettings) -> None:
        super().check(model, scheduler, cache)
        missing = [f"policy.{name}" for name in ("ttft_ms", "itl_ms") if getattr(self, name) is None]
        if missing:
            raise InputError(f"policy slo: {' and '.join(missing)} missing, expected what it is to keep")

    def select(self, view: View) -> Selection | None:
        raise TypeError("policy slo consults a latency model: ask its chooser")

    def chooser(self, model: ModelShape) -> Callable[[View], Selection | None]:
        latency = load_device(self.model, model)
        return Chooser(self, Costs(latency, self.believed_margin(latency))).select

    def believed_margin(self, latency: LatencyModel) -> float:
        if self.margin != "auto":
            return self.margin
        return (
            latency.file.errors_by_stage[Stage.RECURRENT].worst if isinstance(latency, FittedModel) else 0.0
        )

    def notes(self, model: ModelShape) -> tuple[str, ...]:
        latency = load_device(self.model, model)
        what = latency.provenance
        if self.model.startswith("roofline:"):
            what = f"a roofline, which no kernel reaches ({what})"
        notes = [f"policy slo believes {what}, margin {self.believed_margin(latency):.1%}"]
        assert self.itl_ms is not None
        rule = ExitRule(model.num_loops, model.num_loops, False)
        alone_ms = token_ns(latency, rule, 0) / 1e6
        if alone_ms > self.itl_ms:
            notes.append(
                f"policy.itl_ms: {self.itl_ms:g}: no request could keep it even alone: {alone_ms:.1f} ms per "
                "token; prompts do not wait for it"
            )
        return tuple(notes)

    def check_card(self, model: ModelShape, card: str) -> None:
        latency = load_device(self.model, model)
        is_of_card = isinstance(latency, FittedModel) and latency.file.profile["gpu"] == card
        if not is_of_card and not self.model.startswith("roofline:"):
            raise InputError(
                f"policy.model: {self.model} was not fitted on this card, {card}: make a model of it with "
                "`python -m executor profile --out PROFILE.csv` and `python -m sim fit PROFILE.csv --out "
                "MODEL.json`, or name a roofline:<card> to believe"
            )


class Chooser:
    """Slo for one model: the options in nanoseconds and what batches cost. Keeps nothing of a run."""

    def __init__(self, policy: Slo, costs: Costs) -> None:
        assert policy.ttft_ms is not None and policy.itl_ms is not None
        self.ttft_ns, self.itl_ns = round(1e6 * policy.ttft_ms), round(1e6 * policy.itl_ms)
        self.is_banked = policy.gaps == "banked"
        self.costs = costs
        self._in_reach: dict[ExitRule, bool] = {}
        self.on_choice: Callable[[View, int, bool, bool], None] | None = None
        """Told (view, rows injected, whether 0 rows would keep every promise, whether a starved prompt forced
        them): for whoever attributes late tokens."""

    def select(self, view: View) -> Selection | None:
        found = beside_decode(view, self._ranges, self._prompt_batch, self._regroups)
        if found is None or found.loop_count in (0, 1):
            return found
        prompts = {request.request_id for request in view.prompts}
        if any(item.depth for item in found.ranges if item.request_id in prompts):
            # More may be injected at the next boundary, and executors keep programs for one loop and for all.
            return found._replace(loop_count=1)
        return found

    def _prompt_batch(self, view: View) -> Selection | None:
        ranges = self._ranges(view, view.limits.max_num_batched_tokens)
        return prompt_selection(ranges, comes_back=decode_comes_next(view) or self._regroups(view, ranges))

    def _regroups(self, view: View, ranges: list[Proposal]) -> bool:
        """Whether prompt rows could join at the next depth: not when all that is left of every prompt is in
        this batch."""
        prompts = {request.request_id: request for request in view.prompts}
        return len(ranges) < len(prompts) or any(
            item.end < prompts[item.request_id].prompt_tokens
            or item.start > prompts[item.request_id].prompt.num_prefilled_tokens
            for item in ranges
        )

    def _ranges(self, view: View, max_rows: int) -> list[Proposal]:
        """What is in the rings, each request's deepest first, and the rows that are injected."""
        ring: list[Proposal] = []
        for request in sorted(view.prompts, key=lambda request: (request.last_seq, request.order)):
            for depth in range(view.num_loops - 1, 0, -1):
                start, end = request.prompt.ready(depth)
                end = min(end, start + max_rows)
                if end > start:
                    ring.append(Proposal(request.request_id, depth, start, end))
                    max_rows -= end - start
        queue = [
            (request, start, end - start)
            for request in self._order(view)
            for start, end in [request.prompt.ready(0)]
            if end > start
        ]
        total = min(max_rows, sum([count for *_, count in queue]))
        if total <= 0:
            return ring
        # With nobody decoding and nothing in the rings there is nothing that 0 rows could wait for.
        least = 0 if ring or view.looping else STEP_ROWS
        if not self._is_in_reach(view.exits):
            return ring + injected(queue, total)
        is_starved = self._is_starved(view, queue[0][0])
        return ring + injected(queue, self._rows(view, ring, queue, total, least, is_starved))

    def _rows(
        self,
        view: View,
        ring: list[Proposal],
        queue: list[tuple[RequestView, int, int]],
        total: int,
        least: int,
        is_starved: bool,
    ) -> int:
        """How many rows are injected: the most, by bisection, that the horizon allows."""
        horizon = Horizon(self.costs, view, ring, self._due_ns, self.itl_ns, self.is_banked)
        keeps_all = True
        if horizon.is_feasible(injected(queue, total)):
            rows = total
        else:
            keeps_all = horizon.forgive()
            low, high = 0, -(-total // STEP_ROWS)  # the least multiple known to be too much
            while high - low > 1:
                middle = (low + high) // 2
                if horizon.is_feasible(injected(queue, STEP_ROWS * middle)):
                    low = middle
                else:
                    high = middle
            rows = STEP_ROWS * low
        floor = min(total, STEP_ROWS if is_starved else least)
        if self.on_choice is not None:
            self.on_choice(view, max(rows, floor), keeps_all, rows < floor)
        return max(rows, floor)

    def _is_in_reach(self, exits: ExitRule) -> bool:
        """Whether a request that runs alone has its tokens in time. Where none could, prompts need not wait
        for it."""
        found = self._in_reach.get(exits)
        if found is None:
            found = self._in_reach[exits] = token_ns(self.costs.latency, exits, 0) <= self.itl_ns
        return found

    def _order(self, view: View) -> list[RequestView]:
        """Prompts in the order in which they get rows: who starves, then by least laxity who can still make
        its first token, then who cannot, in order of arrival."""
        by_priority = view.limits.admission == "priority"

        def key(request: RequestView) -> tuple[bool, int, bool, float, tuple[int, int]]:
            remaining = request.prompt_tokens - request.prompt.ready(0)[0]
            laxity_ns = (
                request.arrival_ns
                + self.ttft_ns
                - view.now_ns
                - self.costs.prompt_ns(remaining, view.num_loops)
            )
            is_late = laxity_ns < 0
            rank = request.priority if by_priority else 0
            return (
                not self._is_starved(view, request),
                rank,
                is_late,
                0 if is_late else laxity_ns,
                request.order,
            )

        return sorted(view.prompts, key=key)

    def _is_starved(self, view: View, request: RequestView) -> bool:
        return view.seq - max(request.last_seq, request.admitted_seq) > MOST_BATCHES

    def _due_ns(self, request: RequestView, last_ns: float) -> float:
        """When the next token of a decoding request is due, whose last one comes at `last_ns`."""
        if self.is_banked:
            return request.arrival_ns + self.ttft_ns + request.num_scheduled_outputs * self.itl_ns
        return last_ns + self.itl_ns


def injected(queue: list[tuple[RequestView, int, int]], rows: int) -> list[Proposal]:
    """`rows` rows at depth 0, from the first of the queue on."""
    ranges = []
    for request, start, count in queue:
        count = min(count, rows)
        if count <= 0:
            break
        ranges.append(Proposal(request.request_id, 0, start, start + count))
        rows -= count
    return ranges
