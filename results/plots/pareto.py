"""Which setting to run: one panel per workload, one line per policy over its chunk sizes, the front ringed.

Throughput against tail latency, or, below saturation, one tail latency against the other
(`results.tradeoff`), with what objectives allow as a box.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from results.identity import policy_order
from results.load import Run
from results.plots.style import (
    INK,
    MUTED,
    OBJECTIVE,
    log_scales,
    picture,
    policy_styles,
    say_nothing_to_show,
    width_under,
)
from results.tradeoff import Point, Tradeoff, front, tradeoff_of

PANELS_PER_ROW = 3
MOST_LABELS = 150
WIDE = 8.0
"""From which ratio of the largest figure to the smallest on an axis is logarithmic."""
LEAST_SPAN = 0.05
"""Of an axis of throughputs, as a part of what is on it."""
LABEL_PLACES = (
    (0, 9), (0, -11), (13, 0), (-13, 0), (10, 8), (-10, 8), (10, -9), (-10, -9), (0, 17), (0, -19), (20, 10),
    (-20, -10),
)  # fmt: skip
"""Where a point's label may stand, in points from its middle; earlier is preferred."""


def plot_pareto(runs: Sequence[Run], path: Path) -> None:
    """Draw all `runs` to `path`, each workload by the two figures that tell its runs apart. Hollow marks
    missed their objectives."""
    workloads = list(dict.fromkeys(run.workload for run in runs))
    styles = policy_styles([run.policy for run in runs])
    columns = min(len(workloads), PANELS_PER_ROW)
    rows = math.ceil(len(workloads) / columns)
    found = [tradeoff_of([run for run in runs if run.workload == workload]) for workload in workloads]
    with picture(path, max(4.6 * columns, 6.4), 0.9 + 3.7 * rows) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(workloads) :]:
            axes.set_axis_off()
        for axes, workload, item in zip(grid.flat, workloads, found, strict=False):
            if not item.points:
                say_nothing_to_show(axes, f"{workload}: no finished request")
                continue
            _draw_panel(axes, item, styles)
            axes.set_title(workload)
            axes.set_xlabel(f"{item.x_name}  (better to the left)")
            axes.set_ylabel(f"{item.y_name}  (better {'upwards' if item.y_rises else 'downwards'})")
        figure.draw_without_rendering()
        for axes, item in zip(grid.flat, found, strict=False):
            label_chunks(axes, item.points, styles)
        handles = {
            text: line
            for axes in grid.flat
            for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        ordered = sorted(
            handles, key=lambda text: (text in ("Pareto front", "objective"), policy_order(text))
        )
        figure.legend(
            [handles[text] for text in ordered], ordered, loc="outside lower left", ncols=len(ordered) or 1
        )
        is_below = [not item.y_rises for item in found if item.points]
        title = (
            "Tail latencies by chunk size"
            if all(is_below)
            else "Throughput against tail latency by chunk size"
        )
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)


def _draw_panel(axes: Axes, item: Tradeoff, styles: dict[str, tuple[str, str]]) -> None:
    points, best = item.points, front(item.points, item.y_rises)
    axes.plot(
        [point.x for point in best], [point.y for point in best],
        ls="" if len(best) == 1 else "-", color=INK, alpha=0.25, lw=6, solid_capstyle="round", marker="o",
        ms=13, mew=0, zorder=1, label="Pareto front",
    )  # fmt: skip
    policies = list(dict.fromkeys(point.policy for point in points))
    for place, policy in enumerate(policies):
        mine = [point for point in points if point.policy == policy]
        width = width_under(place, len(policies))
        draw_series(axes, mine, policy, styles[policy], width)
    for is_x, values in ((True, [point.x for point in points]), (False, [point.y for point in points])):
        axis = axes.xaxis if is_x else axes.yaxis
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.5g}"))
        if min(values) > 0 and max(values) > WIDE * min(values) and (is_x or not item.y_rises):
            log_scales(axes, x=is_x, y=not is_x)
    axes.margins(0.12, 0.14)
    axes.autoscale_view()
    if item.y_rises:
        axes.set_ylim(*no_closer(*axes.get_ylim()))
    draw_box(axes, *item.box)


def draw_series(
    axes: Axes, points: Sequence[Point], label: str, style: tuple[str, str], width: float, marker: str = "o"
) -> None:
    """A line through `points`, filled marks on it where objectives were kept or there are none, hollow ones
    else."""
    color, dash = style
    axes.plot(
        [point.x for point in points], [point.y for point in points], ls=dash, color=color, lw=width, zorder=2
    )
    for is_kept in (True, False):
        mine = [point for point in points if (point.holds is not False) is is_kept]
        axes.plot(
            [point.x for point in mine], [point.y for point in mine], ls="", marker=marker,
            ms=6 if marker == "o" else 11, color=color, mfc=color if is_kept else "white",
            mec="white" if is_kept else color, mew=0.9 if is_kept else 1.3, zorder=3,
            label=label if is_kept or len(mine) == len(points) else None,
        )  # fmt: skip


def draw_box(axes: Axes, x: float | None, y: float | None) -> None:
    """What objectives allow, from the axes' corner on, within the limits that the data has set where those
    lie further in; a line beyond which nothing may lie where only one is given."""
    if x is None and y is None:
        return
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    if x is not None:
        right = max(right, 1.04 * x) if x < 4 * right else right
    if y is not None:
        high = max(high, 1.04 * y) if y < 4 * high else high
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    width = (right if x is None else min(x, right)) - left
    height = (high if y is None else min(y, high)) - low
    if width > 0 and height > 0:
        axes.add_patch(
            Rectangle(
                (left, low), width, height, fc=OBJECTIVE, ec="none", alpha=0.13, zorder=0, label="objective"
            )
        )
    for limit, draw in ((x, axes.axvline), (y, axes.axhline)):
        if limit is not None:
            draw(limit, color=MUTED, lw=1, ls=":", zorder=0)


def no_closer(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis, at least `LEAST_SPAN` of their middle apart: what differs by less is the same."""
    middle = (low + high) / 2
    half = max(high - low, LEAST_SPAN * middle) / 2
    return middle - half, middle + half


def label_chunks(axes: Axes, points: Sequence[Point], styles: dict[str, tuple[str, str]]) -> None:
    """Write each point's chunk beside it, at the first of `LABEL_PLACES` that overlaps least with points and
    earlier labels."""
    if not points or len(points) > MOST_LABELS:
        return
    scale = axes.figure.dpi / 72
    centers = [tuple(axes.transData.transform((point.x, point.y))) for point in points]
    taken = [Bbox.from_bounds(x - 4 * scale, y - 4 * scale, 8 * scale, 8 * scale) for x, y in centers]
    for point, (x, y) in zip(points, centers, strict=True):
        width, height = 5.2 * scale * len(str(point.chunk_tokens)), 8 * scale
        corners = [(x + dx * scale - width / 2, y + dy * scale - height / 2) for dx, dy in LABEL_PLACES]
        boxes = [Bbox.from_bounds(left, bottom, width, height) for left, bottom in corners]
        costs = [sum(_overlap(box, other) for other in taken) for box in boxes]
        place = int(np.argmin(costs))
        taken.append(boxes[place])
        axes.annotate(
            str(point.chunk_tokens), (point.x, point.y), xytext=LABEL_PLACES[place],
            textcoords="offset points", ha="center", va="center", fontsize=7.5, color=styles[point.policy][0],
            zorder=4, path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip


def _overlap(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else float(common.width * common.height)
