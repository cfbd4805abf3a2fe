"""What a person sees while simulations go on: plain lines on stderr, at intervals, in a terminal or not."""

import sys
import time

INTERVAL_S = 10.0


class Progress:
    """Counts what has ended; says `1,200 of 5,000 requests after 30 s`, every `INTERVAL_S` at most."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._done = 0
        self._started = self._said = time.monotonic()

    def count(self, total: int | None = None) -> None:
        """One more of `total` has ended; None where nobody knows how many there will be."""
        self._done += 1
        now = time.monotonic()
        if now - self._said >= INTERVAL_S:
            self._said = now
            elapsed_s = now - self._started
            of = "" if total is None else f" of {total:,}"
            print(f"{self._done:,}{of} {self._unit} after {elapsed_s:.0f} s", file=sys.stderr)
