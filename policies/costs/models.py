"""The latency models by name: fitted ones, a measured table, the seeds' two-parameter cost, the bare
roofline, and what is known scaled to another card.

Numbers live in `policies/costs/shipped/` beside their provenance (model files end in .json); this file knows
only how they combine.
"""

import bisect
import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from policies.core.errors import InputError
from policies.core.models.shape import SHIPPED_MODELS, ModelShape
from policies.core.seam.batch import Stage, Work
from policies.costs.devices import CATALOGUE, device_facts, device_names
from policies.costs.fitted import FittedModel, shape_mismatch
from policies.costs.latency import HostLoop, LatencyModel, Prediction
from policies.costs.limit import DeviceFacts, Roofline
from policies.costs.modelfile import read_model
from policies.costs.transfer import PREFIX, TransferModel, error_sentence, parts_of
from policies.process.sentences import nearest, shown

DEVICES = Path(__file__).parent / "shipped"
ASSUMED_SELECT_US = (15.0, 1.0)
ASSUMED_HOST_US = (45.0, 1.5)
ASSUMED_COLLECT_US = 10.0
"""Host time per batch and per range where nothing was measured: assumptions, the same as in
`h200-analytic.yaml`."""


class HostTimes:
    """Host time of a batch as a fixed part and a part per range, nanoseconds."""

    def __init__(self, select_us: tuple[float, float], host_us: tuple[float, float]) -> None:
        self._select = tuple(1e3 * value for value in select_us)
        self._host = tuple(1e3 * value for value in host_us)

    def of(self, num_ranges: int) -> tuple[int, int]:
        """(select_ns, host_ns) of a batch with `num_ranges` ranges."""
        return int(self._select[0] + self._select[1] * num_ranges), int(
            self._host[0] + self._host[1] * num_ranges
        )


