"""What a waiting request takes when it is let in: from where it runs on, and how many positions it gets
blocks for. Values and their rule; what is held moves in `residents.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.core.memory.kv import BlockLedger
from policies.core.memory.preempted import PreemptedRequests
from policies.core.memory.prefixes import Prefixes
from policies.core.progress.state import RequestState
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings


@dataclass(frozen=True, slots=True)
class Claim:
    """What `request` takes when it is let in now: blocks for `num_positions` tokens, of which the `reused`
    groups hold the first.

    `state` is how far it had come when it was preempted, None when it has never run. With
    `num_swapped_groups` its K/V come back from host memory; None: it computes `prompt_tokens` tokens.
    """

    request: Request
    state: RequestState | None
    prompt_tokens: int
    num_swapped_groups: int | None
    reused: Sequence[int]
    num_positions: int


class Claims:
    """The rule of `cache.allocation` and `cache.admit` for one run over `blocks`."""

    def __init__(
        self,
        cache: CacheSettings,
        chunk_tokens: int,
        blocks: BlockLedger,
        prefixes: Prefixes,
        preempted: PreemptedRequests,
    ) -> None:
        self._grows = cache.allocation == "incremental"
        self._takes_context = cache.admit == "whole_context"
        self._chunk_tokens = chunk_tokens
        self._blocks = blocks
        self._prefixes = prefixes
        self._preempted = preempted

    def of(self, request: Request) -> Claim:
        """The claim of a waiting request, as things stand."""
        preempted = self._preempted.get(request.request_id)
        if preempted is not None and preempted.num_swapped_groups is not None:
            kept, swapped = preempted.state, preempted.num_swapped_groups
            first = max(kept.next_kv_positions, swapped * self._blocks.block_size)
            positions = self._positions(request, kept.num_known_positions, first)
            return Claim(request, kept, kept.prompt_tokens, swapped, (), positions)
        known = request.prompt_tokens if preempted is None else preempted.state.prompt_tokens
        reused = self._prefixes.reusable(request, known)
        first = min(len(reused) * self._blocks.block_size + self._chunk_tokens, known)
        positions = self._positions(request, known, first)
        state = None if preempted is None else preempted.state
        return Claim(request, state, known, None, reused, positions)

    def _positions(self, request: Request, known: int, first: int) -> int:
        """All that it can ever need; or all that is known of it; or what its first step needs, and what was
        swapped out.

        Prompt 40, 100 tokens at most, preempted after 7, chunk 16, recompute: 139, or 47, or 16.
        """
        if not self._grows:
            return request.num_kv_positions
        return known if self._takes_context else first
