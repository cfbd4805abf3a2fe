"""Latency against the offered rate, and goodput against tail latency: what a setting sustains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from policies.core.errors import InputError
from results.identity import policy_order
from results.load import Run
from results.plots.pareto import WIDE, draw_series, label_chunks, no_closer
from results.plots.style import (
    MUTED,
    OBJECTIVE,
    log_scales,
    picture,
    policy_styles,
    say_nothing_to_show,
    width_under,
)
from results.tradeoff import Load, Point, loads_of, objective_of, offered

MOST_ROWS = 8
PANELS_PER_ROW = 3
WORLDS = {"sim": "simulated", "executor": "measured"}
SIZED = "slo"
"""The policy whose chunks have no fixed size: points beyond the curves of those that have."""


def plot_load(runs: Sequence[Run], path: Path) -> None:
    """Draw p99 TTFT and p99 ITL against the offered rate to `path`, and goodput where there are objectives: a
    row per traffic, a line per policy and chunk size, which stands at its end. Raises `InputError` when
    nothing ran at two rates."""
    loads = loads_of(runs)[:MOST_ROWS]
    if not loads:
        raise InputError("no traffic of these runs was offered at two rates, expected a sweep over one")
    styles = policy_styles([run.policy for run in runs])
    columns: list[tuple[str, str, str]] = [
        ("ttft_ms", "p99", "p99 TTFT, ms"),
        ("itl_ms", "p99", "p99 ITL, ms"),
    ]
    if any(run.summary.get("slo") for load in loads for run in load.runs):
        columns.append(("slo", "goodput", "goodput, requests/s"))
    with picture(path, 4.4 * len(columns), 1.1 + 3.4 * len(loads)) as figure:
        grid = figure.subplots(len(loads), len(columns), squeeze=False)
        for row, load in zip(grid, loads, strict=True):
            for axes, column in zip(row, columns, strict=True):
                _draw_load(axes, load, column, styles)
            row[0].set_title(load.name)
        _add_legend(figure, grid)
        title = "Latency against the offered rate; hollow marks missed their objective"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)


def _add_legend(figure: Figure, grid: NDArray[Any], most_columns: int | None = None) -> None:
    """One for all panels below them, each series once, in the policies' order."""
    handles = {
        text: line for axes in grid.flat for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    ordered = sorted(handles, key=policy_order)
    columns = min(len(ordered), most_columns or len(ordered)) or 1
    figure.legend([handles[text] for text in ordered], ordered, loc="outside lower left", ncols=columns)


def _draw_load(
    axes: Axes, load: Load, column: tuple[str, str, str], styles: dict[str, tuple[str, str]]
) -> None:
    key, statistic, name = column
    is_latency = key != "slo"
    policies = list(dict.fromkeys(policy for policy, _ in load.series))
    values: list[float] = []
    for place, ((policy, chunk), runs) in enumerate(load.series.items()):
        points = [
            Point(policy, chunk, offered(run), float(value), (run.summary.get("slo") or {}).get("holds"))
            for run in runs
            if (value := (run.summary.get(key) or {}).get(statistic)) is not None
        ]
        if not points:
            continue
        is_first = policy not in [other for other, _ in list(load.series)[:place]]
        draw_series(
            axes,
            points,
            policy if is_first else "_",
            styles[policy],
            width_under(policies.index(policy), len(policies)) * 0.7,
        )
        axes.annotate(
            str(chunk), (points[-1].x, points[-1].y), xytext=(6, 0), textcoords="offset points", va="center",
            fontsize=7.5, color=styles[policy][0],
        )  # fmt: skip
        values += [point.y for point in points]
    if not values:
        say_nothing_to_show(axes, f"no {name}")
        return
    axes.set_xlabel("offered, requests/s")
    axes.set_ylabel(name)
    axes.margins(0.09, 0.08)
    if is_latency and min(values) > 0 and max(values) > WIDE * min(values):
        log_scales(axes, x=False, y=True)
    limit = objective_of(load.runs).get(key)
    if limit is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 1.04 * limit) if limit < 4 * high else high)
        axes.axhspan(low, limit, color=OBJECTIVE, alpha=0.13, lw=0, zorder=0)
        axes.axhline(limit, color=MUTED, lw=1, ls=":", zorder=0)
    if not is_latency:
        ends = (0.0, axes.get_xlim()[1])
        axes.plot(ends, ends, color=MUTED, lw=0.8, zorder=0)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)


