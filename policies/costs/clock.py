"""Predicted clocks of host and device: when batches that follow one another begin and end, as both worlds run
them."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from policies.core.seam.batch import ExecutionBatch
from policies.costs.latency import LatencyModel, Prediction


class Step(NamedTuple):
    """A batch as the clocks feel it, everything already taken longer: the host chooses and packs it, launches
    it, an idle device waits for that, and it runs."""

    busy_ns: float
    launch_ns: float
    idle_ns: float
    device_ns: float

    @classmethod
    def of(cls, prediction: Prediction, factor: float) -> "Step":
        busy_ns = factor * (prediction.select_ns + prediction.prepare_ns)
        return cls(busy_ns, factor * prediction.launch_ns, prediction.idle_ns, factor * prediction.device_ns)


class Clock:
    """Ends of batches under one rule: the host chooses, packs and launches a batch once it is free and the
    batch `inflight` before has been collected, and the device runs what is packed, one after another.

    Everything takes `factor` times as long as predicted.
    """

    __slots__ = ("device_ns", "ends_ns", "factor", "host_ns", "inflight", "loop")

    def __init__(self, latency: LatencyModel, inflight: int, factor: float, device_free_ns: int) -> None:
        self.loop = latency.loop
        self.inflight = inflight
        self.factor = factor
        self.host_ns = 0.0
        self.device_ns: float = device_free_ns
        self.ends_ns: deque[float] = deque()

    def fork(self) -> "Clock":
        """The same clock, to be run ahead on its own."""
        other = Clock.__new__(Clock)
        other.loop, other.inflight, other.factor = self.loop, self.inflight, self.factor
        other.host_ns, other.device_ns, other.ends_ns = self.host_ns, self.device_ns, self.ends_ns.copy()
        return other

    def catch_up(
        self, batches: Iterable[ExecutionBatch], times: Callable[[ExecutionBatch], Prediction], now_ns: int
    ) -> list[float]:
        """Run what is in flight; return its ends. At `now_ns` the host chooses the next batch."""
        loop, ends_ns = self.loop, []
        for batch in batches:
            self.host_ns = batch.formed_ns + max(loop.after_collect_ns, loop.after_submit_ns)
            step = Step.of(times(batch), self.factor)
            ends_ns.append(self._run(step, step.device_ns))
        self.host_ns = now_ns + max(loop.after_collect_ns, loop.after_submit_ns)
        return ends_ns

    def run(self, step: Step, device_ns: float) -> float:
        """The end of one more batch, whose host times are those of `step`."""
        if len(self.ends_ns) >= self.inflight:
            free_ns = max(self.host_ns, self.ends_ns.popleft())
            self.host_ns = free_ns + self.loop.collect_ns + self.loop.after_collect_ns
        return self._run(step, device_ns)

    def _run(self, step: Step, device_ns: float) -> float:
        loop = self.loop
        busy_ns, launch_ns, idle_ns, _ = step
        packed_ns = self.host_ns + busy_ns
        ready_ns = packed_ns + loop.mark_ns
        free_ns = self.device_ns + loop.device_gap_ns
        started_ns = ready_ns if ready_ns > free_ns else free_ns
        self.device_ns = end_ns = started_ns + device_ns
        late_ns = ready_ns + idle_ns - started_ns
        if late_ns > 0:
            self.device_ns = end_ns = end_ns + min(late_ns, idle_ns)
        self.ends_ns.append(end_ns)
        self.host_ns = packed_ns + launch_ns + loop.after_submit_ns
        return end_ns
