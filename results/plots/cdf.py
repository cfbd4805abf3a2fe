"""TTFT, ITL and E2E as cumulative distributions: one column per latency, one row per chunk size, one line per
policy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray

from results.identity import policy_order
from results.load import Run
from results.plots.style import MUTED, picture, policy_styles, say_nothing_to_show, width_under

MAX_POINTS = 2_000
"""Steps per line; more cannot be seen."""
LOG_FROM_RATIO = 30.0
COLUMNS = (("TTFT", "ttft_ns"), ("ITL", "itl_ns"), ("E2E", "e2e_ns"))


def plot_latency_cdfs(runs: Sequence[Run], path: Path) -> None:
    """Draw `runs`, which should share a workload, to `path`. The time axis is logarithmic where the samples
    span 30-fold.

    Markers show p50 and p99 of every line, a dotted line the objective of runs that have one. Columns without
    a sample say why.
    """
    runs = sorted(runs, key=lambda run: (run.chunk_tokens, policy_order(run.policy)))
    chunks = sorted({run.chunk_tokens for run in runs})
    styles = policy_styles([run.policy for run in runs])
    samples = [run.latencies() for run in runs]
    with picture(path, 11.5, 0.9 + 2.5 * len(chunks)) as figure:
        grid = figure.subplots(len(chunks), 3, squeeze=False, sharex="col", sharey=True)
        for column, (name, field) in enumerate(COLUMNS):
            values = [getattr(item, field) / 1e6 for item in samples]
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
                for limit_ms in {objective_ms(run, name) for run, _ in shown} - {None}:
                    axes.axvline(limit_ms, color=MUTED, lw=1, ls=":")
                if is_log:
                    axes.set_xscale("log")
                    label_log(axes)
                else:
                    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
                axes.set_title(f"{name} · chunk {chunk}" if len(chunks) > 1 or column == 0 else name)
                axes.set_ylim(0, 1.02)
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
                if row == len(chunks) - 1:
                    axes.set_xlabel(f"{name}, ms" + (" (log)" if is_log else ""))
                if column == 0:
                    axes.set_ylabel("share of requests (ITL: gaps)")
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
    """The cumulative distribution of `values`, at most `MAX_POINTS` steps of it, with marks at p50 and
    p99."""
    ordered = np.sort(values)
    share = np.arange(1, len(ordered) + 1) / len(ordered)
    if len(ordered) > MAX_POINTS:
        keep = np.unique(np.linspace(0, len(ordered) - 1, MAX_POINTS).astype(np.int64))
        ordered, share = ordered[keep], share[keep]
    xs, ys = np.concatenate(([ordered[0]], ordered)), np.concatenate(([0.0], share))
    axes.step(xs, ys, where="post", color=color, ls=dash, lw=width, label=label)
    marks = np.percentile(values, (50, 99))
    axes.plot(marks, (0.5, 0.99), ls="", marker="o", ms=4, color=color, mec="white", mew=0.8, zorder=3)


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
