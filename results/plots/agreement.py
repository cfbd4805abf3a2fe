"""The picture of a whole comparison: every figure of every pair of runs, simulated against measured."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from results.comparison.compare import Cell
from results.comparison.figures import THROUGHPUT, Tolerances, by_label
from results.identity import policy_order
from results.plots.style import FAINT, INK, agreement_axes, picture, policy_styles, say_nothing_to_show

PANELS = ((THROUGHPUT, "req/s", (THROUGHPUT,)), ("TTFT", "ms", ("TTFT p50", "TTFT p99")), ("ITL", "ms",
("ITL p50", "ITL p99")),
          ("E2E", "ms", ("E2E p50", "E2E p99")))  # fmt: skip


def plot_agreement(cells: Sequence[Cell], tolerances: Tolerances, path: Path) -> None:
    """Draw throughput, TTFT, ITL and E2E of `cells` to `path`; p50 are filled marks, p99 hollow ones; bands
    are the tolerances."""
    policies = sorted({cell.pair.predicted.policy for cell in cells}, key=policy_order)
    styles = policy_styles(policies)
    with picture(path, 13, 4.1) as figure:
        for axes, (name, unit, labels) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            points = [
                (found[label], styles[cell.pair.predicted.policy][0], label.endswith("p99"))
                for cell in cells
                for found in [by_label(cell.figures)]
                for label in labels
                if label in found
            ]
            axes.set_title(name)
            if not points:
                say_nothing_to_show(axes, f"no {name}")
                continue
            values = np.array([[item.measured, item.predicted] for item, _, _ in points])
            low, high = float(values.min()) / 1.25, float(values.max()) * 1.25
            for statistic, shade in ((points[-1][0].statistic, FAINT), (points[0][0].statistic, "#d1d5db")):
                width, ends = tolerances.of(statistic) or 0.0, np.array([low, high])
                axes.fill_between(ends, ends * (1 - width), ends * (1 + width), color=shade, lw=0)
            agreement_axes(axes, low, high)
            for item, color, is_hollow in points:
                axes.plot(
                    item.measured,
                    item.predicted,
                    "o",
                    ms=5,
                    mfc="none" if is_hollow else color,
                    mec=color,
                    mew=1.1,
                )
            axes.set_xlabel(f"measured, {unit} (log)")
        figure.axes[0].set_ylabel("simulated (log)")
        handles = [
            Line2D([], [], ls="", marker="o", color=styles[policy][0], label=policy) for policy in policies
        ]
        for text, fill in (("p50", INK), ("p99", "none")):
            handles.append(Line2D([], [], ls="", marker="o", mfc=fill, mec=INK, color=INK, label=text))
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        title = f"Simulated against measured: {len(cells)} configurations"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)
