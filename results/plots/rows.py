"""Rows per recurrent invocation over time: how full each run keeps the device, prompt and decode rows
stacked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from results.identity import policy_order
from results.load import Run
from results.plots.style import INK, picture, policy_styles, say_nothing_to_show
from results.window import run_s

NUM_BINS = 240
COLUMNS = ("loop_count", "rows", "started_ns", "ranges")


@dataclass(frozen=True, slots=True)
class RowBins:
    """Mean rows of the invocations that start in each of `NUM_BINS` equal time bins; NaN in a bin without
    one. `[bins]` each."""

    edges_ms: NDArray[np.float64]
    prompt_rows: NDArray[np.float64]
    decode_rows: NDArray[np.float64]


def plot_rows(runs: Sequence[Run], path: Path) -> None:
    """Draw one panel per run to `path`, all with the same axes. The dashed line is the run's
    `rows_per_recurrent_invocation`."""
    runs = sorted(runs, key=lambda run: (run.chunk_tokens, policy_order(run.policy)))
    bins = [bin_rows(run) for run in runs]
    styles = policy_styles([run.policy for run in runs])
    end_ms = max(float(item.edges_ms[-1]) for item in bins)
    top = max(float(np.nan_to_num(item.prompt_rows + item.decode_rows).max()) for item in bins)
    unit, per_unit = ("s", 1e3) if end_ms > 20_000 else ("ms", 1.0)
    with picture(path, 10, 0.9 + 1.5 * len(runs) + (0.5 if len(runs) == 1 else 0)) as figure:
        grid = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axes, run, item in zip(grid, runs, bins, strict=True):
            title = f"{run.policy} · chunk {run.chunk_tokens}"
            mean = run.summary["rows_per_recurrent_invocation"]
            if mean is None or np.isnan(item.prompt_rows).all():
                say_nothing_to_show(axes, f"{title}: no recurrent invocation")
                continue
            color = styles[run.policy][0]
            edges = item.edges_ms / per_unit
            prompt = np.nan_to_num(item.prompt_rows)
            total = prompt + np.nan_to_num(item.decode_rows)
            axes.stairs(total, edges, baseline=prompt, fill=True, color=INK, lw=0, label="decode rows")
            axes.stairs(
                prompt,
                edges,
                fill=True,
                color=color,
                alpha=0.8,
                lw=0,
                label="prompt rows (the policy's colour)",
            )
            axes.axhline(mean, color=INK, ls="--", lw=1)
            axes.set_title(f"{title} · {mean:,.1f} rows per invocation in the mean")
            axes.set_ylim(0, 1.05 * max(top, 1.0))
            axes.set_xlim(edges[0], end_ms / per_unit)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.set_ylabel("rows")
        grid[-1].set_xlabel(f"time, {unit}")
        handles, texts = grid[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles[::-1], texts[::-1], loc="outside upper right", ncols=2)
        figure.suptitle(
            f"Rows per recurrent invocation on {runs[0].workload}",
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11.5,
        )


def bin_rows(run: Run, num_bins: int = NUM_BINS) -> RowBins:
    """Bin a run's invocations by the start of their batch, from its first arrival on, reading `batches.csv`
    in pieces.

    A batch of loop_count 4 counts as 4 invocations of its rows, so that the mean over bins weighted by their
    invocations is `rows_per_recurrent_invocation`.
    """
    first_ns = float(run.summary["first_arrival_ns"])
    edges_ns = first_ns + np.linspace(0, max(run_s(run.summary) * 1e9, 1.0), num_bins + 1)
    invocations, rows, decode = np.zeros(num_bins), np.zeros(num_bins), np.zeros(num_bins)
    for frame in run.batch_frames(COLUMNS):
        loops = frame["loop_count"].to_numpy(dtype=np.float64)
        at = np.clip(
            np.searchsorted(edges_ns, frame["started_ns"].to_numpy(), side="right") - 1, 0, num_bins - 1
        )
        decode_rows = frame["ranges"].str.count(":RECURRENT:").to_numpy(dtype=np.float64)
        invocations += np.bincount(at, loops, num_bins)
        rows += np.bincount(at, loops * frame["rows"].to_numpy(dtype=np.float64), num_bins)
        decode += np.bincount(at, loops * decode_rows, num_bins)
    invocations[invocations == 0] = np.nan
    return RowBins(edges_ns / 1e6, (rows - decode) / invocations, decode / invocations)
