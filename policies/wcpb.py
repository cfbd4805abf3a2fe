"""wcpb: wavefront chunked prefill batching. Several chunks of one prompt in flight, each at its own depth, in
one batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from policies.building_blocks import (
    beside_decode,
    decode_comes_next,
    in_stage_order,
    prompt_selection,
    token_stages,
)
from policies.core.seam.batch import Proposal, Selection
from policies.core.seam.policy import Policy
from policies.core.seam.view import RequestView, View


@dataclass(frozen=True)
class Wavefront(Policy):
    """Chunk c may run depth d as soon as it has run d-1 and chunk c-1 has run d, so T chunks of a prompt
    overlap like a pipeline.

    `mix_decode` puts decode rows into the same batches; False makes them take turns, as they do in any case
    where decode rows alone fill a batch. `fuse_prelude` embeds a chunk in the batch that runs its depth 0;
    False stages it in a batch of its own first.
    """

    name: ClassVar[str] = "wcpb"
    repeats: ClassVar[bool] = True
    is_wavefront: ClassVar[bool] = True

    mix_decode: bool = True
    fuse_prelude: bool = True

    def select(self, view: View) -> Selection | None:
        if not self.mix_decode:
            return in_stage_order(view, self._prompt_batch)
        if not self.fuse_prelude and view.looping and len(view.looping) < view.limits.max_num_batched_tokens:
            # A staging of its own goes before the recurrent batch that it is staged for.
            early = token_stages(view) or self._staging(view)
            if early is not None:
                return early
        return beside_decode(view, self._wavefront, self._prompt_batch, self._regroups)

    def _prompt_batch(self, view: View) -> Selection | None:
        staging = None if self.fuse_prelude else self._staging(view)
        if staging is not None:
            return staging
        ranges = self._wavefront(view, view.limits.max_num_batched_tokens)
        return prompt_selection(ranges, comes_back=decode_comes_next(view) or self._regroups(view, ranges))

    def _staging(self, view: View) -> Selection | None:
        """Embed the next chunk of every prompt whose ring has a free slot."""
        ranges: list[Proposal] = []
        max_rows = view.limits.max_num_batched_tokens
        for request in view.prompts:
            start, end = request.prompt.stageable()
            end = min(end, start + max_rows)
            if end > start:
                ranges.append(Proposal(request.request_id, 0, start, end))
                max_rows -= end - start
        return Selection(tuple(ranges), 0) if ranges else None

    def _wavefront(self, view: View, max_rows: int) -> list[Proposal]:
        """Ready ranges, round-robin over requests, each request's deepest first: its oldest chunk leaves the
        ring soonest.

        Where not even one chunk of every request fits, the round begins with the request scheduled longest
        ago.
        """
        ranges: list[Proposal] = []
        requests = view.prompts
        if len(requests) * view.limits.chunk_tokens > max_rows:
            requests = tuple(
                sorted(
                    requests, key=lambda request: (self._rank(view, request), request.last_seq, request.order)
                )
            )
        turns = [self._ready_ranges(request, view.num_loops) for request in requests]
        while turns and max_rows > 0:
            still_ready = []
            for turn in turns:
                item = next(turn, None)
                if item is None or max_rows == 0:
                    continue
                if item.end - item.start > max_rows:
                    item = item._replace(end=item.start + max_rows)
                ranges.append(item)
                max_rows -= item.end - item.start
                still_ready.append(turn)
            turns = still_ready
        return ranges

    def _rank(self, view: View, request: RequestView) -> int:
        return request.priority if view.limits.admission == "priority" else 0

    def _ready_ranges(self, request: RequestView, num_loops: int) -> Iterator[Proposal]:
        for depth in range(num_loops - 1, -1, -1):
            start, end = request.prompt.ready(depth, self.fuse_prelude)
            if end > start:
                yield Proposal(request.request_id, depth, start, end)

    def _regroups(self, view: View, ranges: list[Proposal]) -> bool:
        """Whether another chunk could join at the next depth: not when every prompt's last tokens are all in
        this batch, and not when every prompt has one range in it and there is no room for another."""
        room = view.limits.max_num_batched_tokens - (len(view.looping) if self.mix_decode else 0)
        if len(ranges) == len(view.prompts) and sum(item.end - item.start for item in ranges) == room:
            return False
        prompts = {request.request_id: request for request in view.prompts}
        return len(ranges) < len(prompts) or any(
            item.end < prompts[item.request_id].prompt_tokens
            or item.start > prompts[item.request_id].prompt.num_prefilled_tokens
            for item in ranges
        )
