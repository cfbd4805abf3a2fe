"""Who arrives when: an open loop from recorded times, or a closed loop that waits for earlier requests to
end.

Holds requests in arrival order and hands them out as time passes; reads no clock.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from policies.core.errors import InputError
from policies.core.seam.request import Request


class Arrivals:
    """Requests in order of (arrival_ns, request_id), optionally at most `concurrency` of them outstanding.

    With `concurrency` a request arrives at its own time or when an earlier one ends, whichever is later:
    concurrency 1 with all times 0 is a serial client; concurrency 4 at two a second is an open stream with a
    cap.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise InputError(f"workload concurrency: {concurrency}, expected at least 1")
        self._source: Iterator[Request] = iter(requests)
        self._next = next(self._source, None)
        self._free_since_ns = None if concurrency is None else deque([0] * concurrency)
        self._latest_end_ns = 0
        self._last_order = (-1, -1)

    def next_ns(self) -> int | None:
        """When the next request arrives if nothing ends before; None when that needs an end, or none is
        left."""
        if self._next is None:
            return None
        if self._free_since_ns is None:
            return self._next.arrival_ns
        return max(self._next.arrival_ns, self._free_since_ns[0]) if self._free_since_ns else None

    @property
    def is_exhausted(self) -> bool:
        return self._next is None

    def pop(self, now_ns: int) -> Request | None:
        """Remove and return the next request that has arrived by `now_ns`, with the arrival time it really
        had, or None."""
        arrival_ns = self.next_ns()
        if arrival_ns is None or arrival_ns > now_ns:
            return None
        request = self._next
        assert request is not None
        order = (request.arrival_ns, request.request_id)
        if order <= self._last_order or request.arrival_ns < 0:
            raise InputError(
                f"request {request.request_id} arrives at {request.arrival_ns} ns, expected order after "
                f"{self._last_order}"
            )
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise InputError(
                f"request {request.request_id} has {request.prompt_tokens} prompt tokens and max_tokens "
                f"{request.max_tokens}, expected at least 1 of each"
            )
        self._last_order = order
        self._next = next(self._source, None)
        if self._free_since_ns is not None:
            self._free_since_ns.popleft()
        return request if arrival_ns == request.arrival_ns else replace(request, arrival_ns=arrival_ns)

    def ended(self, now_ns: int) -> None:
        """A request has ended; under a closed loop its place is free from `now_ns` on, or from the latest end
        before."""
        if self._free_since_ns is not None:
            self._latest_end_ns = max(self._latest_end_ns, now_ns)
            self._free_since_ns.append(self._latest_end_ns)
