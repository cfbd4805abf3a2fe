"""Ctrl-C, and what a scheduler of jobs sends instead, between two steps of a run and not in the middle of
one, so that what is written down is whole."""

import signal
import threading
from types import FrameType, TracebackType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""A terminal's Ctrl-C, a scheduler's end of time, a connection that was lost."""


def raise_on_signals() -> None:
    """Let all of `SIGNALS` raise `KeyboardInterrupt`, as Ctrl-C does. Those that are ignored stay so
    (`nohup`)."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)


class CtrlC:
    """While entered, the first of `SIGNALS` only sets `is_pressed`; the next one interrupts at once.

    Signals reach the main thread only: entered elsewhere this changes nothing, nor for one that is ignored.
    """

    def __init__(self) -> None:
        self.is_pressed = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "CtrlC":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                previous = signal.getsignal(number)
                if previous not in (signal.SIG_IGN, None):
                    self._previous[number] = previous
                    signal.signal(number, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.is_pressed = True
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
