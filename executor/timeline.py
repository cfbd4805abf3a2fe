"""When a batch ran on the device, in nanoseconds of the run's clock.

On CUDA by device events, on a CPU by the host's clock; both answer the same questions, and the runner asks no other.
"""

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the device's order of work."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


class Timeline(Protocol):
    """Makes marks and says when the device passed them."""

    def now_ns(self) -> int:
        """The run's clock: nanoseconds since the timeline was made."""
        ...

    def mark(self) -> Mark: ...

    def time_of(self, mark: Mark) -> int:
        """When the device passed `mark`; only for marks that `query` answers True, in the order they were made."""
        ...


class HostMark:
    """Work on a CPU is done when its call returns."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def query(self) -> bool:
        return True


class HostTimeline:
    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def mark(self) -> HostMark:
        return HostMark(self.now_ns())

    def time_of(self, mark: Mark) -> int:
        assert isinstance(mark, HostMark)
        return mark.now_ns


REBASE_NS = 1_000_000_000
"""Event differences come as float32 milliseconds, exact to 60 ns over one second; a longer stretch starts from a newer event."""


class CudaTimeline:
    """Device events related to the host's clock once, at the start, by an event recorded on an idle device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._start_ns = time.perf_counter_ns()
        self._base_ns = 0

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time_of(self, mark: Mark) -> int:
        assert isinstance(mark, torch.cuda.Event)
        at_ns = self._base_ns + round(self._base.elapsed_time(mark) * 1e6)
        if at_ns - self._base_ns > REBASE_NS:
            self._base, self._base_ns = mark, at_ns
        return at_ns


def make_timeline(device: torch.device) -> Timeline:
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
