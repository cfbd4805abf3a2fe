"""What the links of a sweep were worth: by bandwidth, how much of a prompt's transfer hid behind the rest of
the prompt, and when the first token came."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from results.identity import policy_order
from results.load import Run
from results.plots.style import log_scales, picture, policy_styles, width_under


def link_gb_per_s(run: Run) -> float | None:
    """The bandwidth of the links of a run's fleet; None of a run that has none, or sent nothing."""
    link: Any = (run.config.get("fleet") or {}).get("link")
    fleet = run.summary.get("fleet") or {}
    return float(link["gb_per_s"]) if link and fleet.get("hidden_share") is not None else None


def has_transfers(runs: Sequence[Run]) -> bool:
    """Whether there is anything to draw: two bandwidths at least."""
    return len({link_gb_per_s(run) for run in runs} - {None}) > 1


def plot_transfers(runs: Sequence[Run], path: Path) -> None:
    """Draw those of `runs` that have links to `path`, a line per policy and chunk size."""
    lines: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for run in runs:
        gb_per_s, ttft_ms = link_gb_per_s(run), run.summary["ttft_ms"]["p50"]
        if gb_per_s is not None and ttft_ms is not None:
            point = gb_per_s, run.summary["fleet"]["hidden_share"], ttft_ms
            lines.setdefault((run.policy, run.chunk_tokens), []).append(point)
    styles = policy_styles([policy for policy, _ in lines])
    several = len({chunk for _, chunk in lines}) > 1
    with picture(path, 10, 3.6) as figure:
        hidden, first = figure.subplots(1, 2)
        order = sorted(lines, key=lambda key: (policy_order(key[0]), key[1]))
        for place, (policy, chunk) in enumerate(order):
            points = sorted(lines[policy, chunk])
            color, dash = styles[policy]
            label = f"{policy} · chunk {chunk}" if several else policy
            for axes, column in ((hidden, 1), (first, 2)):
                axes.plot(
                    [point[0] for point in points],
                    [point[column] for point in points],
                    marker="o",
                    ms=4,
                    color=color,
                    ls=dash,
                    lw=width_under(place, len(order)),
                    label=label,
                )
        for axes in (hidden, first):
            log_scales(axes)
            axes.set_xlabel("bandwidth of a link, GB/s")
        hidden.set_ylim(0, 1)
        hidden.yaxis.set_major_formatter(PercentFormatter(1.0))
        hidden.set_title("transfer hidden behind the rest of the prompt")
        first.set_ylim(bottom=0)
        first.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        first.set_title("TTFT p50, ms")
        first.legend(loc="best")
