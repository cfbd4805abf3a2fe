"""What the audit knows of running requests from the transfers alone: who holds what, and which tokens' K/V
are in every group.

A shared prefix is right when each of its groups was written whole, in every plane, behind exactly the tokens
that the new prompt begins with; these are compared as tokens, not as the keys by which the scheduler found
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from executor.errors import AuditError
from policies.core.seam.batch import Allocation, Transfers


@dataclass(slots=True)
class Slot:
    """What a running request holds. Its first `origin` tokens were computed for others; its chunks are
    counted from there."""

    ring_id: int
    block_groups: tuple[int, ...]
    prompt: np.ndarray  # [prompt_tokens] int32, kept output tokens at its end
    origin: int


@dataclass(slots=True)
class Contents:
    """What was written to one group: behind the beginning of which prompt, and at which (plane, offset)."""

    prompt: np.ndarray
    is_written: np.ndarray  # [planes, block_size] bool


@dataclass(slots=True)
class Slots:
    """All slots of one run over groups of `planes` blocks of `block_size` tokens."""

    planes: int
    block_size: int
    taken: dict[int, Slot] = field(default_factory=dict)
    _contents: dict[int, Contents] = field(default_factory=dict)
    _swapped: dict[int, tuple[int, list[Contents | None]]] = field(default_factory=dict)

    def transfer(self, transfers: Transfers, prompts: Mapping[int, np.ndarray]) -> None:
        """Follow what is transferred; `prompts` has those of the requests that are let in.

        Raises `AuditError` when a request is given a prefix that is not its own.
        """
        for request_id in transfers.released:
            self.taken.pop(request_id, None)
            self._swapped.pop(request_id, None)
        for item in transfers.preemptions:
            slot = self.taken.pop(item.request_id)
            if item.is_swapped:
                self._swapped[item.request_id] = (
                    slot.origin,
                    [self._contents.get(group) for group in item.block_groups],
                )
        for allocation in transfers.allocations:
            self._seat(allocation, prompts[allocation.request_id])
        for growth in transfers.growths:
            self.taken[growth.request_id].block_groups += growth.block_groups
            self._empty(growth.block_groups)

    def _seat(self, allocation: Allocation, prompt: np.ndarray) -> None:
        request_id, groups, num_reused = (
            allocation.request_id,
            allocation.block_groups,
            allocation.num_reused_groups,
        )
        for index, group in enumerate(groups[:num_reused]):
            self._check_prefix(request_id, index, group, prompt)
        self._empty(groups[num_reused:])
        origin, brought = self._swapped.pop(request_id, (num_reused * self.block_size, []))
        self._contents.update(
            {group: item for group, item in zip(groups, brought, strict=False) if item is not None}
        )
        self.taken[request_id] = Slot(allocation.ring_id, groups, prompt, origin)

    def _empty(self, groups: tuple[int, ...]) -> None:
        for group in groups:
            self._contents.pop(group, None)

    def _check_prefix(self, request_id: int, index: int, group: int, prompt: np.ndarray) -> None:
        end = (index + 1) * self.block_size
        contents = self._contents.get(group)
        what = (
            f"request {request_id} is to reuse group {group} for its tokens {end - self.block_size} to "
            f"{end - 1}"
        )
        if contents is None or not contents.is_written.all():
            raise AuditError(f"{what}, which holds no complete block")
        if not np.array_equal(contents.prompt[:end], prompt[:end]):
            raise AuditError(f"{what}, which was computed behind other tokens")

    def wrote(self, request_id: int, position: int, first_plane: int, num_planes: int) -> None:
        """A prompt row of the request has been given the slots of so many planes from `first_plane` on."""
        slot = self.taken[request_id]
        group = slot.block_groups[position // self.block_size]
        contents = self._contents.get(group)
        if contents is None:
            contents = self._contents[group] = Contents(
                slot.prompt, np.zeros((self.planes, self.block_size), dtype=bool)
            )
        contents.is_written[first_plane : first_plane + num_planes, position % self.block_size] = True
