"""Predicted and measured times of the very same batches: what the latency model alone gets wrong, by
stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from policies.core.errors import InputError
from policies.process.sentences import shown
from results.batchlog import parse_ranges
from results.comparison.pairs import Pair
from results.predictions import read_predictions, read_replays
from results.rundir import BATCHES, PREDICTED

HOST = "host"
COLUMNS = (
    "seq",
    "stage",
    "loop_count",
    "rows",
    "started_ns",
    "finished_ns",
    "select_ns",
    "host_ns",
    "ranges",
)


@dataclass(frozen=True, slots=True)
class StageErrors:
    """Errors over the batches of one stage on the device; of stage `host` over the host times (select,
    prepare, launch) of all.

    `bias` compares sums: predicted / measured - 1. `median` and `p95` are of |predicted / measured - 1| over
    batches.
    """

    stage: str
    num_batches: int
    measured_s: float
    predicted_s: float
    median: float
    p95: float

    @property
    def bias(self) -> float:
        return self.predicted_s / self.measured_s - 1


def batch_times(pair: Pair) -> pd.DataFrame | None:
    """One line per batch of the measured run that was predicted, or None when there are no predictions of one
    that is here.

    Columns: `stage`, `loop_count`, `rows`, `ranges`, `predicted_ms`, `measured_ms` on the device, and the
    same of the host: `predicted_host_ms`, `measured_host_ms`.
    """
    predicted = read_predictions(pair.predicted.path)
    replays = read_replays(pair.predicted.path)
    names = [item.run for item in replays[:1]]
    run = next((run for run in pair.measured if run.path.name in names and run.has_logs), None)
    if predicted is None or run is None:
        return None
    logged = pd.concat(run.batch_frames(COLUMNS))
    for table, where in ((logged, run.path / BATCHES), (predicted, pair.predicted.path / PREDICTED)):
        twice = table["seq"][table["seq"].duplicated()]
        if len(twice):
            raise InputError(f"{where}: batch {twice.iloc[0]} is there twice, expected it once")
    both = logged.merge(predicted, on="seq", suffixes=("_logged", ""))
    return pd.DataFrame(
        {
            **{name: both[name] for name in ("stage", "loop_count", "rows", "ranges")},
            "predicted_ms": both["device_ns"] / 1e6,
            "measured_ms": (both["finished_ns"] - both["started_ns"]) / 1e6,
            "predicted_host_ms": (both["select_ns"] + both["host_ns"]) / 1e6,
            "measured_host_ms": (both["select_ns_logged"] + both["host_ns_logged"]) / 1e6,
        }
    )


def stage_errors(times: pd.DataFrame) -> list[StageErrors]:
    """Errors by stage in alphabetical order, then those of the host; batches that took no time count in the
    sums alone."""
    found = [
        _errors(str(stage), group["predicted_ms"], group["measured_ms"])
        for stage, group in times.groupby("stage", sort=True)
    ]
    found.append(_errors(HOST, times["predicted_host_ms"], times["measured_host_ms"]))
    return [item for item in found if item is not None]


def context_tokens(ranges: Sequence[str]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The longest context of each batch: the furthest token of its ranges, that token included. Raises
    `InputError` for text that is no range."""
    return np.array([_furthest(text) for text in ranges], dtype=np.int64)


def _furthest(text: str) -> int:
    try:
        return max(item.token_start + item.token_count for item in parse_ranges(text))
    except ValueError:
        raise InputError(
            f"{BATCHES}: ranges: {shown(text)}, expected request:stage:depth:start:count"
        ) from None


def _errors(stage: str, predicted: "pd.Series[float]", measured: "pd.Series[float]") -> StageErrors | None:
    shown = measured > 0
    if not shown.any():
        return None
    relative = (predicted[shown] / measured[shown] - 1).abs().to_numpy()
    median, p95 = np.percentile(relative, (50, 95)).tolist()
    return StageErrors(
        stage, len(measured), float(measured.sum()) / 1e3, float(predicted.sum()) / 1e3, median, p95
    )
