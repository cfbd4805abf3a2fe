"""What a person sees while a run goes on: requests done, time, and nothing that costs the run time."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from executor.runner import Launched
from policies.core.seam.batch import ExecutionBatch

REFRESH_S = 1.0
"""Redrawing takes about a millisecond of the host, so it is rare and never from a thread of its own."""


class RunProgress:
    """A progress bar on stderr over `num_requests` requests; silent when stderr is not a terminal."""

    def __init__(self, num_requests: int, label: str) -> None:
        columns = (
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._is_shown = sys.stderr.isatty()
        self._progress = Progress(
            *columns, console=Console(stderr=True), auto_refresh=False, disable=not self._is_shown
        )
        self._task = self._progress.add_task(label, total=num_requests)
        self._num_done = 0
        self._drawn_s = 0.0

    def __enter__(self) -> "RunProgress":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.update(self._task, completed=self._num_done)
        self._progress.stop()

    def launching(self, batch: ExecutionBatch) -> None:
        """Nothing to show."""

    def collected(self, batch: ExecutionBatch, launched: Launched, stops: frozenset[int]) -> None:
        """Count the requests that `batch` ended; redraw once a second."""
        if not stops:
            return
        self._num_done += len(stops)
        now_s = time.monotonic()
        if self._is_shown and now_s - self._drawn_s >= REFRESH_S:
            self._drawn_s = now_s
            self._progress.update(self._task, completed=self._num_done, refresh=True)
