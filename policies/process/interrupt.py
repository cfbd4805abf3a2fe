"""Ctrl-C between two steps of a run instead of in the middle of one, so that what is written down is
whole."""

import signal
import threading
from types import FrameType, TracebackType


class CtrlC:
    """While entered, the first Ctrl-C only sets `is_pressed`; the next one interrupts at once.

    Signals reach the main thread only: entered elsewhere, or where SIGINT is ignored, this changes nothing.
    """

    def __init__(self) -> None:
        self.is_pressed = False
        self._is_installed = False

    def __enter__(self) -> "CtrlC":
        self._previous = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._previous not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, self._press)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.is_pressed = True
        self._restore()

    def _restore(self) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, self._previous)
            self._is_installed = False
