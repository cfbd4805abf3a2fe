"""Predicted against measured device time of the same batches: one panel per stage, and the error by rows and
by context."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from results.comparison.batches import context_tokens
from results.plots.style import INK, agreement_axes, log_scales, picture

STAGE_COLORS = {
    "PREFILL": "#6b7280", "PREFILLING_PRELUDE": "#a16207", "PREFILLING_RECURRENT": "#d97706",
    "PRELUDE": "#65a30d",
    "RECURRENT": "#0f766e", "CODA": "#4338ca",
}  # fmt: skip
MAX_POINTS = 6_000
"""Batches drawn of a stage: every n-th, so that the same data gives the same picture."""
NUM_BINS = 18
MOST_ERROR = 1.0


def plot_batch_times(times: pd.DataFrame, path: Path) -> None:
    """Draw one panel per stage of `times` (see `results.comparison.batches.batch_times`), both axes
    logarithmic, to `path`."""
    stages = [stage for stage in STAGE_COLORS if (times["stage"] == stage).any()]
    columns = min(len(stages), 3)
    rows = -(-len(stages) // columns)
    with picture(path, 3.9 * columns, 0.7 + 3.7 * rows) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(stages) :]:
            axes.set_axis_off()
        for axes, stage in zip(grid.flat, stages, strict=False):
            mine = times[(times["stage"] == stage) & (times["measured_ms"] > 0) & (times["predicted_ms"] > 0)]
            shown = _thinned(mine)
            values = shown[["measured_ms", "predicted_ms"]].to_numpy()
            if values.size:
                agreement_axes(axes, float(values.min()) / 1.3, float(values.max()) * 1.3)
            axes.plot(
                shown["measured_ms"],
                shown["predicted_ms"],
                ".",
                ms=4,
                alpha=0.35,
                color=STAGE_COLORS[stage],
                mew=0,
            )
            error = (mine["predicted_ms"] / mine["measured_ms"] - 1).abs().median()
            axes.set_title(f"{stage}\n{len(mine):,} batches · median error {error:.1%}")
            axes.set_xlabel("measured, ms (log)")
            axes.set_ylabel("simulated, ms (log)")
        figure.suptitle(
            "Device time of the same batches; on the line they agree",
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11.5,
        )


def plot_batch_errors(times: pd.DataFrame, path: Path) -> None:
    """Draw the relative error of recurrent batches against rows and against context to `path`; lines are
    medians of bins."""
    recurrent = times[(times["loop_count"] > 0) & (times["measured_ms"] > 0)]
    with picture(path, 11, 4.2) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for stage, color in STAGE_COLORS.items():
            shown = _thinned(recurrent[recurrent["stage"] == stage])
            if shown.empty:
                continue
            error = (shown["predicted_ms"] / shown["measured_ms"] - 1).to_numpy()
            for axes, values in (
                (left, shown["rows"].to_numpy()),
                (right, context_tokens(shown["ranges"].tolist())),
            ):
                axes.plot(
                    values,
                    np.clip(error, -MOST_ERROR, MOST_ERROR),
                    ".",
                    ms=2.5,
                    alpha=0.25,
                    color=color,
                    mew=0,
                )
                axes.plot(*_binned_medians(values, error), "-o", ms=3, color=color, label=stage)
        for axes, name in ((left, "rows of the batch"), (right, "longest context in the batch, tokens")):
            axes.axhline(0, color=INK, lw=0.8)
            log_scales(axes)
            axes.set_xlabel(f"{name} (log)")
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        left.set_ylabel("simulated / measured - 1")
        handles, texts = left.get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper right", ncols=max(len(texts), 1))
        figure.suptitle("Error of recurrent batches", x=0.01, ha="left", fontweight="bold", fontsize=11.5)


def _thinned(times: pd.DataFrame) -> pd.DataFrame:
    return times.iloc[:: max(1, -(-len(times) // MAX_POINTS))]


def _binned_medians(
    values: NDArray[np.int64], error: NDArray[np.float64]
) -> tuple[Sequence[float], Sequence[float]]:
    """Median value and median error in logarithmic bins that hold some batches."""
    edges = np.unique(np.geomspace(values.min(), values.max() + 1, NUM_BINS + 1).astype(np.int64))
    at = np.digitize(values, edges)
    bins = [at == number for number in np.unique(at)]
    return [float(np.median(values[mine])) for mine in bins], [float(np.median(error[mine])) for mine in bins]
