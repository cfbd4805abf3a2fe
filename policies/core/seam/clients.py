"""The clients of a workload: when their requests arrive, by themselves or after others' ends, and when they
hang up.

An inbox whose future is known: recorded times for an open loop, ends for a closed one. Reads no clock.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from policies.core.errors import InputError
from policies.core.seam.events import Arrival, HangUp, Mail
from policies.core.seam.request import Request, Status


class Clients:
    """Requests in order of (arrival_ns, request_id), optionally at most `concurrency` of them outstanding.

    With `concurrency` a request arrives at its own time or when an earlier one ends, whichever is later:
    concurrency 1 with all times 0 is a serial client; concurrency 4 at two a second is an open stream with a
    cap. `patience_ns` says of some requests how long after their arrival the client hangs up.
    """

    is_open = False
    is_foreseen = True

    def __init__(
        self,
        requests: Iterable[Request],
        concurrency: int | None = None,
        patience_ns: Mapping[int, int] | None = None,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise InputError(f"workload concurrency: {concurrency}, expected at least 1")
        self._source: Iterator[Request] = iter(requests)
        self._next = next(self._source, None)
        self._free_since_ns = None if concurrency is None else deque([0] * concurrency)
        self._latest_end_ns = 0
        self._last_order = (-1, -1)
        self._patience_ns = patience_ns or {}
        self._hang_ups: list[HangUp] = []
        self._impatient: set[int] = set()
        """Requests that have arrived and not ended, whose clients will hang up."""

    @property
    def is_exhausted(self) -> bool:
        return self._next is None and self._next_hang_up_ns() is None

    def next_ns(self) -> int | None:
        """When the next request arrives or the next client hangs up; None when neither comes by itself."""
        arrival_ns = self._next_arrival_ns()
        if not self._hang_ups:
            return arrival_ns
        hang_up_ns = self._next_hang_up_ns()
        if arrival_ns is None or hang_up_ns is None:
            return hang_up_ns if arrival_ns is None else arrival_ns
        return min(arrival_ns, hang_up_ns)

    def quiet_until_ns(self) -> int | None:
        return self.next_ns()

    @property
    def waits_for_an_end(self) -> bool:
        """Whether an end may let the next request in earlier than `next_ns` says."""
        return self._free_since_ns is not None and self._next is not None

    def pop(self, now_ns: int) -> Mail | None:
        """The next that is due, arrivals before hang-ups at equal times; a request comes with the arrival
        time that it really had."""
        arrival_ns = self._next_arrival_ns()
        if self._hang_ups:
            hang_up_ns = self._next_hang_up_ns()
            if (
                hang_up_ns is not None
                and hang_up_ns <= now_ns
                and (arrival_ns is None or hang_up_ns < arrival_ns)
            ):
                return heapq.heappop(self._hang_ups)
        return None if arrival_ns is None or arrival_ns > now_ns else self._arrive(arrival_ns)

    def ended(self, request: Request, status: Status, known_ns: int) -> None:
        """Under a closed loop a place is free from `known_ns` on, or from the latest end before."""
        self._impatient.discard(request.request_id)
        if self._free_since_ns is not None:
            self._latest_end_ns = max(self._latest_end_ns, known_ns)
            self._free_since_ns.append(self._latest_end_ns)

    def _next_arrival_ns(self) -> int | None:
        """When the next request arrives if nothing ends before; None when that needs an end, or none is
        left."""
        if self._next is None:
            return None
        if self._free_since_ns is None:
            return self._next.arrival_ns
        return max(self._next.arrival_ns, self._free_since_ns[0]) if self._free_since_ns else None

    def _next_hang_up_ns(self) -> int | None:
        """When the next client hangs up on a request that has not ended; None when none will."""
        while self._hang_ups and self._hang_ups[0].request_id not in self._impatient:
            heapq.heappop(self._hang_ups)
        return self._hang_ups[0].at_ns if self._hang_ups else None

    def _arrive(self, arrival_ns: int) -> Arrival:
        request = self._next
        assert request is not None
        self._check_order(request)
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise InputError(
                f"request {request.request_id} has {request.prompt_tokens} prompt tokens and max_tokens "
                f"{request.max_tokens}, expected at least 1 of each"
            )
        self._next = next(self._source, None)
        if self._free_since_ns is not None:
            self._free_since_ns.popleft()
        if arrival_ns != request.arrival_ns:
            request = replace(request, arrival_ns=arrival_ns)
        patience_ns = self._patience_ns.get(request.request_id)
        if patience_ns is not None:
            self._impatient.add(request.request_id)
            heapq.heappush(self._hang_ups, HangUp(arrival_ns + patience_ns, request.request_id))
        return Arrival(arrival_ns, request)

    def _check_order(self, request: Request) -> None:
        order = (request.arrival_ns, request.request_id)
        if order <= self._last_order or request.arrival_ns < 0:
            raise InputError(
                f"request {request.request_id} arrives at {request.arrival_ns} ns, expected order after "
                f"{self._last_order}"
            )
        self._last_order = order
