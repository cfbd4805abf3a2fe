"""A SimPy environment on the wall clock: nothing happens before its time, and clients may speak at any time.

Simulated time is integer nanoseconds since the environment was made. A simulation that is slower than the
clock runs behind it; what a client says then comes when the simulation gets there.
"""

import time
from collections.abc import Callable

import simpy
from simpy.core import Infinity

from policies.core.seam.inbox import Mailbox

LONGEST_WAIT_S = 0.05
"""A waiting environment looks up this often, so that a signal need not wait."""


class PacedEnvironment(simpy.Environment):
    """`look()` reads what clients have said and answers whether there is mail for `inbox`'s engine; `wait(s)`
    sleeps until they may have, at most `s` seconds. Once `is_stopped` it waits for nothing."""

    def __init__(
        self,
        inbox: Mailbox,
        look: Callable[[], bool],
        wait: Callable[[float], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._inbox, self._look, self._wait, self._is_stopped = inbox, look, wait, is_stopped
        self._has_woken = False
        """Mail that is here has woken the engine; an engine that was busy asks for it by itself."""
        self._start_ns = time.perf_counter_ns()

    def clock_ns(self) -> int:
        """The wall clock's time since the start."""
        return time.perf_counter_ns() - self._start_ns

    def step(self) -> None:
        """Sleep until the next event is due, or until mail comes: then the engine is woken first."""
        while not self._is_stopped():
            has_mail = self._look()
            if has_mail and not self._has_woken:
                self._wake()
            self._has_woken = has_mail
            due_ns = self.peek()
            left_ns = due_ns - self.clock_ns()
            if left_ns <= 0:
                break
            longest_ns = LONGEST_WAIT_S * 1e9
            self._wait(min(longest_ns if due_ns == Infinity else left_ns, longest_ns) / 1e9)
        if self.peek() == Infinity:
            self._wake()
        super().step()

    def _wake(self) -> None:
        """An event at the wall's time, or at once where the simulation has run ahead, that ends the engine's
        wait; not later than the next one."""
        at_ns = min(max(self.clock_ns(), int(self.now)), self.peek())
        event = self.timeout(int(at_ns) - int(self.now))
        event.callbacks.append(lambda _: self._inbox.on_post())
