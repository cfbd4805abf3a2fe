"""What a latency model must answer, and the choice of one by name.

A model predicts, for one batch, the device time by component, the physical limit, and the host time around it. Every answer can be
traced: `provenance` says what the numbers come from and which of them are assumptions.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from policies.core.batch import ExecutionBatch
from policies.core.events import COMPONENTS
from policies.core.limit import DeviceFacts
from policies.core.model import ModelShape


class Prediction(NamedTuple):
    """Predicted times of one batch, nanoseconds.

    `components_ns` follows `policies.core.events.COMPONENTS`; their sum is the device time. `select_ns` is choosing the batch,
    `host_ns` preparing and launching it; the host is busy for both before the device may start.
    """

    components_ns: tuple[int, ...]
    limit_ns: int
    select_ns: int
    host_ns: int

    @property
    def device_ns(self) -> int:
        return sum(self.components_ns)

    def breakdown(self) -> dict[str, int]:
        """Component name to nanoseconds, host times and limit included."""
        named = dict(zip(COMPONENTS, self.components_ns, strict=True))
        return {**named, "select": self.select_ns, "host": self.host_ns, "limit": self.limit_ns}


class LatencyModel(ABC):
    """Durations of batches of `model` on the device that `facts` describes."""

    def __init__(self, name: str, model: ModelShape, facts: DeviceFacts, provenance: str, collect_ns: int) -> None:
        self.name = name
        self.model = model
        self.facts = facts
        self.provenance = provenance
        self.collect_ns = collect_ns
        """From the end of a batch on the device until a waiting host knows of it."""

    @abstractmethod
    def predict(self, batch: ExecutionBatch) -> Prediction:
        """The times of `batch`; deterministic."""
