"""How chunk sizes breathe: the prompt rows that each batch begins with, and the gaps between tokens that they
are sized by."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from policies.core.errors import InputError
from results.batchlog import LoggedBatch
from results.load import Run
from results.plots.style import INK, MUTED, picture, policy_styles
from results.plots.window import Window

WINDOW_BATCHES = 400
MIN_GAP_MS = 1e-6


def plot_chunks(runs: Sequence[Run], path: Path, window: Window | None = None) -> None:
    """Draw two panels per run to `path`, all over the same time: prompt rows that enter depth 0 by batch,
    with the decoding rows beside them, and the gap before every token, with the objective where there is one.

    `window` None takes `WINDOW_BATCHES` around the first run's batch that decodes most beside a prompt.
    Raises `InputError` when it holds no batch or too many.
    """
    if window is None:
        window = _busiest(runs[0])
    elif window.start_ns is None and window.end_ns is None and len(runs) > 1:
        window = _by_clock(window.select(runs[0].batches(), str(runs[0].path)))
    panels = [window.select(run.batches(), str(run.path)) for run in runs]
    times = (
        min(panel[0].started_ns for panel in panels) / 1e6,
        max(panel[-1].finished_ns for panel in panels) / 1e6,
    )
    styles = policy_styles([run.policy for run in runs])
    with picture(path, 13, 0.9 + 3.6 * len(runs)) as figure:
        grid = figure.subplots(
            2 * len(runs), 1, squeeze=False, sharex=True, height_ratios=[1.2, 1] * len(runs)
        )[:, 0]
        tops, bottoms = grid[::2], grid[1::2]
        for top, bottom, run, batches in zip(tops, bottoms, runs, panels, strict=True):
            _draw_rows(top, run, batches, styles[run.policy][0])
            _draw_gaps(bottom, run, times, styles[run.policy][0])
            top.set_xlim(*times)
        for group in (tops, bottoms):
            most = max(axes.get_ylim()[1] for axes in group)
            for axes in group:
                axes.set_ylim(0, most)
        grid[-1].set_xlabel("time, ms")
        handles, texts = tops[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside upper right", ncols=2)
        title = f"{runs[0].workload}: how many prompt rows every batch takes in"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11.5)


def rows_taken_in(batch: LoggedBatch) -> int:
    """Prompt rows that begin depth 0 in `batch`."""
    if not batch.loop_count:
        return 0
    return sum(item.token_count for item in batch.ranges() if item.is_prompt and item.depth == 0)


def _draw_rows(axes: Axes, run: Run, batches: Sequence[LoggedBatch], color: str) -> None:
    shown = [batch for batch in batches if batch.loop_count]
    edges = np.array([[batch.started_ns / 1e6, batch.finished_ns / 1e6] for batch in shown])
    rows = np.array([rows_taken_in(batch) for batch in shown])
    decode = np.array([batch.num_decode_rows for batch in shown])
    if len(shown):
        axes.bar(
            edges[:, 0], rows, np.diff(edges, axis=1)[:, 0], align="edge", color=color, lw=0,
            label="prompt rows that begin (the policy's colour)",
        )  # fmt: skip
        axes.step(edges[:, 0], decode, where="post", color=INK, lw=1, label="decode rows in the batch")
    sizes = sorted(set(rows.tolist()) - {0})
    what = f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}" if sizes else "none"
    axes.set_title(
        f"{run.policy} · chunk {run.chunk_tokens} · prompt rows taken in by a batch: {what}", fontsize=9.5
    )
    axes.set_ylabel("rows")


def _draw_gaps(axes: Axes, run: Run, times: tuple[float, float], color: str) -> None:
    found: list[tuple[float, float]] = []
    for text in run.requests()["token_ns"]:
        token_ms = np.fromstring(text, dtype=np.int64, sep=" ") / 1e6
        found.extend(zip(token_ms[1:].tolist(), np.diff(token_ms).tolist(), strict=True))
    points = np.array([item for item in found if times[0] <= item[0] <= times[1]])
    if len(points):
        axes.plot(points[:, 0], points[:, 1], ".", ms=5, mew=0, color=color, alpha=0.7)
    limit_ms = (run.summary.get("slo") or {}).get("itl_ms") or run.config["policy"].get("itl_ms")
    if limit_ms:
        axes.axhline(limit_ms, color=MUTED, lw=1, ls=":")
        axes.text(times[1], limit_ms, f" {limit_ms:g}", va="center", fontsize=8, color=MUTED)
    axes.set_ylim(0, 1.08 * max([*(points[:, 1] if len(points) else ()), limit_ms or MIN_GAP_MS]))
    axes.set_ylabel("gap before\na token, ms")


def _busiest(run: Run) -> Window:
    """`WINDOW_BATCHES` around the batch that has most decode rows beside prompt rows; without one, the
    first."""
    best_seq, most = 0, -1
    for batch in run.batches():
        if batch.num_decode_rows > most and ":PREFILL" in batch.ranges_text:
            best_seq, most = batch.seq, batch.num_decode_rows
    first = max(best_seq - WINDOW_BATCHES // 2, 0)
    chosen = Window(first_batch=first, last_batch=first + WINDOW_BATCHES - 1).clip(run.batches())
    if not chosen:
        raise InputError(f"{run.path}: has no batch to draw")
    return _by_clock(chosen)


def _by_clock(batches: Sequence[LoggedBatch]) -> Window:
    ends = list(chain.from_iterable((batch.started_ns, batch.finished_ns) for batch in batches))
    return Window(start_ns=min(ends), end_ns=max(ends))
