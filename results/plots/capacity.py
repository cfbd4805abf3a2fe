"""The load at which the objectives still hold, by policy and chunk size: what to run, at a glance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from results.capacity import Row, objectives, winner
from results.identity import policy_order
from results.plots.style import INK, MUTED, picture, policy_styles, say_nothing_to_show


def plot_capacity(rows: Sequence[Row], path: Path, slo: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
    """One panel for each workload, one line for each policy over chunk sizes; the best fixed chunk ringed; a
    policy that chooses its chunks itself is a level line."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    styles = policy_styles([row.policy for row in rows])
    is_rate = rows[0].answers[0]["axis"] == "rate"
    several = any(item["replicas"] > 1 for row in rows for item in row.answers)
    with picture(path, max(5.2 * len(workloads), 7.2), 4.8) as figure:
        grid = figure.subplots(1, len(workloads), squeeze=False)
        for axes, workload in zip(grid.flat, workloads, strict=True):
            _draw_panel(axes, [row for row in rows if row.workload == workload], styles, is_rate)
            axes.set_title(workload)
            axes.set_xlabel("prompt chunk, tokens")
            axes.set_ylabel(
                "cards needed  (better downwards)" if not is_rate
                else f"requests/s{' per card' if several else ''}  (better upwards)"
            )  # fmt: skip
        handles = {
            text: line
            for axes in grid.flat
            for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        ordered = sorted(handles, key=lambda text: (text.startswith("best"), policy_order(text)))
        figure.legend(
            [handles[text] for text in ordered], ordered, loc="outside lower left", ncols=len(ordered)
        )
        figure.suptitle(
            "\n".join([f"Capacity: {objectives(slo)}", *notes]),
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=10.5,
        )


def _draw_panel(axes: Axes, rows: Sequence[Row], styles: dict[str, tuple[str, str]], is_rate: bool) -> None:
    able = [row for row in rows if row.value is not None]
    if not able:
        say_nothing_to_show(axes, "out of reach even for a request alone")
        return
    chunks = sorted({row.chunk_tokens for row in rows})
    for policy in dict.fromkeys(row.policy for row in able):
        mine = [row for row in able if row.policy == policy]
        color, dash = styles[policy]
        xs, ys = [row.chunk_tokens for row in mine], [_height(row, is_rate) for row in mine]
        if not mine[0].is_fixed and len(mine) == 1:
            axes.axhline(ys[0], color=color, ls="-.", lw=1.6, zorder=1, label=policy)
        else:
            axes.plot(
                xs, ys, ls=dash, color=color, marker="o", ms=5.5, mec="white", mew=0.8, zorder=2, label=policy
            )
        spread = [row for row in mine if row.low is not None]
        if spread:
            axes.errorbar(
                [row.chunk_tokens for row in spread],
                [_height(row, is_rate) for row in spread],
                yerr=[_half(row, is_rate) for row in spread],
                fmt="none", color=color, capsize=3, lw=1.2, zorder=3,
            )  # fmt: skip
    best = winner(rows, fixed_only=True)
    if best is not None:
        x, y = best.chunk_tokens, _height(best, is_rate)
        axes.plot(
            [x],
            [y],
            ls="",
            marker="o",
            ms=14,
            mfc="none",
            mec=INK,
            mew=1.6,
            zorder=4,
            label="best fixed chunk",
        )
        axes.annotate(
            f"{best.policy} at {x}: {y:.3g}", (x, y), xytext=(0, 12), textcoords="offset points", ha="center",
            color=INK, fontweight="bold",
        )  # fmt: skip
    if len(chunks) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(chunks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    missing = sorted({(row.policy, row.chunk_tokens) for row in rows if row.value is None})
    if missing:
        text = ", ".join(f"{policy} at {chunk}" for policy, chunk in missing)
        axes.text(
            0.01,
            0.01,
            f"out of reach: {text}",
            transform=axes.transAxes,
            color=MUTED,
            fontsize=7.5,
            wrap=True,
        )
    axes.margins(0.12, 0.16)
    axes.set_ylim(bottom=0)


def _height(row: Row, is_rate: bool) -> float:
    return float((row.per_card if is_rate else row.value) or 0.0)


def _half(row: Row, is_rate: bool) -> float:
    """Half of the interval, on the scale of the picture."""
    assert row.low is not None and row.high is not None and row.value is not None
    return (row.high - row.low) / 2 * (_height(row, is_rate) / row.value)
