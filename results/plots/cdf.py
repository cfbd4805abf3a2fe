"""TTFT, ITL and E2E as cumulative distributions: one column per latency, one row per chunk size, one line per
policy. The axis of shares is stretched towards the tail: p50, p90, p99 and p99.9 lie equally far apart,
nearly."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from results.identity import policy_order
from results.load import Run
from results.plots.style import MUTED, picture, policy_styles, say_nothing_to_show, width_under

MAX_POINTS = 2_000
"""Steps per line; more cannot be seen."""
LOG_FROM_RATIO = 30.0
TAIL_MARKS = (0.5, 0.1, 0.01, 0.001, 0.0001)
LEAST_TAIL = 0.004
"""Share of samples above the axis' end where there are too few for more: p99 is always on it."""
COLUMNS = (("TTFT", "ttft_ns"), ("ITL", "itl_ns"), ("E2E", "e2e_ns"))


def plot_latency_cdfs(runs: Sequence[Run], path: Path) -> None:
    """Draw `runs`, which should share a workload, to `path`. The time axis is logarithmic where the samples
    span 30-fold.

    A dotted line with its number is the objective of runs that have one. Columns without a sample say why.
    """
    runs = sorted(runs, key=lambda run: (run.chunk_tokens, policy_order(run.policy)))
    chunks = sorted({run.chunk_tokens for run in runs})
    styles = policy_styles([run.policy for run in runs])
    samples = [run.latencies() for run in runs]
    with picture(path, 11.5, 0.9 + 2.5 * len(chunks)) as figure:
        grid = figure.subplots(len(chunks), 3, squeeze=False, sharex="col", sharey="col")
        for column, (name, field) in enumerate(COLUMNS):
            values = [getattr(item, field) / 1e6 for item in samples]
            most = max(map(len, values))
            is_log = is_wide(values)
            for row, chunk in enumerate(chunks):
                axes = grid[row, column]
                shown = [
                    (run, value)
                    for run, value in zip(runs, values, strict=True)
                    if run.chunk_tokens == chunk and len(value)
                ]
                if not shown:
                    reason = (
                        "every request has one output token" if name == "ITL" else "no request got this far"
                    )
                    say_nothing_to_show(axes, f"no {name}: {reason}")
                    continue
                for place, (run, value) in enumerate(shown):
                    color, dash = styles[run.policy]
                    draw_cdf(axes, value, run.policy, color, dash, width_under(place, len(shown)))
                tail_axis(axes, most)
                for limit_ms in {objective_ms(run, name) for run, _ in shown} - {None}:
                    axes.axvline(limit_ms, color=MUTED, lw=1, ls=":")
                    axes.text(
                        limit_ms, 0.98, f" {limit_ms:g}", transform=axes.get_xaxis_transform(), va="top",
                        fontsize=7.5, color=MUTED,
                    )  # fmt: skip
                if is_log:
                    axes.set_xscale("log")
                    label_log(axes)
                else:
                    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
                axes.set_title(f"{name} · chunk {chunk}" if len(chunks) > 1 or column == 0 else name)
                if row == len(chunks) - 1:
                    axes.set_xlabel(f"{name}, ms" + (" (log)" if is_log else ""))
                if column == 0:
                    axes.set_ylabel("percentile of requests (ITL: gaps)")
        handles = {
            text: line
            for axes in grid.flat
            for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=max(len(handles), 1))
        figure.suptitle(f"Latency on {runs[0].workload}", x=0.01, ha="left", fontweight="bold", fontsize=11.5)


def objective_ms(run: Run, name: str) -> float | None:
    """What `slo` allows of the latency called `name`; of an ITL, at the p99 of each request's own gaps."""
    return (run.summary.get("slo") or {}).get(f"{name.lower()}_ms")


def draw_cdf(
    axes: Axes, values: NDArray[np.float64], label: str, color: str, dash: str, width: float
) -> None:
    """The share of `values` that is larger than x, at most `MAX_POINTS` steps of it, for a `tail_axis`."""
    shown, larger = tail_steps(values)
    axes.step(shown, larger, where="post", color=color, ls=dash, lw=width, label=label)


def tail_steps(
    values: NDArray[np.float64], max_points: int = MAX_POINTS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ascending values and the share of all that is larger than each, from all of them down to half a
    sample's worth. As many points are kept in every tenfold of the tail, so that the last ones all are. Of 1,
    2, 3, 4: (1, 1, 2, 3, 4) and (1, 0.75, 0.5, 0.25, 0.125)."""
    ordered, num = np.sort(values), len(values)
    rank = np.arange(1, num + 1)
    if num > max_points:
        tail = np.geomspace(1, num, max_points).astype(np.int64)
        rank = np.unique(num + 1 - tail)
    larger = np.maximum(num - rank, 0.5) / num
    return np.concatenate((ordered[:1], ordered[rank - 1])), np.concatenate(([1.0], larger))


def tail_axis(axes: Axes, num_samples: int) -> None:
    """Make y the percentile of a `draw_cdf`: the share that is larger on a logarithmic scale, upside down."""
    end = min(LEAST_TAIL, max(0.5 / max(num_samples, 1), TAIL_MARKS[-1] / 2))
    axes.set_yscale("log")
    axes.set_ylim(1.0, end)
    marks = [mark for mark in TAIL_MARKS if mark >= end]
    axes.yaxis.set_major_locator(FixedLocator(marks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"p{100 * (1 - value):.6g}"))


def is_wide(values: Sequence[NDArray[np.float64]]) -> bool:
    """Whether the bulk of all samples (p0.5 to the maximum) spans more than `LOG_FROM_RATIO`."""
    filled = [value for value in values if len(value)]
    if not filled:
        return False
    low = min(float(np.percentile(value, 0.5)) for value in filled)
    high = max(float(value.max()) for value in filled)
    return low > 0 and high / low > LOG_FROM_RATIO


def label_log(axes: Axes) -> None:
    """Plain numbers at the decades of a logarithmic x axis."""
    axes.xaxis.set_major_locator(LogLocator(10, numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", color=MUTED, length=2)
