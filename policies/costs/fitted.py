"""The latency model that a model file describes. `policies.costs.modelfile` says what coefficients mean,
`policies.costs.features` what they multiply."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import mul, sub
from typing import Any

from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.core.seam.batch import ScheduledRange, Stage, Work
from policies.costs.devices import device_facts, facts_of_card
from policies.costs.features import Features, Key
from policies.costs.latency import LatencyModel, Prediction, Run, new_prediction
from policies.costs.limit import DeviceFacts, Roofline
from policies.costs.modelfile import ModelFile

REMEMBERED = 1 << 16
"""Compositions of recurrent batches whose times are kept."""
BOUNDED = ("bucket", "tiles", "path_tiles", "items")
"""Features beyond whose profiled range a prediction is an extrapolation."""

LAYER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "dtype_bytes",
)
"""What two models must share for a layer of one to take as long as a layer of the other."""


class FittedModel(LatencyModel):
    """Predicts batches of `model` with the coefficients of `file`.

    Raises `InputError` when the file was fitted for another model shape or on a device whose ceilings are not
    known. A model with another number of layers, all else equal, is predicted by layers, and `provenance`
    says so.
    """

    def __init__(self, name: str, model: ModelShape, file: ModelFile) -> None:
        profile = file.profile
        mismatch = shape_mismatch(model, file.model)
        if mismatch is not None:
            raise InputError(
                f"device: {name} {mismatch}: profile that model, or choose h200-analytic or roofline:<card>"
            )
        layers = model.num_layers / file.model.num_layers
        scaled = ""
        if layers != 1:
            scaled = (
                f", scaled from the {file.model.num_layers} layers of {file.model.name} to {model.num_layers}"
            )
        made = (
            f"profile of {profile['date']}, torch {profile['torch']}, kernels {profile['kernel_sha256'][:8]}"
        )
        super().__init__(
            name,
            model,
            _facts(name, profile["gpu"]),
            f"{name}: fitted on one {profile['gpu']} ({made}){scaled}",
            file.loop,
        )
        self.file = file
        self.layer_factor = layers
        self._roofline = Roofline(model, self.facts)
        self._has_warned = False
        self._recurrent_ns = lru_cache(REMEMBERED)(self._compute_recurrent_ns)
        self._flat = lru_cache(REMEMBERED)(self._compute_flat)
        self._host_ns = lru_cache(REMEMBERED)(self._compute_host_ns)

    def predict(self, work: Work) -> Prediction:
        stage, loops, ranges, rows, _, _ = work
        if loops:
            key, kv_tokens, pairs = self.file.cutting.attended(ranges)
            components_ns = self._recurrent_ns(key, loops)
            limits = self._roofline
            limit_ns = int(loops * limits.linear_ns(rows) + loops * limits.attention_ns(kv_tokens, pairs))
            return new_prediction((components_ns, limit_ns, *self._host_ns(stage, len(ranges), rows, loops)))
        skipped = work.exit_depths if stage is Stage.CODA else ()
        if not skipped:
            return self._flat(stage, rows, len(ranges))
        planes = sum([self.model.num_loops - depth for depth in skipped])
        fitted_ns = self.layer_factor * self.file.device.copies.of(len(skipped), planes)
        components_ns, *_ = self._flat(stage, rows, len(ranges))
        copies_ns = round(max(fitted_ns, self._roofline.copies_ns(work)))
        components_ns = (*components_ns[:4], copies_ns, components_ns[5])
        host_ns = self._host_ns(stage, len(ranges), rows, loops)
        return Prediction(components_ns, self._roofline.limit_ns(work), *host_ns)

    def transfer_ns(self, num_bytes: int) -> int:
        """As profiled, where it was."""
        swap = self.file.device.swap
        return super().transfer_ns(num_bytes) if swap is None else round(swap.of(num_bytes))

    def ahead(self, work: Work, num_tokens: int) -> Iterator[Run]:
        """Time goes by history tiles, so it stays until some row comes into its next one; the limit goes by
        tokens."""
        rows, loops, ranges = work.rows, work.loop_count, work.ranges
        prediction = self.predict(work)
        if not loops or num_tokens == 1:
            yield Run(prediction, [prediction.limit_ns] * num_tokens)
            return
        tile_keys, limits = self.file.cutting.tile_keys, self._roofline
        starts = [item.token_start for item in ranges]
        kv_tokens = sum(starts) + rows
        host_ns = prediction[2:]
        linear_ns, token_ns = loops * limits.linear_ns(rows), limits.decode_token_ns
        tokens = 0
        while tokens < num_tokens:
            tiles = [start // tile_keys for start in starts]
            components_ns = self._recurrent_ns(tuple(tiles), loops)
            left = tile_keys - max(map(sub, starts, map(mul, tiles, repeat(tile_keys))))
            left = min(left, num_tokens - tokens)
            firsts = range(kv_tokens, kv_tokens + left * rows, rows)
            yield Run(
                new_prediction((components_ns, 0, *host_ns)),
                [int(linear_ns + loops * (kv * token_ns)) for kv in firsts],
            )
            starts = [start + left for start in starts]
            tokens, kv_tokens = tokens + left, kv_tokens + left * rows

    def beside(self, ranges: Sequence[ScheduledRange]) -> Callable[[Sequence[ScheduledRange]], Prediction]:
        """Without the limit, which nobody who asks so looks at, and the key of `ranges` is made once."""
        cutting = self.file.cutting
        common = cutting.key(ranges) if ranges else ()
        rows = sum([item.token_count for item in ranges])

        def predict(others: Sequence[ScheduledRange]) -> Prediction:
            both = rows + sum([item.token_count for item in others])
            key = (*common, *cutting.key(others)) if others else common
            host_ns = self._host_ns(Stage.RECURRENT, len(ranges) + len(others), both, 1)
            return Prediction(self._of_features(cutting.features(key), 1), 0, *host_ns)

        return predict

    def features(self, work: Work) -> Features:
        """What the time of recurrent `work` depends on."""
        return self.file.cutting.features(self.file.cutting.key(work.ranges))

    def beyond(self, features: Features) -> str | None:
        """The first of `features` that lies outside the profiled range, with the numbers; None when all
        are inside."""
        for name in BOUNDED:
            low, high = self.file.profiled[name]
            value = getattr(features, name)
            if not low <= value <= high:
                return f"{name} {value}, profiled {low} to {high}"
        return None

    def difference(self, summary: Mapping[str, Any]) -> str | None:
        """How a measured run differs from what was profiled in card or kernels, in one sentence; None where
        it is not known to."""
        profile = self.file.profile
        for key, fitted in (("card", profile["gpu"]), ("kernel_sha256", profile["kernel_sha256"])):
            found = summary.get(key)
            if found is not None and found != fitted:
                return (
                    f"{self.name} was fitted on {key} {fitted[:16]}, the run had {str(found)[:16]}: profile "
                    "that card and kernels"
                )
        return None

    def _compute_recurrent_ns(self, key: Key, loops: int) -> tuple[int, ...]:
        return self._of_features(self.file.cutting.features(key), loops)

    def _of_features(self, features: Features, loops: int) -> tuple[int, ...]:
        if not self._has_warned and (beyond := self.beyond(features)) is not None:
            self._has_warned = True
            warnings.warn(f"{self.name}: a batch has {beyond}; extrapolated", stacklevel=4)
        linear, attention, launch = self.file.device.recurrent_ns(features, loops)
        return 0, round(self.layer_factor * linear), round(self.layer_factor * attention), 0, 0, round(launch)

    def _compute_flat(self, stage: Stage, rows: int, ranges: int) -> Prediction:
        """A batch that runs no depth and copies nothing."""
        device, bucket = self.file.device, self.file.cutting.bucket(rows)
        host_ns = self._host_ns(stage, ranges, rows, 0)
        if stage is Stage.CODA:
            components_ns = (0, 0, 0, round(device.coda.at(bucket)), 0, 0)
            return Prediction(components_ns, int(self._roofline.lm_head_ns(rows)), *host_ns)
        table = device.prelude if stage is Stage.PRELUDE else device.staging
        components_ns = (round(table.at(bucket)), 0, 0, 0, 0, 0)
        return Prediction(components_ns, int(self._roofline.embed_ns(rows)), *host_ns)

    def _compute_host_ns(self, stage: Stage, ranges: int, rows: int, loops: int) -> tuple[int, int, int, int]:
        """(select, prepare, launch, idle)."""
        host = self.file.host[stage]
        select, prepare, launch = (
            round(time.of(ranges, rows, loops)) for time in (host.select, host.prepare, host.launch)
        )
        return select, prepare, launch, round(host.idle_share * launch)


def shape_mismatch(model: ModelShape, fitted: ModelShape) -> str | None:
    """Why a layer of `model` does not take as long as one of `fitted`: the first field that differs, or
    None."""
    for field in LAYER_FIELDS:
        found, expected = getattr(model, field), getattr(fitted, field)
        if found != expected:
            return f"was fitted for {fitted.name} with {field} {expected}, {model.name} has {found}"
    return None


def _facts(name: str, gpu: str) -> DeviceFacts:
    facts = device_facts("cpu") if gpu == "cpu" else facts_of_card(gpu)
    if facts is None:
        raise InputError(
            f"device: {name} was fitted on {gpu!r}, which policies/costs/devices.yaml does not know: add its "
            "ceilings there"
        )
    return facts
