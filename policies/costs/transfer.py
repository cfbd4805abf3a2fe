"""A latency model of a card that nobody has profiled: a known device's, scaled by what datasheets say of both
cards.

Every component takes as much longer as its limit does: bytes over bandwidth or FLOPs over peak, whichever is
larger on the card. What is fixed per batch (launching, gaps) and the host stay as they are. Both ceilings of
the new card are believed as far as those of the known one were reached: an H200 copies 4.22 of 4.8 TB/s, so
an H100 is given 2.95 of its 3.35. Nothing here knows how well another card's kernels are: `known_errors` says
how far the method is off where both ends are known.
"""

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B, ModelShape
from policies.core.seam.batch import ScheduledRange, Stage, Work
from policies.costs.devices import datasheet_of, device_facts
from policies.costs.latency import LatencyModel, Prediction
from policies.costs.limit import DeviceFacts, Roofline

PREFIX = "transfer:"
KNOWN = (
    ("h200", "a100-80gb", "a100-seed"),
    ("a100-seed", "h200", "h200"),
    ("h200", "h200", "h200-2026-11-30"),
)
"""(device, card, device of that card): the pairs that the method can be held against. The last is no transfer
but other kernels on the same card."""
Load = Callable[[str, ModelShape], LatencyModel]


def transfer_name(like: str, card: str) -> str:
    """What `device: {like, card}` is called: `transfer:h200:h100`."""
    return f"{PREFIX}{like}:{card}"


def parts_of(name: str) -> tuple[str, str]:
    """(known device, card) of a `transfer_name`. Raises `InputError`."""
    like, _, card = name.removeprefix(PREFIX).rpartition(":")
    if not like or not card or like.startswith((PREFIX, "roofline:")):
        raise InputError(
            f"device: {name}, expected {PREFIX}DEVICE:CARD with a device that was measured or a MODEL.json, "
            "such as transfer:h200:h100"
        )
    return like, card


class TransferModel(LatencyModel):
    """`known` scaled to `card` of the catalogue."""

    def __init__(self, name: str, known: LatencyModel, card: str, error: str | None = None) -> None:
        before, sheet = datasheet_of(known.facts.name), datasheet_of(card)
        facts = DeviceFacts(
            card,
            sheet.bandwidth_bytes_per_s * known.facts.bandwidth_bytes_per_s / before.bandwidth_bytes_per_s,
            sheet.peak_flops_per_s * known.facts.peak_flops_per_s / before.peak_flops_per_s,
            device_facts(card).memory_bytes,
            sheet.source,
            device_facts(card).host_bandwidth_bytes_per_s,
        )
        bandwidth = sheet.bandwidth_bytes_per_s / before.bandwidth_bytes_per_s
        peak = sheet.peak_flops_per_s / before.peak_flops_per_s
        provenance = (
            f"{name} is a transfer, not a measurement: {known.provenance}; scaled by datasheets from "
            f"{before.name} to {sheet.name}, bandwidth x {bandwidth:.3g}, peak x {peak:.3g}, host as it is"
        )
        super().__init__(
            name, known.model, facts, provenance if error is None else f"{provenance}; {error}", known.loop
        )
        self.known = known
        self._before, self._after = Roofline(known.model, known.facts), Roofline(known.model, facts)
        self._byte_factor = 1 / bandwidth

    def predict(self, work: Work) -> Prediction:
        prediction = self.known.predict(work)
        before, after = self._before.parts(work), self._after.parts(work)
        *scaled, launch_ns = prediction.components_ns
        components_ns = [
            round(value_ns * (new / old if old else self._byte_factor))
            for value_ns, old, new in zip(scaled, before, after, strict=True)
        ]
        return prediction._replace(components_ns=(*components_ns, launch_ns), limit_ns=int(sum(after)))


@dataclass(frozen=True, slots=True)
class TransferError:
    """How the device time of batches that `known` scaled to `card` predicts differs from that of `truth`, as
    a fraction: median and extremes over `num_batches`, and of all their times together. On the same card
    nothing is transferred: then it is what other kernels make."""

    known: str
    card: str
    truth: str
    num_batches: int
    median: float
    least: float
    most: float
    total: float
    is_same_card: bool


def known_errors(load: Load) -> list[TransferError]:
    """The method held against each of `KNOWN` over `standard_batches`; `load` gives models by name."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch beyond what was profiled is one of many here
        for like, card, truth in KNOWN:
            model = TransferModel(transfer_name(like, card), load(like, OURO_1_4B), card)
            other = load(truth, OURO_1_4B)
            pairs = [
                (model.predict(work).device_ns, other.predict(work).device_ns) for work in standard_batches()
            ]
            errors = [predicted / measured - 1 for predicted, measured in pairs if measured]
            found.append(
                TransferError(
                    like, card, truth, len(errors), statistics.median(errors), min(errors), max(errors),
                    sum(predicted for predicted, _ in pairs) / sum(measured for _, measured in pairs) - 1,
                    datasheet_of(card) == datasheet_of(model.known.facts.name),
                )
            )  # fmt: skip
    return found


@cache
def error_sentence(load: Load) -> str:
    """What every output says of a transfer: that its error is unknown, and what is known."""
    parts = [
        f"from {item.known} it is {item.median:+.0%} off {item.truth} in the median ({item.least:+.0%} to "
        f"{item.most:+.0%})"
        for item in known_errors(load)
        if not item.is_same_card
    ]
    return (
        "how far it is off is unknown, for no second card was profiled with these kernels; between the two "
        f"engines that are known, which differ in more than the card: {', '.join(parts)}"
    )


def standard_batches() -> Iterator[Work]:
    """Recurrent batches of one depth: decode rows, chunks of prompts, and both, over short and long
    contexts."""
    for context in (256, 1024, 4096, 8064):
        decode = {rows: _decode(rows, context) for rows in (1, 8, 32)}
        chunks = {rows: (_chunk(rows, context),) for rows in (16, 128, 512, 1024)}
        yield from (Work.of(Stage.RECURRENT, 1, ranges) for ranges in decode.values())
        yield from (Work.of(Stage.PREFILLING_RECURRENT, 1, ranges) for ranges in chunks.values())
        yield from (Work.of(Stage.RECURRENT, 1, decode[8] + ranges) for ranges in chunks.values())


def _decode(rows: int, context: int) -> tuple[ScheduledRange, ...]:
    return tuple([ScheduledRange(at, Stage.RECURRENT, 0, context, 1, context) for at in range(rows)])


def _chunk(rows: int, context: int) -> ScheduledRange:
    return ScheduledRange(99, Stage.PREFILLING_RECURRENT, 0, context, rows, context)
