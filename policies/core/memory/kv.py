"""The KV block ledger: which block groups are free, who holds the others, and which keep a prefix that a
later prompt may reuse.

A *group* is one block in every depth plane (LAST_EXITED has one plane per depth). Groups are the unit of
allocation because all planes of a token range live and die together; totals are reported in blocks. Numbers
only; the memory is the executor's.

A group with complete prompt tokens can be *published* under a key that stands for these tokens and all before
them. Whoever asks for the same key later holds the same group. A published group that nobody holds counts as
free, and gives up its contents when no other group is left, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from policies.core.errors import InputError, InvariantError


class BlockLedger:
    """`num_blocks` blocks of `block_size` tokens, `planes` blocks to a group; a remainder below one group is
    never used.

    free + used = total holds after every call and is checked by `check_integrity`.
    """

    def __init__(self, num_blocks: int, block_size: int, planes: int) -> None:
        self.block_size = block_size
        self.planes = planes
        self.num_groups = num_blocks // planes
        if self.num_groups == 0:
            raise InputError(
                f"cache.num_blocks: {num_blocks} is less than one block in each of the {planes} depth planes"
            )
        self.peak_used_groups = 0
        self.num_references = 0
        """Groups counted once for every request that holds them."""
        self.num_evicted_groups = 0
        self._empty = list(range(self.num_groups - 1, -1, -1))
        self._held: dict[int, list[int]] = {}
        self._references = [0] * self.num_groups
        self._group_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def total_blocks(self) -> int:
        return self.num_groups * self.planes

    @property
    def free_groups(self) -> int:
        return len(self._empty) + len(self._evictable)

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

    def references(self, group: int) -> int:
        """How many requests hold `group`."""
        return self._references[group]

    def published(self, keys: Sequence[bytes]) -> list[int]:
        """The groups of the leading `keys` that are published, in order: what a request with these keys could
        reuse."""
        found = []
        for key in keys:
            group = self._group_of.get(key)
            if group is None:
                break
            found.append(group)
        return found

    def allocate(self, request_id: int, num_positions: int, reused: Sequence[int] = ()) -> tuple[int, ...]:
        """Give `request_id` what it lacks to hold `num_positions` tokens; return the groups it got, in token
        order.

        A new request begins with the `reused` published groups.
        """
        held = self._held.setdefault(request_id, [])
        first = len(held)
        for group in reused:
            if self._references[group] == 0:
                del self._evictable[group]
            self._references[group] += 1
            held.append(group)
        count = self.groups_for(num_positions) - len(held)
        assert 0 <= count <= self.free_groups, (request_id, count, self.free_groups)
        for _ in range(count):
            group = self._empty.pop() if self._empty else self._evict()
            self._references[group] = 1
            held.append(group)
        self.num_references += len(held) - first
        self.peak_used_groups = max(self.peak_used_groups, self.num_groups - self.free_groups)
        return tuple(held[first:])

    def publish(self, group: int, key: bytes) -> bool:
        """Let others find a held group under `key`; False when another group has that key already."""
        if key in self._group_of:
            return False
        self._group_of[key] = group
        self._key_of[group] = key
        return True

    def release(self, request_id: int) -> None:
        """Take back all groups of `request_id`; the last returned are the first to be given out again.

        Published ones that nobody else holds stay to be found; of one request the last are evicted first,
        because a prefix without its beginning is of no use.
        """
        groups = self._held.pop(request_id)
        self.num_references -= len(groups)
        for group in reversed(groups):
            self._references[group] -= 1
            if self._references[group] == 0:
                if group in self._key_of:
                    self._evictable[group] = None
                else:
                    self._empty.append(group)

    def _evict(self) -> int:
        group, _ = self._evictable.popitem(last=False)
        del self._group_of[self._key_of.pop(group)]
        self.num_evicted_groups += 1
        return group

    def check_integrity(self) -> None:
        """Raise `InvariantError` unless every group is empty, evictable or held, and held as often as is
        counted."""
        held = [group for groups in self._held.values() for group in groups]
        in_use = set(held)
        if (
            len(in_use) + self.free_groups != self.num_groups
            or len(in_use.union(self._empty, self._evictable)) != self.num_groups
        ):
            raise InvariantError(
                f"invariant 4: {self.free_groups} free + {len(in_use)} used groups != {self.num_groups} in "
                "all"
            )
        if len(held) != self.num_references or sum(self._references) != self.num_references:
            raise InvariantError(
                f"invariant 4: groups are held {len(held)} times, {sum(self._references)} by group, "
                f"{self.num_references} counted"
            )
