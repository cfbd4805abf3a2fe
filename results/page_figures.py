"""The pictures of a page, as Bokeh's figures with hover. All that show runs look at one source of them, so a
run that is chosen in one is chosen in all."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import (
    BasicTickFormatter,
    CDSView,
    ColumnDataSource,
    FixedTicker,
    GroupFilter,
    HoverTool,
    LogTicker,
    Range1d,
    Span,
    TapTool,
)
from bokeh.plotting import figure

from results.identity import policy_order, printable
from results.load import Run
from results.plots.cdf import TAIL_MARKS
from results.plots.style import MUTED, OBJECTIVE, policy_styles
from results.tradeoff import Load, front, objective_of, offered, tradeoff_of

LATENCIES = (("TTFT", "ttft_ns"), ("ITL", "itl_ns"), ("E2E", "e2e_ns"))


def shown_text(text: str) -> str:
    """`text` as a label: on one line, and never taken for a formula."""
    return printable(text).replace("$$", "$\u200b$")


def tradeoff_figure(runs: Sequence[Run], source: ColumnDataSource, workload: str) -> Any:
    """The runs of one workload by the two figures that tell them apart, a line per policy, the front
    ringed."""
    mine = [run for run in runs if run.workload == workload]
    found = tradeoff_of(mine)
    if not found.points:
        return None
    fields = {
        "p99 ITL, ms": "itl",
        "p99 TTFT, ms": "ttft",
        "output tokens/s": "output",
        "prompt tokens/s": "prompt",
    }
    x, y = fields[found.x_name], fields[found.y_name]
    plot = new_figure(
        shown_text(workload),
        f"{found.x_name} (better to the left)",
        found.y_name + (" (better upwards)" if found.y_rises else " (better downwards)"),
        560,
        380,
        log_x=_is_wide([point.x for point in found.points]),
        log_y=not found.y_rises and _is_wide([point.y for point in found.points]),
    )
    best = front(found.points, found.y_rises)
    plot.scatter(
        [point.x for point in best], [point.y for point in best], size=19, color="#9ca3af", alpha=0.45
    )
    styles = policy_styles([run.policy for run in runs])
    for policy in dict.fromkeys(point.policy for point in found.points):
        line = [point for point in found.points if point.policy == policy]
        plot.line(
            [point.x for point in line],
            [point.y for point in line],
            color=styles[policy][0],
            line_width=2,
            legend_label=shown_text(policy),
        )
    view = CDSView(filter=GroupFilter(column_name="workload", group=shown_text(workload)))
    dots = plot.scatter(
        x, y, source=source, view=view, size=9, color="color", line_color="white", nonselection_alpha=0.25
    )
    for limit, dimension in ((found.box[0], "height"), (found.box[1], "width")):
        if limit is not None:
            plot.add_layout(
                Span(location=limit, dimension=dimension, line_color=OBJECTIVE, line_dash="dashed")
            )
    tips = [
        ("", "@run"),
        ("p99 TTFT, ms", "@ttft{0,0.0}"),
        ("p99 ITL, ms", "@itl{0,0.00}"),
        ("output tokens/s", "@output{0,0.0}"),
        ("limited by", "@limit"),
    ]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tips), TapTool(renderers=[dots]))
    return _with_legend_below(plot)


def cdf_figures(source: ColumnDataSource) -> list[Any]:
    """Percentiles of TTFT, ITL and E2E out to the tail, a line per run; those of chosen runs stand out."""
    plots = []
    for name, _ in LATENCIES:
        ends = [ys[-1] for ys in source.data[f"{name}_y"] if ys]
        if not ends:
            continue
        plot = new_figure(
            f"{name}: choose runs in the table or a picture",
            f"{name}, ms",
            "percentile",
            390,
            330,
            log_x=True,
            log_y=True,
        )
        plot.y_range = Range1d(1.0, max(min(ends), 1e-5))
        marks = [mark for mark in (1.0, *TAIL_MARKS) if mark >= plot.y_range.end]
        plot.yaxis.ticker = FixedTicker(ticks=marks)
        plot.yaxis.major_label_overrides = {mark: f"p{100 * (1 - mark):.6g}" for mark in marks}
        lines = plot.multi_line(
            f"{name}_x",
            f"{name}_y",
            source=source,
            color="color",
            line_width=1.6,
            alpha=0.7,
            selection_line_width=2.6,
            selection_alpha=1.0,
            nonselection_alpha=0.06,
        )
        plot.add_tools(
            HoverTool(renderers=[lines], tooltips=[("", "@run"), ("ms", "$x{0,0.0}")]),
            TapTool(renderers=[lines]),
        )
        plots.append(plot)
    return plots


def load_figures(load: Load) -> list[Any]:
    """Tail latencies and goodput of one traffic against the rate at which it was offered."""
    styles = policy_styles([run.policy for run in load.runs])
    plots = []
    objective = objective_of(load.runs)
    for key, statistic, title in (
        ("ttft_ms", "p99", "p99 TTFT, ms"),
        ("itl_ms", "p99", "p99 ITL, ms"),
        ("slo", "goodput", "goodput, requests/s"),
    ):
        series = [
            (
                label,
                [
                    (offered(run), value)
                    for run in runs
                    if (value := (run.summary.get(key) or {}).get(statistic))
                ],
            )
            for label, runs in load.series.items()
        ]
        values = [value for _, points in series for _, value in points]
        if not values:
            continue
        plot = new_figure(
            shown_text(load.name),
            "offered, requests/s",
            title,
            390,
            330,
            log_y=key != "slo" and _is_wide(values),
        )
        for (policy, chunk), points in series:
            if points:
                data = ColumnDataSource(
                    {
                        "x": [x for x, _ in points],
                        "y": [y for _, y in points],
                        "name": [shown_text(f"{policy} · {chunk}")] * len(points),
                    }
                )
                plot.line("x", "y", source=data, color=styles[policy][0], line_width=1.6)
                plot.scatter("x", "y", source=data, color=styles[policy][0], size=7)
        plot.add_tools(HoverTool(tooltips=[("", "@name"), ("offered", "@x{0.00}"), (title, "@y{0,0.00}")]))
        if (limit := objective.get(key)) is not None:
            plot.add_layout(Span(location=limit, dimension="width", line_color=OBJECTIVE, line_dash="dashed"))
        plots.append(plot)
    return plots


def capacity_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """What every cell of a capacity search sustains, by chunk size, a line per policy; the interval over
    seeds is in the hover."""
    able = [
        row for row in rows if isinstance(row["capacity"], int | float) and math.isfinite(row["capacity"])
    ]
    if not able:
        return None
    axis = "requests/s" if able[0]["axis"] == "rate" else "replicas"
    plot = new_figure(shown_text(title), "prompt chunk, tokens", f"capacity, {axis}", 560, 360, log_x=True)
    styles = policy_styles([str(row["policy"]) for row in able])
    for policy in sorted(styles, key=policy_order):
        mine = sorted(
            (row for row in able if row["policy"] == policy), key=lambda row: row["prefill_chunk_size"]
        )
        data = ColumnDataSource(
            {
                "x": [row["prefill_chunk_size"] for row in mine],
                "y": [row["capacity"] for row in mine],
                "name": [shown_text(policy)] * len(mine),
                "late": [shown_text(str(row["late_by"])) for row in mine],
                "low": [number(row["low"]) for row in mine],
                "high": [number(row["high"]) for row in mine],
            }
        )
        plot.line(
            "x", "y", source=data, color=styles[policy][0], line_width=2, legend_label=shown_text(policy)
        )
        plot.scatter("x", "y", source=data, color=styles[policy][0], size=9)
    tips = [
        ("", "@name · @x"),
        ("capacity", "@y{0.000}"),
        ("interval", "@low{0.00} to @high{0.00}"),
        ("beyond it late by", "@late"),
    ]
    plot.add_tools(HoverTool(tooltips=tips))
    return _with_legend_below(plot)


def new_figure(
    title: str, x: str, y: str, width: int, height: int, log_x: bool = False, log_y: bool = False
) -> Any:
    plot = figure(
        width=width,
        height=height,
        title=title,
        x_axis_label=x,
        y_axis_label=y,
        tools="pan,box_zoom,wheel_zoom,reset,save",
        x_axis_type="log" if log_x else "linear",
        y_axis_type="log" if log_y else "linear",
    )
    for axis, is_log in ((plot.xaxis, log_x), (plot.yaxis, log_y)):
        if is_log:
            axis.ticker = LogTicker(mantissas=[1, 2, 5], num_minor_ticks=0)
            axis.formatter = BasicTickFormatter(use_scientific=False)
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = MUTED
    plot.axis.minor_tick_line_color = None
    return plot


def _with_legend_below(plot: Any) -> Any:
    """A click on a name hides its line."""
    (legend,) = plot.legend
    legend.click_policy, legend.label_text_font_size, legend.orientation = "hide", "8pt", "horizontal"
    legend.ncols, legend.border_line_color = 3, None
    plot.add_layout(legend, "below")
    return plot


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > 8 * min(values)


def number(value: float | None) -> float:
    return math.nan if value is None else float(f"{value:.6g}")
