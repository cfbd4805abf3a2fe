"""The waiting queue: who is let in next, who may overtake whom.

Requests wait in a heap under a total order; a scan looks at the first few only, so its cost does not grow
with the queue. A request that does not fit may be overtaken, at most `max_bypasses` times; then it blocks
everyone behind it until it fits.
"""

import heapq
from collections.abc import Callable

from policies.core.seam.request import Request


class AdmissionQueue:
    """Waiting requests in order of (arrival, id), or (priority, arrival, id) under priority admission."""

    def __init__(self, order: str, scan_limit: int, max_bypasses: int) -> None:
        self._by_priority = order == "priority"
        self._scan_limit = scan_limit
        self._max_bypasses = max_bypasses
        self._heap: list[tuple[int, int, int, Request]] = []
        self._bypasses: dict[int, int] = {}
        self._withdrawn: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._withdrawn)

    def push(self, request: Request) -> None:
        rank = request.priority if self._by_priority else 0
        heapq.heappush(self._heap, (rank, request.arrival_ns, request.request_id, request))

    def withdraw(self, request_id: int) -> None:
        """Take a waiting request out of the queue; its entry goes when it comes to the head."""
        self._withdrawn.add(request_id)
        self._bypasses.pop(request_id, None)

    def head(self) -> Request | None:
        """The first request that still waits."""
        while self._heap and self._heap[0][2] in self._withdrawn:
            self._withdrawn.discard(heapq.heappop(self._heap)[2])
        return self._heap[0][3] if self._heap else None

    def pop_admissible(self, fits: Callable[[Request], bool]) -> Request | None:
        """Remove and return the first request that fits and may go, or None.

        Scans at most `scan_limit` entries. Every entry before the one returned is bypassed once; an entry
        bypassed `max_bypasses` times ends the scan. With a limit of 2 and a head that never fits, the third
        request behind it waits.
        """
        overtaken: list[tuple[int, int, int, Request]] = []
        chosen = None
        while len(overtaken) < self._scan_limit and (request := self.head()) is not None:
            if fits(request):
                heapq.heappop(self._heap)
                chosen = request
                break
            if self._bypasses.get(request.request_id, 0) >= self._max_bypasses:
                break
            overtaken.append(heapq.heappop(self._heap))
        for entry in overtaken:
            heapq.heappush(self._heap, entry)
            if chosen is not None:
                self._bypasses[entry[2]] = self._bypasses.get(entry[2], 0) + 1
        if chosen is not None:
            self._bypasses.pop(chosen.request_id, None)
        return chosen
