"""slo: a wavefront whose chunks are as large as the latencies allow that were promised, batch by batch.

A decoded token needs T loops, so a latency model can say when it comes. Prompt rows run beside the decode
rows in each of these loops, or in turns of their own before all of them, whichever puts more into a gap;
and always as many as leave every decoding request its next tokens in time.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from policies.building_blocks import (
    decode_batch,
    decode_comes_next,
    decode_rows,
    in_stage_order,
    prompt_selection,
    shared_depths,
    token_stages,
)
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
"""Prompt rows beside decode rows are a multiple of this, or all that there are."""
TURN_ROWS, LEAST_TURN = 64, 256
"""The same of prompt rows alone; and decode rows go before fewer than so many."""
SIZES = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
"""Prompt rows of a batch that are compared, beside decode rows and alone."""
TURN_GAIN = 1.33
"""So many times the rows must fit into a gap alone: it is seldom filled to its end."""
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
        """Told (view, prompt rows, whether none would keep every promise, whether a starved prompt forced
        them) where decode rows and prompts could run: for whoever attributes late tokens."""

    def select(self, view: View) -> Selection | None:
        if len(view.looping) >= view.limits.max_num_batched_tokens:
            return in_stage_order(view, self._prompts_alone)
        early = token_stages(view)
        if early is not None:
            return early
        if not view.looping:
            return self._prompts_alone(view)
        queue = self._order(view)
        if not any(
            [request.prompt.deepest_ready()[1] < request.prompt.deepest_ready()[2] for request in queue]
        ):
            return decode_batch(view)
        if not self._is_in_reach(view.exits):
            room = view.limits.max_num_batched_tokens - len(view.looping)
            return beside(view, ready_ranges(view, queue, room))
        horizon = Horizon(self.costs, view, self._due_ns, self.itl_ns, self.is_banked)
        keeps_all = horizon.forgive()
        is_starved = self._is_starved(view, queue[0])
        if is_starved or not self._takes_turns(view, horizon, queue):
            ranges = self._beside(view, horizon, queue, STEP_ROWS if is_starved else 0)
            found = beside(view, ranges) if ranges else None
        else:
            found = self._before(view, horizon, queue)
        if self.on_choice is not None:
            prompts = {request.request_id for request in queue}
            ranges = [item for item in found.ranges if item.request_id in prompts] if found else []
            self.on_choice(view, count_rows(ranges), keeps_all, is_starved)
        return found or decode_batch(view)

    def _prompts_alone(self, view: View) -> Selection | None:
        ranges = ready_ranges(view, self._order(view), view.limits.max_num_batched_tokens)
        # Executors keep programs for one loop and for all.
        is_under_way = any([item.depth for item in ranges])
        return prompt_selection(ranges, is_under_way or decode_comes_next(view) or regroups(view, ranges))

    def _takes_turns(self, view: View, horizon: Horizon, queue: list[RequestView]) -> bool:
        """Whether a gap holds clearly more prompt rows in batches of their own, before all loops of the
        decode rows in one, than beside the decode rows in each of their loops."""
        costs, loops, num = self.costs, view.num_loops, horizon.num_rows
        left = sum([request.prompt_tokens - request.prompt.num_prefilled_tokens for request in queue])
        sizes = SIZES[: bisect_right(SIZES, min(left, view.limits.max_num_batched_tokens))] or (left,)
        start = queue[0].prompt.num_prefilled_tokens
        heads_ns = costs.flat(Stage.CODA, num).device_ns + costs.flat(Stage.PRELUDE, num).device_ns
        gap_ns = self.itl_ns / costs.factor - heads_ns
        fit = bisect_right(sizes, gap_ns / loops, key=lambda rows: horizon.mixed_ns(start, rows))
        needed = TURN_GAIN * loops * (sizes[fit - 1] if fit else 0)
        room_ns = gap_ns - loops * horizon.alone.device_ns
        return room_ns > 0 and any(
            min(loops, room_ns / costs.turn_ns(start, rows)) * rows > needed
            for rows in reversed(sizes)
            if loops * rows > needed
        )

    def _before(self, view: View, horizon: Horizon, queue: list[RequestView]) -> Selection | None:
        """As large a batch of prompt rows as decode rows can wait for; None where that is hardly any."""
        ranges = ready_ranges(view, queue, view.limits.max_num_batched_tokens)
        is_whole = not regroups(view, ranges) and not any([item.depth for item in ranges])
        if is_whole and horizon.waits(ranges, view.num_loops):
            return Selection(tuple(ranges), None)
        rows = most_rows(ranges, TURN_ROWS, lambda ranges: horizon.waits(ranges, 1))
        if rows < min(LEAST_TURN, count_rows(ranges)):
            return None
        return Selection(tuple(first_rows(ranges, rows)), 1)

    def _beside(self, view: View, horizon: Horizon, queue: list[RequestView], least: int) -> list[Proposal]:
        """As many prompt rows, at least `least`, as may run beside decode rows until they leave the last
        depth: of what is in the rings each request's deepest first, then what is injected."""
        room = view.limits.max_num_batched_tokens - len(view.looping)
        longest_ago = sorted(queue, key=lambda request: (request.last_seq, request.order))
        ranges = ready_ranges(view, longest_ago, room, least_depth=1)
        ranges += ready_ranges(view, queue, room - count_rows(ranges), most_depth=0)
        rows = most_rows(ranges, STEP_ROWS, horizon.flows)
        return first_rows(ranges, max(rows, least))

    def _is_in_reach(self, exits: ExitRule) -> bool:
        """Whether a request that runs alone has its tokens in time. Where none could, prompts need not wait
        for it."""
        found = self._in_reach.get(exits)
        if found is None:
            found = self._in_reach[exits] = token_ns(self.costs.latency, exits, 0) <= self.itl_ns
        return found

    def _order(self, view: View) -> list[RequestView]:
        """Prompts in the order in which they get rows: who starves, then who can still make its first token,
        by when it is due, then who cannot, in order of arrival.

        Who can is Moore and Hodgson's rule for the most jobs in time on one machine: in the order of their
        due times, and whenever one would be late the longest so far is given up.
        """
        if len(view.prompts) < 2:
            return list(view.prompts)
        by_priority = view.limits.admission == "priority"
        in_order = sorted(
            [(request.priority if by_priority else 0, request.order, request) for request in view.prompts]
        )
        end_ns, kept, lost = float(view.now_ns), [], []
        for rank, order, request in in_order:
            work_ns = self.costs.prompt_ns(request.prompt.ready(0)[0], request.prompt_tokens, view.num_loops)
            end_ns += work_ns
            kept.append((rank, work_ns, order, request))
            if end_ns > request.arrival_ns + self.ttft_ns:
                kept.remove(longest := max(kept))
                lost.append(longest)
                end_ns -= longest[1]
        lost.sort(key=lambda item: (item[0], item[2]))
        found = [request for *_, request in kept + lost]
        return sorted(found, key=lambda request: not self._is_starved(view, request))

    def _is_starved(self, view: View, request: RequestView) -> bool:
        return view.seq - max(request.last_seq, request.admitted_seq) > MOST_BATCHES

    def _due_ns(self, request: RequestView, last_ns: float) -> float:
        """When the next token of a decoding request is due, whose last one comes at `last_ns`."""
        if self.is_banked:
            return request.arrival_ns + self.ttft_ns + request.num_scheduled_outputs * self.itl_ns
        return last_ns + self.itl_ns


