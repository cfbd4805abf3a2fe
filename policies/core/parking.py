"""Requests that gave way and wait to run on, and what of theirs is in host memory. Numbers only; the memory is the executor's."""

from dataclasses import dataclass

from policies.core.model import ModelShape
from policies.core.request import RequestState
from policies.core.settings import CacheSettings

TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Parked:
    """A request that gave way, and how many groups of its K/V are in host memory; None: they are to be computed again."""

    state: RequestState
    num_swapped_groups: int | None

    @property
    def is_swapped(self) -> bool:
        return self.num_swapped_groups is not None


class Parking:
    """Under `preemption: swap` K/V are kept as long as `swap_blocks` has room; else they are computed again."""

    def __init__(self, model: ModelShape, cache: CacheSettings, planes: int) -> None:
        self.num_swapped_groups = 0
        self._swaps = cache.preemption == "swap"
        self._limit = None if cache.swap_blocks is None else cache.swap_blocks // planes
        self._group_bytes = planes * cache.block_size * model.kv_bytes_per_token_and_depth
        self._row_bytes = model.hidden_bytes_per_row + TOKEN_ID_BYTES
        self._parked: dict[int, Parked] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def get(self, request_id: int) -> Parked | None:
        return self._parked.get(request_id)

    def can_swap(self, num_groups: int) -> bool:
        """Whether the K/V in so many groups may go to host memory."""
        return self._swaps and (self._limit is None or self.num_swapped_groups + num_groups <= self._limit)

    def park(self, state: RequestState, num_swapped_groups: int | None) -> None:
        self._parked[state.request_id] = Parked(state, num_swapped_groups)
        self.num_swapped_groups += num_swapped_groups or 0

    def take(self, request_id: int) -> Parked | None:
        """A parked request runs on, or its client has hung up; None when it is not parked."""
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            self.num_swapped_groups -= parked.num_swapped_groups or 0
        return parked

    def swap_bytes(self, num_groups: int) -> int:
        """Bytes that one swap moves: the groups in all planes, the hidden state of the token being decoded, the last token's id."""
        return num_groups * self._group_bytes + self._row_bytes
