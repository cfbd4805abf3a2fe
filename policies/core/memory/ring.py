"""The hidden-ring ledger: rings of `slots_per_ring` chunk slots, one ring for every request that may run at
once."""

from policies.core.errors import InvariantError


class RingLedger:
    """Which ring belongs to whom and how many of its slots hold a resident chunk. free + used = total,
    always."""

    def __init__(self, num_rings: int, slots_per_ring: int) -> None:
        self.slots_per_ring = slots_per_ring
        self.num_rings = num_rings
        self._free_rings = list(range(num_rings - 1, -1, -1))
        self._used_slots: dict[int, int] = {}
        self.used_slots = 0

    @property
    def total_slots(self) -> int:
        return self.num_rings * self.slots_per_ring

    @property
    def free_slots(self) -> int:
        return self.total_slots - self.used_slots

    def allocate(self) -> int:
        """Take a ring for a newly admitted request."""
        ring_id = self._free_rings.pop()
        self._used_slots[ring_id] = 0
        return ring_id

    def set_used(self, ring_id: int, slots: int) -> None:
        """Record that `slots` chunks are resident in `ring_id`.

        Raises `InvariantError` beyond the ring's size.
        """
        if slots > self.slots_per_ring:
            raise InvariantError(
                f"invariant 3: {slots} chunks resident in ring {ring_id}, it has {self.slots_per_ring} slots"
            )
        self.used_slots += slots - self._used_slots[ring_id]
        self._used_slots[ring_id] = slots

    def release(self, ring_id: int) -> None:
        self.used_slots -= self._used_slots.pop(ring_id)
        self._free_rings.append(ring_id)

    def check_integrity(self) -> None:
        """Raise `InvariantError` unless rings and slots add up."""
        if len(self._free_rings) + len(self._used_slots) != self.num_rings:
            raise InvariantError(
                f"invariant 4: {len(self._free_rings)} free + {len(self._used_slots)} used rings != "
                f"{self.num_rings} in all"
            )
        if sum(self._used_slots.values()) != self.used_slots:
            raise InvariantError(
                f"invariant 4: {sum(self._used_slots.values())} slots in rings, {self.used_slots} counted"
            )
