"""What a latency model must answer: the device time of a batch by component, its physical limit, and the host
time around it.

Every answer can be traced: `provenance` says what the numbers come from and which of them are assumptions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from policies.core.models.shape import ModelShape
from policies.core.seam.batch import NO_TRANSFERS, ScheduledRange, Stage, Transfers, Work
from policies.core.seam.events import COMPONENTS
from policies.costs.limit import DeviceFacts


class Prediction(NamedTuple):
    """Predicted times of one batch, nanoseconds.

    `components_ns` follows `policies.core.seam.events.COMPONENTS`; their sum is the device time of a batch
    that was queued behind another. The host is busy for `select_ns` (choosing it), `prepare_ns` (packing it)
    and `launch_ns` (handing it over) in turn. On an idle device the batch begins once it is prepared, but
    waits there for its launch: `idle_ns` longer in all.
    """

    components_ns: tuple[int, ...]
    limit_ns: int
    select_ns: int
    prepare_ns: int
    launch_ns: int = 0
    idle_ns: int = 0

    @property
    def device_ns(self) -> int:
        return sum(self.components_ns)

    @property
    def host_ns(self) -> int:
        """What a batch log calls the host's time: preparing and launching."""
        return self.prepare_ns + self.launch_ns

    def slowed(self, factor: float) -> "Prediction":
        """The same on a host that takes `factor` times as long."""
        components_ns, limit_ns, select_ns, prepare_ns, launch_ns, idle_ns = self
        return Prediction(
            components_ns,
            limit_ns,
            round(factor * select_ns),
            round(factor * prepare_ns),
            round(factor * launch_ns),
            round(factor * idle_ns),
        )

    def waiting_ns(self, ready_ns: int, started_ns: int) -> int:
        """How much longer than `device_ns` a batch is on the device because its launch is late.

        It was packed and could have begun at `ready_ns`, and began at `started_ns`: at once on an idle
        device, which waits all of `idle_ns`, or after the batch before it.
        """
        late_ns = ready_ns + self.idle_ns - started_ns
        return min(late_ns, self.idle_ns) if late_ns > 0 else 0

    def components_after(self, waiting_ns: int) -> tuple[int, ...]:
        """`components_ns` of a batch that was `waiting_ns` longer on the device: waiting for its launch is
        part of `launch`."""
        if not waiting_ns:
            return self.components_ns
        *parts_ns, launch_ns = self.components_ns
        return (*parts_ns, launch_ns + waiting_ns)

    def breakdown(self) -> dict[str, int]:
        """Component name to nanoseconds, host times and limit included."""
        named = dict(zip(COMPONENTS, self.components_ns, strict=True))
        host = {
            "select": self.select_ns,
            "prepare": self.prepare_ns,
            "launching": self.launch_ns,
            "idle": self.idle_ns,
        }
        return {**named, **host, "limit": self.limit_ns}


new_prediction: Callable[[tuple[object, ...]], Prediction] = partial(tuple.__new__, Prediction)
"""A prediction of its six fields in order, which a run makes tens of thousands of."""


class Run(NamedTuple):
    """Batches that differ in their limits alone."""

    prediction: Prediction
    limits_ns: list[int]


SLEPT_NS = 1_000_000
"""A host that had nothing to do for so long was asleep, and finds its caches cold."""


@dataclass(frozen=True, slots=True)
class HostLoop:
    """Nanoseconds of the host's loop and of the device that belong to no batch.

    `device_gap_ns` from a batch's end to the start of the next, which was queued; `mark_ns` from having
    prepared a batch to its start on an idle device; `collect_ns` from a batch's end until the waiting host
    knows; `after_collect_ns` and `after_submit_ns` from then, or from having launched a batch, until the
    engine chooses the next one. `admit_ns` is what the host does for each request that a batch lets in, and
    `wake_ns` what it takes longer after it had nothing to do for SLEPT_NS. `host_spread` is how much the
    host's time for a batch varies: the standard deviation of its logarithm.
    """

    device_gap_ns: int = 0
    mark_ns: int = 0
    collect_ns: int = 0
    after_collect_ns: int = 0
    after_submit_ns: int = 0
    admit_ns: int = 0
    wake_ns: int = 0
    host_spread: float = 0.0

    def begins_ns(self, now_ns: int, free_ns: int, has_flights: bool) -> int:
        """When a host that is or was free from `free_ns` on (0: it has done nothing yet) begins what it is
        asked for at `now_ns`; one without a batch in flight may have been asleep."""
        if not has_flights and free_ns and now_ns - free_ns > SLEPT_NS:
            return now_ns + self.wake_ns
        return max(free_ns, now_ns)


class LatencyModel(ABC):
    """Durations of batches of `model` on the device that `facts` describes; `loop` is what the host spends
    between batches."""

    def __init__(
        self, name: str, model: ModelShape, facts: DeviceFacts, provenance: str, loop: HostLoop
    ) -> None:
        self.name = name
        self.model = model
        self.facts = facts
        self.provenance = provenance
        self.loop = loop

    @abstractmethod
    def predict(self, work: Work) -> Prediction:
        """The times of `work` without transfers to and from host memory; deterministic."""

    def ahead(self, work: Work, num_tokens: int) -> Iterator[Run]:
        """`predict` of decode work, and of the same with every row a token further, `num_tokens` times in
        all."""
        for tokens in range(num_tokens):
            prediction = self.predict(work.moved(tokens))
            yield Run(prediction, [prediction.limit_ns])

    def beside(self, ranges: Sequence[ScheduledRange]) -> Callable[[Sequence[ScheduledRange]], Prediction]:
        """`predict` of batches of one loop in which other ranges stand behind `ranges`, for whoever asks of
        many of them."""

        def predict(others: Sequence[ScheduledRange]) -> Prediction:
            both = (*ranges, *others)
            rows = sum([item.token_count for item in both])
            return self.predict(Work(Stage.RECURRENT, 1, both, rows, len(both)))

        return predict

    def transfer_ns(self, num_bytes: int) -> int:
        """Moving `num_bytes` between device and host memory: here at the device's ceiling."""
        return self.facts.transfer_ns(num_bytes)

    def times(self, work: Work, transfers: Transfers = NO_TRANSFERS) -> Prediction:
        """All times of a batch and of what is transferred before it: its rows wait for what is swapped, as
        `copies`, and the host prepares those who are let in."""
        prediction = self.predict(work)
        if self.loop.admit_ns and transfers.allocations:
            admit_ns = self.loop.admit_ns * len(transfers.allocations)
            prediction = prediction._replace(prepare_ns=prediction.prepare_ns + admit_ns)
        if not transfers.swapped_bytes:
            return prediction
        components = list(prediction.components_ns)
        components[COMPONENTS.index("copies")] += self.transfer_ns(transfers.swapped_bytes)
        limit_ns = prediction.limit_ns + self.facts.transfer_ns(transfers.swapped_bytes)
        return prediction._replace(components_ns=tuple(components), limit_ns=limit_ns)
