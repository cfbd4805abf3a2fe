"""Device times on the host's clock: they stay within what the host knows although the device's clock runs at
another rate."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor import timeline  # noqa: E402
from executor.timeline import CudaTimeline  # noqa: E402


class World:
    """A host clock that tests move, and a device whose clock runs `rate` times as fast and passes events
    after `queue_ns`."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now_ns = 1_000_000
        self.queue_ns = 0
        self.num_events = 0

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, world: World) -> None:
        self.world = world
        self.passed_ns = 0

    def record(self) -> None:
        self.passed_ns = self.world.now_ns + self.world.queue_ns

    def synchronize(self) -> None:
        self.world.now_ns = max(self.world.now_ns, self.passed_ns)

    def query(self) -> bool:
        return self.world.now_ns >= self.passed_ns

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds of the device's clock, to float32 as the driver gives them."""
        return torch.tensor(
            (end.passed_ns - self.passed_ns) * self.world.rate / 1e6, dtype=torch.float32
        ).item()


def timeline_of(world: World, monkeypatch: pytest.MonkeyPatch) -> CudaTimeline:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", world.event)
    monkeypatch.setattr(timeline.time, "perf_counter_ns", lambda: world.now_ns)
    return CudaTimeline(torch.device("cpu"))


@pytest.mark.parametrize("rate", [1.0, 1 + 1e-4, 1 - 1e-4])
@pytest.mark.parametrize("batch_ns", [100_000, 1_300_000])
def test_times_do_not_drift_from_the_hosts_clock(
    rate: float, batch_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(rate)
    clock = timeline_of(world, monkeypatch)
    start_ns, poll_ns = world.now_ns, 1_000
    last_ns = 0
    for _ in range(20_000):
        begin = clock.mark()
        world.queue_ns = batch_ns
        end = clock.mark()
        world.queue_ns = 0
        while not end.query():
            world.now_ns += max(poll_ns, (end.event.passed_ns - world.now_ns) // 2)
        found = [(mark.event.passed_ns - start_ns, clock.time_of(mark)) for mark in (begin, end)]
        for true_ns, read_ns in found:
            assert abs(read_ns - true_ns) <= batch_ns // 10_000 + 2 * poll_ns
            assert last_ns <= read_ns <= clock.now_ns()
            last_ns = read_ns
        world.now_ns += 7_000


def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1.0)
    clock = timeline_of(world, monkeypatch)
    start_ns = world.now_ns
    for _ in range(5_000):
        marks = [clock.mark() for _ in range(4)]
        passed_ns = world.now_ns - start_ns
        world.now_ns += 1_000_000
        assert all(abs(clock.time_of(mark) - passed_ns) < 100 for mark in marks)
    assert world.num_events == 5
