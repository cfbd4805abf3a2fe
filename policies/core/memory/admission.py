"""The waiting queue: who is let in next, who may overtake whom.

Requests wait in a heap under a total order; a scan looks at the first few only, so its cost does not grow
with the queue. A request that does not fit may be overtaken, at most `max_bypasses` times; then it blocks
everyone behind it until it fits.
"""

import heapq
from collections.abc import Callable

from policies.core.seam.request import Request

Rank = tuple[int, int, int, int]
"""Where a request stands in the total order in which all are let in and served; the last in it is preempted
first. It never changes: (priority, 0 unless that counts; what the policy says; arrival; id)."""


def ranking(by_priority: bool, admission_rank: Callable[[Request], int]) -> Callable[[Request], Rank]:
    """The order of a run whose policy ranks requests by `admission_rank`."""

    def rank_of(request: Request) -> Rank:
        priority = request.priority if by_priority else 0
        return (priority, admission_rank(request), request.arrival_ns, request.request_id)

    return rank_of


class AdmissionQueue:
    """Waiting requests in the order of `rank_of`."""

    def __init__(self, rank_of: Callable[[Request], Rank], scan_limit: int, max_bypasses: int) -> None:
        self._rank_of = rank_of
        self._scan_limit = scan_limit
        self._max_bypasses = max_bypasses
        self._heap: list[tuple[Rank, Request]] = []
        self._bypasses: dict[int, int] = {}
        self._withdrawn: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._withdrawn)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._rank_of(request), request))

    def withdraw(self, request_id: int) -> None:
        """Take a waiting request out of the queue; its entry goes when it comes to the head."""
        self._withdrawn.add(request_id)
        self._bypasses.pop(request_id, None)

    def head(self) -> Request | None:
        """The first request that still waits."""
        while self._heap and self._heap[0][1].request_id in self._withdrawn:
            self._withdrawn.discard(heapq.heappop(self._heap)[1].request_id)
        return self._heap[0][1] if self._heap else None

    def pop_admissible(self, fits: Callable[[Request], bool]) -> Request | None:
        """Remove and return the first request that fits and may go, or None.

        Scans at most `scan_limit` entries. Every entry before the one returned is bypassed once; an entry
        bypassed `max_bypasses` times ends the scan. With a limit of 2 and a head that never fits, the third
        request behind it waits.
        """
        overtaken: list[tuple[Rank, Request]] = []
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
                request_id = entry[1].request_id
                self._bypasses[request_id] = self._bypasses.get(request_id, 0) + 1
        if chosen is not None:
            self._bypasses.pop(chosen.request_id, None)
        return chosen
