"""The KV block ledger: which block groups are free and who holds the rest. Numbers only; the memory is the executor's.

A *group* is one block in every depth plane (LAST_EXITED has one plane per depth). Groups are the unit of allocation because
all planes of a token range live and die together; totals are reported in blocks.
"""

from policies.core.errors import InputError, InvariantError


class BlockLedger:
    """`num_blocks` blocks of `block_size` tokens, `planes` blocks to a group; a remainder below one group is never used.

    free + used = total holds after every call and is checked by `check_integrity`.
    """

    def __init__(self, num_blocks: int, block_size: int, planes: int) -> None:
        self.block_size = block_size
        self.planes = planes
        self.num_groups = num_blocks // planes
        if self.num_groups == 0:
            raise InputError(f"cache.num_blocks: {num_blocks} is less than one block in each of the {planes} depth planes")
        self._free = list(range(self.num_groups - 1, -1, -1))
        self._held: dict[int, list[int]] = {}
        self.peak_used_groups = 0

    @property
    def total_blocks(self) -> int:
        return self.num_groups * self.planes

    @property
    def free_groups(self) -> int:
        return len(self._free)

    @property
    def free_blocks(self) -> int:
        return self.free_groups * self.planes

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks

    @property
    def peak_used_blocks(self) -> int:
        return self.peak_used_groups * self.planes

    def groups_for(self, num_positions: int) -> int:
        """Groups that hold `num_positions` tokens. 8,064 positions at block size 16: 504."""
        return -(-num_positions // self.block_size)

    def can_ever_hold(self, num_positions: int) -> bool:
        return self.groups_for(num_positions) <= self.num_groups

    def allocate(self, request_id: int, num_positions: int) -> tuple[int, ...]:
        """Give `request_id` what it lacks to hold `num_positions` tokens; return the new groups, in token order."""
        held = self._held.setdefault(request_id, [])
        count = self.groups_for(num_positions) - len(held)
        assert 0 <= count <= len(self._free), (request_id, count, len(self._free))
        groups = tuple(reversed(self._free[len(self._free) - count :]))
        del self._free[len(self._free) - count :]
        held.extend(groups)
        self.peak_used_groups = max(self.peak_used_groups, self.num_groups - len(self._free))
        return groups

    def release(self, request_id: int) -> None:
        """Return all groups of `request_id`; the last returned are the first to be given out again."""
        self._free.extend(reversed(self._held.pop(request_id)))

    def check_integrity(self) -> None:
        """Raise `InvariantError` unless every group is free or held, exactly once."""
        held = [group for groups in self._held.values() for group in groups]
        if len(held) + len(self._free) != self.num_groups or len(set(held) | set(self._free)) != self.num_groups:
            raise InvariantError(f"invariant 4: {len(self._free)} free + {len(held)} used groups != {self.num_groups} in all")