def plot_goodput(runs: Sequence[Run], path: Path) -> None:
    """Draw p99 ITL against goodput to `path`: a row per workload and objective, simulated and measured runs
    side by side over the same axes. Policies with fixed chunks are curves over chunk sizes, `slo` is a star
    for each of its runs. Raises `InputError` when no run has objectives."""
    judged = [
        run
        for run in runs
        if (run.summary.get("slo") or {}).get("goodput") is not None
        and run.summary["itl_ms"]["p99"] is not None
    ]
    if not judged:
        raise InputError("no run has objectives and tokens to hold to them, expected runs with `slo`")
    groups: dict[tuple[str, tuple[tuple[str, float], ...]], list[Run]] = {}
    for run in judged:
        groups.setdefault((run.workload, tuple(objective_of([run]).items())), []).append(run)
    worlds = [name for name in WORLDS if any(run.summary["world"] == name for run in judged)]
    cells = [(key, mine, world) for key, mine in list(groups.items())[:MOST_ROWS] for world in worlds]
    columns = len(worlds) if len(worlds) > 1 else min(len(cells), PANELS_PER_ROW)
    rows, shared = -(-len(cells) // columns), "row" if len(worlds) > 1 else False
    styles = policy_styles([run.policy for run in judged])
    with picture(path, max(4.9 * columns, 6.4), 1.1 + 3.5 * rows) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared)  # type: ignore[arg-type]
        panels = []
        for axes in grid.flat[len(cells) :]:
            axes.set_axis_off()
        for axes, ((workload, objective), mine, world) in zip(grid.flat, cells, strict=False):
            here = [run for run in mine if run.summary["world"] == world]
            if not here:
                say_nothing_to_show(axes, f"{workload}: nothing {WORLDS[world]}")
                continue
            panels.append((axes, _draw_goodput(axes, here, styles)))
            spread = [run.summary["itl_ms"]["p99"] for run in mine]
            if max(spread) > WIDE * min(spread) > 0:
                log_scales(axes, x=False, y=True)
            if (limit := dict(objective).get("itl_ms")) is not None:
                axes.axhline(limit, color=MUTED, lw=1, ls=":", zorder=0)
            limits = ", ".join(
                f"{name.removesuffix('_ms').upper()} {value:g} ms" for name, value in objective
            )
            axes.set_title(f"{workload} · {WORLDS[world]}\n{limits}", fontsize=9)
            axes.set_xlabel("goodput, requests/s  (better to the right)")
            axes.set_ylabel("p99 ITL, ms  (better downwards)")
            axes.autoscale_view()
            axes.set_xlim(*no_closer(*axes.get_xlim()))
        figure.draw_without_rendering()
        for axes, points in panels:
            label_chunks(axes, points, styles)
        _add_legend(figure, grid, most_columns=4)
        title = "Tail of the gaps against goodput; hollow marks missed their objective"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)


def _draw_goodput(axes: Axes, runs: Sequence[Run], styles: dict[str, tuple[str, str]]) -> list[Point]:
    """The fixed chunk sizes' curves and the others' stars; returns the points."""
    points = [
        Point(
            run.policy,
            run.chunk_tokens,
            float(run.summary["slo"]["goodput"]),
            float(run.summary["itl_ms"]["p99"]),
            run.summary["slo"].get("holds"),
        )
        for run in sorted(runs, key=lambda run: (policy_order(run.policy), run.chunk_tokens))
    ]
    policies = list(dict.fromkeys(point.policy for point in points))
    for place, policy in enumerate(policies):
        mine = [point for point in points if point.policy == policy]
        color, dash = styles[policy]
        is_sized = policy.split(" ", 1)[0] == SIZED
        draw_series(
            axes, mine, policy, (color, "" if is_sized else dash), width_under(place, len(policies)) * 0.7,
            "*" if is_sized else "o",
        )  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.5g}"))
    axes.margins(0.1, 0.12)
    return points
