"""When a batch ran on the device, in nanoseconds of the run's clock.

On CUDA by device events, on a CPU by the host's clock; both answer the same questions, and the runner asks no
other.
"""

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the device's order of work. `made_ns` is when the host asked for it, on the run's clock."""

    @property
    def made_ns(self) -> int: ...

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


class Timeline(Protocol):
    """Makes marks and says when the device passed them."""

    def now_ns(self) -> int:
        """The run's clock: nanoseconds since the timeline was made."""
        ...

    def restart(self, start_ns: int | None = None) -> int:
        """Count from `start_ns` of the host's clock, or from now; return that. Before any mark is made."""
        ...

    def mark(self) -> Mark: ...

    def time_of(self, mark: Mark) -> int:
        """When the device passed `mark`: once for each mark, only when it has been passed, in the order they
        were made."""
        ...


class HostMark:
    """Work on a CPU is done when its call returns."""

    def __init__(self, now_ns: int) -> None:
        self.made_ns = now_ns

    def query(self) -> bool:
        return True


class HostTimeline:
    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def restart(self, start_ns: int | None = None) -> int:
        self._start_ns = time.perf_counter_ns() if start_ns is None else start_ns
        return self._start_ns

    def mark(self) -> HostMark:
        return HostMark(self.now_ns())

    def time_of(self, mark: Mark) -> int:
        assert isinstance(mark, HostMark)
        return mark.made_ns


REBASE_NS = 1_000_000_000
"""Event differences come as float32 milliseconds, exact to 60 ns over one second; a longer stretch starts
from a newer event."""


class CudaMark:
    """A device event, and the latest time of the host's clock at which the device was known not to have
    passed it."""

    __slots__ = ("_clock", "event", "made_ns", "not_passed_ns")

    def __init__(self, event: torch.cuda.Event, clock: "CudaTimeline") -> None:
        self.event = event
        self._clock = clock
        self.made_ns = self.not_passed_ns = clock.now_ns()
        event.record()

    def query(self) -> bool:
        asked_ns = self._clock.now_ns()
        if self.event.query():
            return True
        self.not_passed_ns = asked_ns
        return False


class CudaTimeline:
    """Device events on the host's clock.

    They are related once, at the start, by an event recorded on an idle device. The device's clock runs at a
    rate of its own (20 parts in a million are a batch's length after one minute), so every time read is held
    between what the host knows: after the last moment at which the event had not been passed, and before now.
    A correction stays for all later times.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._spare: list[torch.cuda.Event] = []
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._start_ns = time.perf_counter_ns()
        self._base_ns = 0

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def restart(self, start_ns: int | None = None) -> int:
        start_ns = time.perf_counter_ns() if start_ns is None else start_ns
        self._base_ns += self._start_ns - start_ns
        self._start_ns = start_ns
        return start_ns

    def mark(self) -> CudaMark:
        return CudaMark(self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True), self)

    def time_of(self, mark: Mark) -> int:
        """When the device passed `mark`, which must not be used again: its event becomes another mark's."""
        assert isinstance(mark, CudaMark)
        read_ns = self._base_ns + round(self._base.elapsed_time(mark.event) * 1e6)
        at_ns = min(max(read_ns, mark.not_passed_ns), self.now_ns())
        self._base_ns += at_ns - read_ns
        free = mark.event
        if at_ns - self._base_ns > REBASE_NS:
            free, self._base, self._base_ns = self._base, mark.event, at_ns
        self._spare.append(free)
        return at_ns


def make_timeline(device: torch.device) -> Timeline:
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
