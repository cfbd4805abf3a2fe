"""requests that were preempted and wait to run on, and what of theirs is in host memory. Numbers only; the
memory is the executor's."""

from dataclasses import dataclass

from policies.core.models.shape import ModelShape
from policies.core.progress.state import RequestState
from policies.core.seam.settings import CacheSettings

TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class PreemptedRequest:
    """A request that was preempted, and how many groups of its K/V are in host memory; None: they are to be
    computed again."""

    state: RequestState
    num_swapped_groups: int | None

    @property
    def is_swapped(self) -> bool:
        return self.num_swapped_groups is not None


class PreemptedRequests:
    """Under `preemption: swap` K/V are kept as long as `swap_blocks` has room; else they are computed
    again."""

    def __init__(self, model: ModelShape, cache: CacheSettings, planes: int, most_rows: int = 1) -> None:
        self.num_swapped_groups = 0
        self._swaps = cache.preemption == "swap"
        self._limit = None if cache.swap_blocks is None else cache.swap_blocks // planes
        self._group_bytes = planes * cache.block_size * model.kv_bytes_per_token_and_depth
        self._row_bytes = most_rows * (model.hidden_bytes_per_row + TOKEN_ID_BYTES)
        self._by_id: dict[int, PreemptedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: int) -> PreemptedRequest | None:
        return self._by_id.get(request_id)

    def can_swap(self, num_groups: int) -> bool:
        """Whether the K/V in so many groups may go to host memory."""
        return self._swaps and (self._limit is None or self.num_swapped_groups + num_groups <= self._limit)

    def add(self, state: RequestState, num_swapped_groups: int | None) -> None:
        self._by_id[state.request_id] = PreemptedRequest(state, num_swapped_groups)
        self.num_swapped_groups += num_swapped_groups or 0

    def take(self, request_id: int) -> PreemptedRequest | None:
        """A preempted request runs on, or its client has hung up; None when it is not preempted."""
        preempted = self._by_id.pop(request_id, None)
        if preempted is not None:
            self.num_swapped_groups -= preempted.num_swapped_groups or 0
        return preempted

    def swap_bytes(self, num_groups: int) -> int:
        """Bytes that one swap moves: the groups in all planes, and of every token that may be in the loop the
        hidden state and the id."""
        return num_groups * self._group_bytes + self._row_bytes
