"""Goodput over the load: a policy that sizes its chunks beside the best fixed setting at each load."""

from pathlib import Path

import pandas as pd

from results.plots.style import INK, MUTED, picture

SIZED, FIXED = "#0b6e4f", "#c1440e"


def plot_hindsight(frame: pd.DataFrame, path: Path) -> None:
    """One panel for every traffic (down) and objectives (across) of `results.hindsight`'s table."""
    traffics = list(dict.fromkeys(frame["traffic"]))
    objectives = list(dict.fromkeys(zip(frame["ttft_ms"], frame["itl_ms"], strict=True)))
    with picture(path, max(3.7 * len(objectives) + 0.6, 6.4), 2.5 * len(traffics) + 1.0) as figure:
        grid = figure.subplots(len(traffics), len(objectives), squeeze=False)
        for line, traffic in zip(grid, traffics, strict=True):
            for axes, (ttft_ms, itl_ms) in zip(line, objectives, strict=True):
                is_mine = (frame["traffic"] == traffic) & (frame["ttft_ms"] == ttft_ms)
                mine = frame[is_mine & (frame["itl_ms"] == itl_ms)].sort_values("load")
                axes.set_title(f"{traffic}: {ttft_ms:g} ms, then {itl_ms:g} ms", fontsize=9)
                if mine.empty:
                    axes.set_axis_off()
                    continue
                axes.plot(mine["rate"], mine["rate"], color=MUTED, lw=0.8, label="all met")
                axes.plot(
                    mine["rate"], mine["fixed_goodput"], color=FIXED, marker="s", ms=4, label="best fixed"
                )
                axes.plot(mine["rate"], mine["sized_goodput"], color=SIZED, marker="o", ms=4, label="slo")
                for row in mine.itertuples():
                    gain = row.sized_met / row.fixed_met - 1 if row.fixed_met else float("inf")
                    if abs(gain) >= 0.005:
                        axes.annotate(
                            f"{gain:+.0%}",
                            (row.rate, row.sized_goodput),
                            xytext=(0, 6),
                            textcoords="offset points",
                            ha="center",
                            fontsize=8,
                            color=INK,
                        )
                axes.set_ylim(bottom=0, top=1.15 * float(mine["rate"].max()))
        for axes in grid[-1]:
            axes.set_xlabel("requests/s offered")
        for axes in grid[:, 0]:
            axes.set_ylabel("goodput, requests/s")
        handles, labels = next(
            (found for axes in grid.flat if (found := axes.get_legend_handles_labels())[0]), ([], [])
        )
        figure.legend(handles, labels, loc="outside lower left", ncols=3)
        figure.suptitle(
            "Goodput beside the best fixed setting in hindsight",
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11.5,
        )
