"""An engine's inbox: mail that waits for its time, and the world's ear for what ends.

The engine owns no list of the future: what is yet to come lies with the world behind this interface.
"""

import heapq
from collections.abc import Callable
from typing import Protocol

from policies.core.seam.events import Arrival, HangUp, Mail
from policies.core.seam.request import Request, Status


class Inbox(Protocol):
    """Where an engine takes its mail from. Whoever stands behind it is told of every end."""

    @property
    def is_open(self) -> bool:
        """Whether others may post while the engine runs, so that more may come at any time from now on."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether no more will come, ever: only then can a request that waits be stuck."""
        ...

    def pop(self, now_ns: int) -> Mail | None:
        """Remove and return the next mail that is due at `now_ns`, in the order of
        `policies.core.seam.events`."""
        ...

    def next_ns(self) -> int | None:
        """When the next mail that is known is due; None when none is."""
        ...

    @property
    def is_foreseen(self) -> bool:
        """Whether `quiet_until_ns` may be asked: whoever posts can say that they will not for a while."""
        ...

    def quiet_until_ns(self) -> int | None:
        """No mail comes before then, whatever the engine's requests do but end; None: never."""
        ...

    def ended(self, request: Request, status: Status, known_ns: int) -> None:
        """A request has come to its end, and the engine knows at `known_ns`: nothing more of it is of
        interest."""
        ...


Listener = Callable[[Request, Status, int], None]
"""Is told of the end of a request: the request, how it ended, and when its engine knew."""


class Mailbox:
    """An open inbox: anybody posts, while the engine runs too. `on_end` hears of ends.

    A world that can wait sets `on_post`, which is called after every post and when the box is closed.
    `foresees` says until when nobody will post (None: for ever), where they know.
    """

    is_open = True

    def __init__(
        self,
        on_end: Listener = lambda request, status, known_ns: None,
        foresees: Callable[[], int | None] | None = None,
    ) -> None:
        self.on_post: Callable[[], None] = lambda: None
        self._on_end = on_end
        self._foresees = foresees
        self._heap: list[tuple[int, int, int, int, Mail]] = []
        self._live: set[int] = set()
        self._num_posted = 0
        self._is_closed = False

    def post(self, mail: Mail) -> None:
        """Put `mail` in; it is taken out when its time has come. Raises `ValueError` once the box is
        closed."""
        if self._is_closed:
            raise ValueError(
                f"{mail} is posted to a mailbox that was closed; expected close() after the last mail"
            )
        if isinstance(mail, Arrival):
            self._live.add(mail.request.request_id)
            key = (mail.at_ns, 0, mail.request.arrival_ns, mail.request.request_id)
        elif isinstance(mail, HangUp):
            key = (mail.at_ns, 1, 0, mail.request_id)
        else:
            key = (mail.at_ns, 2, self._num_posted, mail.request_id)
        self._num_posted += 1
        heapq.heappush(self._heap, (*key, mail))
        self.on_post()

    def close(self) -> None:
        """No more will come."""
        self._is_closed = True
        self.on_post()

    @property
    def is_exhausted(self) -> bool:
        return self._is_closed and self.next_ns() is None

    def pop(self, now_ns: int) -> Mail | None:
        next_ns = self.next_ns()
        return heapq.heappop(self._heap)[-1] if next_ns is not None and next_ns <= now_ns else None

    def next_ns(self) -> int | None:
        """What comes for requests that have ended is dropped here, so that nobody waits for it."""
        heap = self._heap
        while heap and not isinstance(mail := heap[0][-1], Arrival) and mail.request_id not in self._live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    @property
    def is_foreseen(self) -> bool:
        return self._foresees is not None

    def quiet_until_ns(self) -> int | None:
        posted_ns, foreseen_ns = self.next_ns(), self._foresees() if self._foresees else 0
        if posted_ns is None or foreseen_ns is None:
            return foreseen_ns if posted_ns is None else posted_ns
        return min(posted_ns, foreseen_ns)

    def ended(self, request: Request, status: Status, known_ns: int) -> None:
        self._live.discard(request.request_id)
        self._on_end(request, status, known_ns)
