"""The wavefront picture: time across, depth up, one box per range coloured by request and labelled by chunk.

Box area is rows x time, on one scale for all panels, so what a policy leaves empty is what the device could
have done.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import ScalarFormatter

from policies.core.errors import InputError
from results.batchlog import LoggedBatch
from results.load import Run
from results.plots.style import INK, MUTED, REQUEST_COLORS, picture
from results.plots.window import EMBED_LANE, Box, Window, default_window, lane_bounds, layout, shared_window

WIDTH_INCHES = 13.0
MAX_LEGEND = 12
LABEL_POINTS, MIN_HATCH_POINTS = 7.0, 3.5
STRUCK = "#dc2626"
ROWS_STRIP = 0.75
"""Height, in lanes, of the strip above a panel that tells the rows of every invocation."""


def plot_wavefront(runs: Sequence[Run], path: Path, window: Window | None = None) -> None:
    """Draw one panel per run to `path`, all over the same time.

    `window` None chooses a readable one. A window of batches counts the first run's batches; the others show
    the same time. Raises `InputError` when it holds no batch or too many, or when the runs' models differ in
    depth.
    """
    depths = sorted({run.num_loops for run in runs})
    if len(depths) > 1:
        raise InputError(
            f"wavefront: the runs have models of {depths[0]} and {depths[-1]} loops, expected the same depth"
        )
    num_loops = depths[0]
    window, panels = _choose(runs, window)
    start_ns = (
        window.start_ns
        if window.start_ns is not None
        else min(panel[0].started_ns for panel in panels if panel)
    )
    end_ns = max(panel[-1].finished_ns for panel in panels if panel)
    end_ns = min(end_ns, window.end_ns) if window.end_ns is not None else end_ns
    boxes = layout(panels, num_loops)
    requests = sorted({box.item.request_id for panel in boxes for box in panel})
    colors = {
        request_id: REQUEST_COLORS[index % len(REQUEST_COLORS)] for index, request_id in enumerate(requests)
    }
    most_rows = max(batch.rows for panel in panels for batch in panel)
    panel_inches = min(max(0.52 * num_loops + 1.15, 2.4), 7.5)
    with picture(path, WIDTH_INCHES, panel_inches * len(runs) + 1.15) as figure:
        grid = figure.subplots(len(runs), 1, squeeze=False, sharex=True)[:, 0]
        for axes, run, batches in zip(grid, runs, panels, strict=True):
            _frame(axes, num_loops, start_ns / 1e6, end_ns / 1e6)
            _draw_boundaries(axes, batches, num_loops)
            axes.set_title(_title(run, batches), fontsize=9.5)
        grid[-1].set_xlabel("time, ms")
        has_decode = any(not box.item.is_prompt for panel in boxes for box in panel)
        has_refused = any(box.is_refused for panel in boxes for box in panel)
        _add_legend(figure, requests, colors, has_decode, has_refused)
        title = (
            f"{runs[0].workload}: which chunk runs at which depth   (box height: rows; grey lines: batches)"
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.draw_without_rendering()
        for axes, run, batches, panel in zip(grid, runs, panels, boxes, strict=True):
            _draw_boxes(axes, panel, colors)
            _strike_out(axes, panel)
            _label_boxes(axes, panel, colors, run.chunk_tokens, start_ns, end_ns)
            _draw_row_strip(axes, batches, num_loops, most_rows)


def _choose(runs: Sequence[Run], window: Window | None) -> tuple[Window, list[list[LoggedBatch]]]:
    """The window and every run's batches in it. What the caller asks for must exist; what we choose is cut to
    what can be drawn."""
    if window is None:
        window = default_window(runs[0]) if len(runs) == 1 else shared_window(runs)
        panels = [window.clip(run.batches()) for run in runs]
        if not any(panels):
            raise InputError(f"{runs[0].path}: has no batch to draw")
        return window, panels
    if len(runs) > 1 and window.start_ns is None and window.end_ns is None:
        chosen = window.select(runs[0].batches(), str(runs[0].path))
        window = Window(start_ns=chosen[0].started_ns, end_ns=chosen[-1].finished_ns)
    return window, [window.select(run.batches(), str(run.path)) for run in runs]


def _title(run: Run, batches: Sequence[LoggedBatch]) -> str:
    loops = sum(batch.loop_count for batch in batches)
    rows = sum(batch.loop_count * batch.rows for batch in batches)
    name = f"{run.policy} · chunk {run.chunk_tokens}"
    if not batches:
        return f"{name}   ·   nothing runs here"
    span = f"batches {batches[0].seq} to {batches[-1].seq}"
    return f"{name}   ·   {span}" + (f", {rows / loops:,.1f} rows per recurrent invocation" if loops else "")


def _frame(axes: Axes, num_loops: int, start_ms: float, end_ms: float) -> None:
    names = {EMBED_LANE: "embed", num_loops: "LM head"} | {
        depth: f"depth {depth}" for depth in range(num_loops)
    }
    bounds = {number: lane_bounds(number, num_loops) for number in names}
    for bottom, height in bounds.values():
        axes.axhspan(bottom, bottom + height, color="#f3f4f6", lw=0, zorder=0)
    rows_middle = num_loops + 0.52 + ROWS_STRIP / 3
    every = max(1, num_loops // 16)
    shown = [number for number in names if number in (EMBED_LANE, num_loops) or number % every == 0]
    axes.set_yticks([*(bounds[number][0] + bounds[number][1] / 2 for number in shown), rows_middle])
    axes.set_yticklabels([*(names[number] for number in shown), "rows"])
    axes.set_ylim(-0.58, num_loops + 0.6 + ROWS_STRIP)
    axes.set_xlim(start_ms, end_ms)
    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def _draw_boundaries(axes: Axes, batches: Sequence[LoggedBatch], num_loops: int) -> None:
    """A line where a batch starts and one where it ends; a gap between two batches stays white: the device
    idles there."""
    times = sorted({time_ns for batch in batches for time_ns in (batch.started_ns, batch.finished_ns)})
    top = num_loops + 0.5
    lines = [[(time_ns / 1e6, -0.55), (time_ns / 1e6, top)] for time_ns in times]
    axes.add_collection(LineCollection(lines, colors="#9ca3af", linewidths=0.7, zorder=1), autolim=False)


def _draw_boxes(axes: Axes, boxes: Sequence[Box], colors: dict[int, str]) -> None:
    for is_prompt in (True, False):
        mine = [box for box in boxes if box.item.is_prompt is is_prompt]
        if not mine:
            continue
        faces = [colors[box.item.request_id] for box in mine]
        has_hatch = (
            not is_prompt and min(box.height for box in mine) * _points_per_lane(axes) > MIN_HATCH_POINTS
        )
        collection = PolyCollection(
            [_corners(axes, box) for box in mine],
            facecolors=faces if is_prompt else [_darker(face) for face in faces],
            edgecolors=[_darker(face, 0.35) for face in faces] if has_hatch else "white",
            linewidths=0.6 if is_prompt or has_hatch else 0.3,
            hatch="/////" if has_hatch else None,
            zorder=2,
        )
        axes.add_collection(collection, autolim=False)


def _strike_out(axes: Axes, boxes: Sequence[Box]) -> None:
    """A cross over what stood on a guess that turned out wrong."""
    lines = []
    for box in boxes:
        if box.is_refused:
            left_low, right_low, right_high, left_high = _corners(axes, box)
            lines += [[left_low, right_high], [left_high, right_low]]
    axes.add_collection(LineCollection(lines, colors=STRUCK, linewidths=1.1, zorder=5), autolim=False)


def _corners(axes: Axes, box: Box) -> list[tuple[float, float]]:
    """The box in data coordinates, a pixel short of its time on either side, so that batch boundaries stay
    visible."""
    left, right = box.start_ns / 1e6, box.end_ns / 1e6
    gap = min(0.9 * _ms_per_pixel(axes), 0.15 * (right - left))
    left, right, low, high = left + gap, right - gap, box.y, box.y + box.height
    return [(left, low), (right, low), (right, high), (left, high)]


def _label_boxes(
    axes: Axes, boxes: Sequence[Box], colors: dict[int, str], chunk_tokens: int, start_ns: int, end_ns: int
) -> None:
    """Write `c3` into prompt boxes, `40` into those of 40 rows that are not a whole chunk, and `@1034` into
    decode rows, where it fits; a decode row without room keeps its hatch only."""
    per_ms = 1 / _ms_per_pixel(axes)
    per_point = axes.figure.dpi / 72
    per_lane = _points_per_lane(axes)
    for box in boxes:
        item = box.item
        is_whole = item.token_count == chunk_tokens
        text = f"@{item.token_start}"
        if item.is_prompt:
            text = f"c{item.token_start // chunk_tokens}" if is_whole else f"{item.token_count}"
        left, right = max(box.start_ns, start_ns), min(box.end_ns, end_ns)
        width_points = (right - left) / 1e6 * per_ms / per_point
        height_points = box.height * per_lane
        size = min(LABEL_POINTS, height_points * 0.85, width_points / (0.72 * len(text)))
        if size < 4.6:
            continue
        axes.text(
            (left + right) / 2e6, box.y + box.height / 2, text, ha="center", va="center_baseline",
            fontsize=size, zorder=4, color=_ink_on(colors[item.request_id]) if item.is_prompt else "white",
        )  # fmt: skip


def _draw_row_strip(axes: Axes, batches: Sequence[LoggedBatch], num_loops: int, most_rows: int) -> None:
    """Bars above the lanes: rows of each recurrent invocation, on one scale for all panels, with the number
    where it fits."""
    bottom = num_loops + 0.56
    per_ms = 1 / _ms_per_pixel(axes)
    per_point = axes.figure.dpi / 72
    bars = []
    low, high = axes.get_xlim()
    for batch in batches:
        if batch.loop_count == 0:
            continue
        left, right = batch.started_ns / 1e6, batch.finished_ns / 1e6
        height = 0.55 * ROWS_STRIP * batch.rows / most_rows
        bars.append([(left, bottom), (right, bottom), (right, bottom + height), (left, bottom + height)])
        text = f"{batch.rows}" if batch.loop_count == 1 else f"{batch.loop_count}\u00d7 {batch.rows}"
        left, right = max(left, low), min(right, high)
        size = min(6.5, (right - left) * per_ms / per_point / (0.7 * len(text)))
        if size >= 4.6:
            middle = (left + right) / 2
            axes.text(
                middle,
                bottom + height + 0.03,
                text,
                ha="center",
                va="bottom",
                fontsize=size,
                color=INK,
                zorder=4,
            )
    axes.add_collection(
        PolyCollection(bars, facecolors="#d1d5db", edgecolors="white", linewidths=0.5, zorder=2),
        autolim=False,
    )


def _add_legend(
    figure: Figure, requests: Sequence[int], colors: dict[int, str], has_decode: bool, has_refused: bool
) -> None:
    handles: list[Patch] = [
        Patch(fc=colors[request_id], label=f"request {request_id}") for request_id in requests[:MAX_LEGEND]
    ]
    if len(requests) > MAX_LEGEND:
        handles.append(Patch(fc="none", label=f"and {len(requests) - MAX_LEGEND} more, colours repeat"))
    label = "c3: prompt chunk 3, 40: a part of 40 rows"
    handles.append(Patch(fc="#e5e7eb", ec="#9ca3af", label=label))
    if has_decode:
        handles.append(
            Patch(fc="#4b5563", ec=INK, hatch="/////", label="dark: decode row, @57 at position 57")
        )
    if has_refused:
        handles.append(Patch(fc="none", ec=STRUCK, hatch="xx", label="crossed: on a guess that was refused"))
    columns = min(len(handles), 8)
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        fontsize=8,
        handlelength=1.4,
        labelcolor=MUTED,
    )


def _ms_per_pixel(axes: Axes) -> float:
    low, high = axes.get_xlim()
    return float((high - low) / axes.get_window_extent().width)


def _points_per_lane(axes: Axes) -> float:
    low, high = axes.get_ylim()
    return float(axes.get_window_extent().height / (high - low) / (axes.figure.dpi / 72))


def _darker(color: str, share: float = 0.62) -> tuple[float, float, float]:
    red, green, blue = to_rgb(color)
    return red * share, green * share, blue * share


def _ink_on(color: str) -> str:
    """Black or white, whichever reads better on `color` (relative luminance above or below one half)."""
    red, green, blue = to_rgb(color)
    return "#111827" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
