"""Throughput against tail latency over chunk sizes: one panel per workload, one line per policy, the front
ringed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from results.identity import policy_order
from results.load import Run
from results.plots.style import INK, picture, policy_styles, say_nothing_to_show, width_under

PANELS_PER_ROW = 3
MOST_LABELS = 150
LABEL_PLACES = (
    (0, 9), (0, -11), (13, 0), (-13, 0), (10, 8), (-10, 8), (10, -9), (-10, -9), (0, 17), (0, -19), (20, 10),
    (-20, -10),
)  # fmt: skip
"""Where a point's label may stand, in points from its middle; earlier is preferred."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run: tail latency in ms (lower is better), throughput in tokens/s (higher is better)."""

    policy: str
    chunk_tokens: int
    latency_ms: float
    throughput: float


def plot_pareto(runs: Sequence[Run], path: Path) -> None:
    """Draw all `runs` to `path`: output tokens/s against p99 ITL; where a workload has no ITL, prompt
    tokens/s against p99 TTFT."""
    workloads = list(dict.fromkeys(run.workload for run in runs))
    styles = policy_styles([run.policy for run in runs])
    columns = min(len(workloads), PANELS_PER_ROW)
    rows = math.ceil(len(workloads) / columns)
    with picture(path, max(4.6 * columns, 6.4), 0.9 + 3.7 * rows) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(workloads) :]:
            axes.set_axis_off()
        for axes, workload in zip(grid.flat, workloads, strict=False):
            mine = [run for run in runs if run.workload == workload]
            points, latency, throughput = pareto_points(mine)
            if not points:
                say_nothing_to_show(axes, f"{workload}: no finished request")
                continue
            _draw_panel(axes, points, styles)
            axes.set_title(workload)
            axes.set_xlabel(f"p99 {latency}, ms  (better to the left)")
            axes.set_ylabel(f"{throughput} tokens/s  (better upwards)")
        figure.draw_without_rendering()
        for axes, workload in zip(grid.flat, workloads, strict=False):
            points, _, _ = pareto_points([run for run in runs if run.workload == workload])
            _label_chunks(axes, points, styles)
        handles = {
            text: line
            for axes in grid.flat
            for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        ordered = sorted(handles, key=lambda text: (text == "Pareto front", policy_order(text)))
        figure.legend(
            [handles[text] for text in ordered], ordered, loc="outside lower left", ncols=len(ordered)
        )
        figure.suptitle(
            "Throughput against tail latency by chunk size",
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11.5,
        )


def pareto_points(runs: Sequence[Run]) -> tuple[list[Point], str, str]:
    """The points of one workload's runs, and which latency and which throughput they show.

    ITL and output tokens if every run with a finished request has an ITL, else TTFT and prompt tokens.
    """
    data = [
        run
        for run in runs
        if run.summary["ttft_ms"]["p99"] is not None and run.summary["output_token_throughput"]
    ]
    has_itl = bool(data) and all(run.summary["itl_ms"]["p99"] is not None for run in data)
    latency, throughput = (
        ("itl_ms", "output_token_throughput") if has_itl else ("ttft_ms", "prompt_token_throughput")
    )
    points = [
        Point(
            run.policy, run.chunk_tokens, float(run.summary[latency]["p99"]), float(run.summary[throughput])
        )
        for run in data
    ]
    points.sort(key=lambda point: (policy_order(point.policy), point.chunk_tokens, point.latency_ms))
    return points, "ITL" if has_itl else "TTFT", "output" if has_itl else "prompt"


def front(points: Sequence[Point]) -> list[Point]:
    """Points that no other point beats in one figure without losing in the other, by latency. Equal points
    are all kept."""
    return sorted(
        (
            point
            for point in points
            if not any(
                other.latency_ms <= point.latency_ms
                and other.throughput >= point.throughput
                and (other.latency_ms, other.throughput) != (point.latency_ms, point.throughput)
                for other in points
            )
        ),
        key=lambda point: (point.latency_ms, point.throughput, point.policy, point.chunk_tokens),
    )


def _draw_panel(axes: Axes, points: Sequence[Point], styles: dict[str, tuple[str, str]]) -> None:
    best = front(points)
    axes.plot(
        [point.latency_ms for point in best], [point.throughput for point in best],
        ls="" if len(best) == 1 else "-", color=INK, alpha=0.25, lw=6, solid_capstyle="round", marker="o",
        ms=13, mew=0, zorder=1, label="Pareto front",
    )  # fmt: skip
    policies = list(dict.fromkeys(point.policy for point in points))
    for place, policy in enumerate(policies):
        mine = [point for point in points if point.policy == policy]
        color, dash = styles[policy]
        xs, ys = [point.latency_ms for point in mine], [point.throughput for point in mine]
        width = width_under(place, len(policies))
        axes.plot(
            xs,
            ys,
            ls=dash,
            color=color,
            lw=width,
            marker="o",
            ms=6,
            mec="white",
            mew=0.9,
            label=policy,
            zorder=2,
        )
    low, high = min(point.latency_ms for point in points), max(point.latency_ms for point in points)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    if low > 0 and high / low > 8:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
        axes.xaxis.set_minor_formatter(
            FuncFormatter(lambda value, _: f"{value:,.12g}" if f"{value:e}"[0] in "25" else "")
        )
    axes.margins(0.12, 0.14)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.5g}" if value < 1e5 else f"{value:,.0f}")
    )


def _label_chunks(axes: Axes, points: Sequence[Point], styles: dict[str, tuple[str, str]]) -> None:
    """Write each point's chunk beside it, at the first of `LABEL_PLACES` that overlaps least with points and
    earlier labels."""
    if not points or len(points) > MOST_LABELS:
        return
    scale = axes.figure.dpi / 72
    centers = [tuple(axes.transData.transform((point.latency_ms, point.throughput))) for point in points]
    taken = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in centers]
    for point, (x, y) in zip(points, centers, strict=True):
        width, height = 5.2 * scale * len(str(point.chunk_tokens)), 8 * scale
        corners = [(x + dx * scale - width / 2, y + dy * scale - height / 2) for dx, dy in LABEL_PLACES]
        boxes = [Bbox.from_bounds(left, bottom, width, height) for left, bottom in corners]
        costs = [sum(_overlap(box, other) for other in taken) for box in boxes]
        place = int(np.argmin(costs))
        taken.append(boxes[place])
        axes.annotate(
            str(point.chunk_tokens), (point.latency_ms, point.throughput), xytext=LABEL_PLACES[place],
            textcoords="offset points", ha="center", va="center", fontsize=7.5, color=styles[point.policy][0],
            zorder=4, path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip


def _overlap(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else float(common.width * common.height)
