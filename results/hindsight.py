"""What a study in hindsight leaves: `hindsight.csv`, a row for every traffic, objectives and load, and a
picture of goodput over the load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from results.files import user_file
from results.plots.hindsight import plot_hindsight

NAME = "hindsight"


def write_hindsight(rows: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """Write both below `out`, the table first."""
    frame = pd.DataFrame(rows)
    with user_file(out / f"{NAME}.csv") as draft:
        frame.to_csv(draft, index=False, float_format="%.6g")
    plot_hindsight(frame, out / f"{NAME}.png")
    return [out / f"{NAME}.csv", out / f"{NAME}.png"]


def hindsight_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One task as lines to read: what is sustained, then a line for every load."""
    first = rows[0]
    lines = [
        f"{first['traffic']}, TTFT {first['ttft_ms']:g} ms, ITL {first['itl_ms']:g} ms: sustained "
        f"{first['sized_sustains']:.2f} requests/s, the best fixed {first['fixed_sustains']:.2f} "
        f"({first['sustained_by']})"
    ]
    for row in rows:
        gain = row["sized_met"] / row["fixed_met"] - 1 if row["fixed_met"] else float("inf")
        lines.append(
            f"  at {row['load']:.0%}, {row['rate']:.2f}/s: {row['sized_met']} of {row['requests']} met, "
            f"fixed {row['fixed_met']} ({row['best_fixed']}): {gain:+.1%}"
        )
    return lines
