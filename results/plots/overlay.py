"""Both sides of one workload over one another: latency distributions and queues, measured in full lines,
simulated in dashes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from results.comparison.compare import Cell
from results.comparison.requests import queue_steps
from results.load import Run
from results.plots.cdf import draw_cdf, is_wide, label_log, tail_axis
from results.plots.style import INK, picture, policy_styles, say_nothing_to_show

COLUMNS = (("TTFT", "ttft_ns"), ("ITL", "itl_ns"), ("TPOT", "tpot_ns"), ("E2E", "e2e_ns"))


def plot_overlaid_cdfs(cells: Sequence[Cell], path: Path) -> None:
    """Draw the distributions of `cells`, which share a workload and have logs on both sides, to `path`: a row
    per policy."""
    styles = policy_styles([cell.pair.predicted.policy for cell in cells])
    with picture(path, 12, 0.9 + 2.1 * len(cells)) as figure:
        grid = figure.subplots(len(cells), len(COLUMNS), squeeze=False, sharex="col", sharey=True)
        samples = [[run.latencies() for run in _sides(cell)] for cell in cells]
        most = max(len(side.itl_ns) for sides in samples for side in sides)
        for column, (name, field) in enumerate(COLUMNS):
            is_log = is_wide([getattr(side, field) / 1e6 for sides in samples for side in sides])
            for row, (cell, sides) in enumerate(zip(cells, samples, strict=True)):
                axes = grid[row, column]
                color = styles[cell.pair.predicted.policy][0]
                for side, dash in zip(sides, ("--", "-"), strict=True):
                    values = getattr(side, field) / 1e6
                    if len(values):
                        draw_cdf(axes, values, "", color, dash, 1.6)
                    else:
                        say_nothing_to_show(axes, f"no {name}")
                if is_log:
                    axes.set_xscale("log")
                    label_log(axes)
                else:
                    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
                tail_axis(axes, most)
                if column == 0:
                    axes.set_title(cell.pair.predicted.policy)
                if row == len(cells) - 1:
                    axes.set_xlabel(f"{name}, ms" + (" (log)" if is_log else ""))
        figure.legend(handles=_line_kinds(), loc="outside upper right", ncols=2)
        figure.suptitle(
            f"Latency on {cells[0].pair.workload}", x=0.01, ha="left", fontweight="bold", fontsize=11.5
        )


def plot_queues(cells: Sequence[Cell], path: Path) -> None:
    """Draw how many requests wait over time in `cells`, which share a workload and have logs, to `path`: a
    panel per policy."""
    styles = policy_styles([cell.pair.predicted.policy for cell in cells])
    with picture(path, 10, 0.9 + 1.6 * len(cells)) as figure:
        grid = figure.subplots(len(cells), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axes, cell in zip(grid, cells, strict=True):
            color = styles[cell.pair.predicted.policy][0]
            for run, dash in zip(_sides(cell), ("--", "-"), strict=True):
                times, depth = queue_steps(run.requests())
                axes.step(
                    np.concatenate(([0.0], times)),
                    np.concatenate(([0], depth)),
                    where="post",
                    color=color,
                    ls=dash,
                    lw=1.3,
                )
            assert cell.queues is not None
            predicted, measured = cell.queues
            waits = f"{measured.mean_depth:,.1f} wait in the mean (simulated {predicted.mean_depth:,.1f})"
            axes.set_title(
                f"{cell.pair.predicted.policy} · {waits} · {measured.verdict} (simulated: "
                f"{predicted.verdict})"
            )
            axes.set_ylabel("requests")
            axes.set_ylim(
                0, 1.05 * max(1, *(queue.max_depth for item in cells for queue in item.queues or ()))
            )
        grid[-1].set_xlabel("time from the first arrival, s")
        figure.legend(handles=_line_kinds(), loc="outside upper right", ncols=2)
        figure.suptitle(
            f"Waiting requests on {cells[0].pair.workload}",
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11.5,
        )


def _sides(cell: Cell) -> tuple[Run, Run]:
    logged = cell.pair.logged
    assert logged is not None
    return cell.pair.predicted, logged


def _line_kinds() -> list[Line2D]:
    return [
        Line2D([], [], color=INK, ls=dash, label=text)
        for text, dash in (("measured", "-"), ("simulated", "--"))
    ]