class TableModel(LatencyModel):
    """Linear layers interpolated in a measured table, attention at a fraction of its limit, small kernels and
    host assumed."""

    def __init__(self, name: str, model: ModelShape, facts: DeviceFacts, data: Mapping[str, Any]) -> None:
        assumed = data["assumed"]
        super().__init__(
            name,
            model,
            facts,
            f"{name}: analytic; linear layers {facts.source}, the rest assumed",
            HostLoop(collect_ns=int(1e3 * assumed["collect_us"])),
        )
        measured_for = SHIPPED_MODELS[data["measured_for"]]
        scale = 1e6 * model.recurrent_weight_bytes / measured_for.recurrent_weight_bytes
        self._rows = list(data["linear_ms"])
        self._linear_ns = [scale * value for value in data["linear_ms"].values()]
        self._lm_head_ns = 1e6 * data["lm_head_ms"] * model.lm_head_bytes / measured_for.lm_head_bytes
        self._attention_fraction = assumed["attention_fraction_of_limit"]
        self._small_ns = int(1e3 * assumed["small_kernel_us"])
        self._small_per_loop_ns = int(
            1e3 * assumed["small_kernel_us"] * assumed["small_kernels_per_layer"] * model.num_layers
        )
        self._roofline = Roofline(model, facts)
        self._host = HostTimes(_pair(assumed["select_us"]), _pair(assumed["host_us"]))
        self._linear_by_rows: dict[int, float] = {}
        self._has_warned = False

    def linear_ns(self, rows: int) -> float:
        """Linear layers of one invocation by rows: linear between measured points, the last slope beyond
        them.

        Warns with the numbers the first time it goes beyond them.
        """
        known = self._linear_by_rows.get(rows)
        if known is not None:
            return known
        if rows > self._rows[-1] and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.name}: {rows} rows is beyond the measured {self._rows[-1]}; extrapolated",
                stacklevel=2,
            )
        at = min(max(bisect.bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        low, high = self._rows[at - 1], self._rows[at]
        low_ns, high_ns = self._linear_ns[at - 1], self._linear_ns[at]
        result: float = low_ns + (high_ns - low_ns) * (rows - low) / (high - low)
        self._linear_by_rows[rows] = result
        return result

    def predict(self, work: Work) -> Prediction:
        select_ns, host_ns = self._host.of(len(work.ranges))
        rows, loops, roofline = work.rows, work.loop_count, self._roofline
        if loops:
            kv_tokens, pairs = work.attention_work()
            attention = roofline.attention_ns(kv_tokens, pairs)
            limit = loops * (roofline.linear_ns(rows) + attention)
            device = (
                0,
                int(loops * self.linear_ns(rows)),
                int(loops * attention / self._attention_fraction),
                0,
                0,
                loops * self._small_per_loop_ns,
            )
        elif work.stage is Stage.CODA:
            lm_head, copies = roofline.lm_head_ns(rows), roofline.copies_ns(work)
            limit = lm_head + copies
            device = (0, 0, 0, int(max(self._lm_head_ns, lm_head)), int(copies), self._small_ns)
        else:
            limit = roofline.embed_ns(rows)
            device = (int(limit), 0, 0, 0, 0, self._small_ns)
        return Prediction(device, int(limit), select_ns, host_ns)


class SeedModel(LatencyModel):
    """The seeds' cost: `invocation_ms` per recurrent invocation plus a row cost linear in context; nothing
    else takes time.

    Published figures obey tok/s = (rows / 4) / (a + rows x b) with a = 25 ms; b grows with context. The
    host's share is inside a.
    """

    def __init__(self, name: str, model: ModelShape, facts: DeviceFacts, data: Mapping[str, Any]) -> None:
        super().__init__(name, model, facts, f"{name}: two-parameter fit of published figures", HostLoop())
        self._invocation_ns = 1e6 * data["invocation_ms"]
        self._row_ns = 1e6 * data["row_ms"]
        self._pair_ns = 1e6 * data["row_ms_per_context_token"]
        self._roofline = Roofline(model, facts)

    def predict(self, work: Work) -> Prediction:
        limit = self._roofline.limit_ns(work)
        loops = work.loop_count
        if not loops:
            return Prediction((0, 0, 0, 0, 0, 0), limit, 0, 0)
        _, pairs = work.attention_work()
        device = (
            0,
            int(loops * work.rows * self._row_ns),
            int(loops * pairs * self._pair_ns),
            0,
            0,
            int(loops * self._invocation_ns),
        )
        return Prediction(device, limit, 0, 0)


class RooflineModel(LatencyModel):
    """Every batch at its physical limit on a datasheet device; host times assumed."""

    def __init__(self, name: str, model: ModelShape, facts: DeviceFacts) -> None:
        provenance = f"{name}: every batch at its limit, {facts.source}; host times assumed"
        super().__init__(name, model, facts, provenance, HostLoop(collect_ns=int(1e3 * ASSUMED_COLLECT_US)))
        self._roofline = Roofline(model, facts)
        self._host = HostTimes(ASSUMED_SELECT_US, ASSUMED_HOST_US)

    def predict(self, work: Work) -> Prediction:
        parts = self._roofline.parts(work)
        select_ns, host_ns = self._host.of(len(work.ranges))
        device = (
            int(parts.embed),
            int(parts.linear),
            int(parts.attention),
            int(parts.lm_head),
            int(parts.copies),
            0,
        )
        return Prediction(device, sum(device), select_ns, host_ns)


def load_device(name: str, model: ModelShape) -> LatencyModel:
    """The latency model called `name` for `model`: a shipped name, the path of a model file,
    `roofline:<card>`, or `transfer:<one of these>:<card>`.

    A shipped name means a card, with its kernels at a date where it says one (`CARD-DATE`). For a model whose
    layers were not profiled on it, it is the card's analytic model, and says so. Raises `InputError` for
    another name, and for a model file that is none or was fitted for another model.
    """
    if name.startswith("roofline:"):
        return RooflineModel(name, model, device_facts(name.removeprefix("roofline:")))
    if name.startswith(PREFIX):
        like, card = parts_of(name)
        device_facts(card)  # refuses an unknown card before a model is read
        return TransferModel(name, load_device(like, model), card, error_sentence(load_device))
    path = model_path(name)
    if path is not None:
        file = read_model(path)
        mismatch = shape_mismatch(model, file.model)
        if mismatch is None or name not in shipped_fits():
            return FittedModel(name, model, file)
        analytic = load_device(f"{name.partition('-')[0]}-analytic", model)
        analytic.provenance = f"{name} {mismatch}, so {analytic.provenance}"
        return analytic
    if name not in MODELS:
        known = (*shipped_fits(), *MODELS, "roofline:<card>", "transfer:<device>:<card>", "MODEL.json")
        roofs = [f"roofline:{card}" for card in device_names()]
        raise InputError(f"device: unknown device {shown(name)}{nearest(name, known, roofs)}")
    data: dict[str, Any] = yaml.safe_load((DEVICES / f"{name}.yaml").read_text(encoding="utf-8"))
    return MODELS[name](name, model, device_facts(data["facts"]), data)


def shipped_fits() -> tuple[str, ...]:
    """Names of the model files that are shipped."""
    return tuple(sorted(path.stem for path in DEVICES.glob("*.json")))


def model_path(name: str) -> Path | None:
    """The model file that a device name means: a shipped one, or the path itself when it ends in .json; None
    for other devices."""
    if name.endswith(".json"):
        return Path(name)
    return DEVICES / f"{name}.json" if name in shipped_fits() else None


def beyond_compared(name: str, max_num_seqs: int) -> str | None:
    """A sentence where a run on the device called `name` may hold more requests at a time than its model has
    been held against a card with (`shipped/compared.yaml`); None where it does not, or nothing was."""
    known = yaml.safe_load((DEVICES / "compared.yaml").read_text(encoding="utf-8")).get(name)
    if known is None or max_num_seqs <= known["max_num_seqs"]:
        return None
    return (
        f"{name} was compared with a card up to max_num_seqs {known['max_num_seqs']}, this run has "
        f"{max_num_seqs}: batches may lie within what was profiled and the whole was never checked"
    )


def device_sha256(name: str) -> str:
    """A hash of the numbers behind the device called `name`, so that a result can tell whether they have
    changed since.

    Raises `InputError` for a model file that cannot be read; of a name that is no device it is the hash of
    nothing.
    """
    if name.startswith(PREFIX):
        parts = (device_sha256(parts_of(name)[0]), device_sha256("roofline:"))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()
    path = CATALOGUE if name.startswith("roofline:") else model_path(name) or DEVICES / f"{name}.yaml"
    try:
        data = path.read_bytes() if path.suffix == ".json" or path.exists() else b""
    except OSError as error:
        raise InputError(f"device: {path}: {error.strerror or error}, expected a model file") from None
    return hashlib.sha256(data).hexdigest()


MODELS: dict[str, type[TableModel] | type[SeedModel]] = {"h200-analytic": TableModel, "a100-seed": SeedModel}


def _pair(data: Mapping[str, float]) -> tuple[float, float]:
    return data["batch"], data["range"]
