"""Where a run's time went: the limit of every stage, what its batches took beyond, and why the device idled
between them.

One bar per run, from its first batch to its last. Where the summary splits device time into components (the
simulator's runs), the text beside the bar says which of them cost most; padding is known as a share of rows,
not of time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.identity import policy_order
from results.load import Run
from results.plots.style import MUTED, picture, say_nothing_to_show

GROUPS = {
    "prompt": ("PREFILL", "PREFILLING_PRELUDE", "PREFILLING_RECURRENT"),
    "decode and mixed": ("RECURRENT",),
    "prelude and coda": ("PRELUDE", "CODA"),
}
MOST_BARS = 64
COLORS = {"prompt": "#be123c", "decode and mixed": "#0f766e", "prelude and coda": "#4338ca"}
IDLE = {
    "idle: host chooses, packs, launches": "#9ca3af",
    "idle: launch": "#6b7280",
    "idle: nothing chosen yet": "#e5e7eb",
}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a bar, in seconds. `is_limit` tells a stage's physical limit from what it took beyond; idle
    parts have none."""

    name: str
    seconds: float
    is_limit: bool = False


def account(summary: Mapping[str, Any]) -> list[Share]:
    """The parts of a run's bar, in order; they add up to the device time and the idle time between batches.

    A stage that took 2 s at a limit fraction of 0.75 is 1.5 s of limit and 0.5 s beyond. One without a known
    limit is all beyond. Summaries from before idle time was split count it all as the last part.
    """
    shares = []
    for name, stages in GROUPS.items():
        data = [summary["stages"][stage] for stage in stages if stage in summary["stages"]]
        device_s = sum(item["device_s"] for item in data)
        limit_s = sum(item["device_s"] * (item["limit_fraction"] or 0.0) for item in data)
        shares += [Share(name, limit_s, True), Share(name, device_s - limit_s)]
    host_s, launch_s = summary.get("device_idle_host_s", 0.0), summary.get("device_idle_launch_s", 0.0)
    parts = (host_s, launch_s, summary["device_idle_s"] - host_s - launch_s)
    return shares + [Share(name, seconds) for name, seconds in zip(IDLE, parts, strict=True)]


def plot_account(runs: Sequence[Run], path: Path) -> None:
    """Draw one bar per run to `path`, grouped by workload in the order given; of more than `MOST_BARS` runs
    the first."""
    order, num_runs = list(dict.fromkeys(run.workload for run in runs)), len(runs)
    runs = sorted(
        runs, key=lambda run: (order.index(run.workload), run.chunk_tokens, policy_order(run.policy))
    )[:MOST_BARS]
    with picture(path, 11, 1.6 + 0.42 * len(runs)) as figure:
        axes = figure.subplots()
        if not any(run.summary["num_batches"] for run in runs):
            say_nothing_to_show(axes, "no batch ran")
            return
        for place, run in enumerate(runs):
            shares = account(run.summary)
            whole = sum(share.seconds for share in shares) or 1.0
            left = 0.0
            for share in shares:
                width = 100 * share.seconds / whole
                color = IDLE.get(share.name) or COLORS[share.name]
                label = None if place else _label(share)
                alpha = 1.0 if share.is_limit or share.name in IDLE else 0.35
                axes.barh(place, width, 0.72, left, color=color, alpha=alpha, lw=0, label=label)
                if width >= 4:
                    ink = "white" if share.is_limit else None
                    axes.text(
                        left + width / 2,
                        place,
                        f"{width:.0f}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color=ink,
                    )
                left += width
            axes.text(101, place, _beside(run.summary), va="center", fontsize=8, color=MUTED)
        axes.set_yticks(range(len(runs)), [_name(run, len(order) > 1) for run in runs])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("% of the time from the first batch to the last")
        figure.legend(loc="outside lower left", ncols=3)
        left_out = f": {len(runs)} of {num_runs} runs" if len(runs) < num_runs else ""
        figure.suptitle(f"Where the time goes{left_out}", x=0.01, ha="left", fontweight="bold", fontsize=11.5)


def _label(share: Share) -> str:
    if share.name in IDLE:
        return share.name
    return f"{share.name}: {'physical limit' if share.is_limit else 'beyond it'}"


def _name(run: Run, with_workload: bool) -> str:
    return (
        f"{run.workload} · {run.policy} · {run.chunk_tokens}"
        if with_workload
        else f"{run.policy} · chunk {run.chunk_tokens}"
    )


def _beside(summary: Mapping[str, Any]) -> str:
    """What is known of the reasons: padding of rows, and the largest components of device time."""
    components: dict[str, float] = {}
    for stage in summary["stages"].values():
        for name, seconds in stage["components_s"].items():
            components[name] = components.get(name, 0.0) + seconds
    device_s = sum(stage["device_s"] for stage in summary["stages"].values())
    largest = sorted(components.items(), key=lambda item: -item[1])[:2]
    known = [f"{name} {100 * seconds / device_s:.0f} %" for name, seconds in largest if device_s]
    padding = summary.get("padded_row_fraction")
    return ", ".join(known + ([f"{100 * padding:.0f} % of rows are padding"] if padding is not None else []))