def ready_ranges(
    view: View,
    queue: Iterable[RequestView],
    max_rows: int,
    least_depth: int = 0,
    most_depth: int | None = None,
) -> list[Proposal]:
    """What may run of each prompt between these depths, deepest first, up to so many rows."""
    first = view.num_loops - 1 if most_depth is None else most_depth
    ranges = []
    for request in queue:
        for depth in range(first, least_depth - 1, -1):
            start, end = request.prompt.ready(depth)
            end = min(end, start + max_rows)
            if end > start:
                ranges.append(Proposal(request.request_id, depth, start, end))
                max_rows -= end - start
    return ranges


def first_rows(ranges: Sequence[Proposal], rows: int) -> list[Proposal]:
    """The first so many rows of `ranges`."""
    found = []
    for item in ranges:
        if rows <= 0:
            break
        found.append(item._replace(end=min(item.end, item.start + rows)))
        rows -= item.end - item.start
    return found


def count_rows(ranges: Iterable[Proposal]) -> int:
    return sum([item.end - item.start for item in ranges])


def most_rows(ranges: Sequence[Proposal], step: int, is_fine: Callable[[Sequence[Proposal]], bool]) -> int:
    """The most rows of `ranges`, all or a multiple of `step`, that are fine, where fewer are if more are."""
    total = count_rows(ranges)
    if is_fine(ranges):
        return total
    low, high = 0, -(-total // step)  # the least multiple known to be too much
    while high - low > 1:
        middle = (low + high) // 2
        if is_fine(first_rows(ranges, step * middle)):
            low = middle
        else:
            high = middle
    return step * low


def beside(view: View, ranges: Sequence[Proposal]) -> Selection:
    """Prompt rows beside all decode rows: for one loop, so that more may join after it, or for all where all
    begin and nothing can; executors keep programs for these two."""
    rows = decode_rows(view, view.looping)
    is_whole = not regroups(view, ranges) and not any([item.depth for item in (*rows, *ranges)])
    return Selection((*rows, *ranges), shared_depths(view, rows, ranges) if is_whole else 1)


def regroups(view: View, ranges: Sequence[Proposal]) -> bool:
    """Whether prompt rows could join at the next depth: not when all that is left of every prompt is in
    `ranges`."""
    prompts = {request.request_id: request for request in view.prompts}
    return len(ranges) < len(prompts) or any(
        item.end < prompts[item.request_id].prompt_tokens
        or item.start > prompts[item.request_id].prompt.num_prefilled_tokens
        for item in ranges
    )
