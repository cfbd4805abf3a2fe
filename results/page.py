"""The moving parts of a report, as Bokeh's models: a table that sorts, pictures with hover, distributions by
click, and the wavefront of a run that is chosen. All of them look at one source of runs, so a click in one is
seen in all.

Figures only: what a page says in words is `results.report`'s. Nothing here reads the network, and all texts
go to the page as data.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.embed import components
from bokeh.models import (
    BasicTickFormatter,
    CDSView,
    ColumnDataSource,
    CustomJS,
    DataTable,
    FixedTicker,
    GroupFilter,
    HoverTool,
    LogTicker,
    NumberFormatter,
    Range1d,
    Select,
    Span,
    StringFormatter,
    TableColumn,
    TapTool,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from results.identity import policy_order, printable
from results.load import Run
from results.plots.cdf import TAIL_MARKS, tail_steps
from results.plots.style import MUTED, OBJECTIVE, REQUEST_COLORS, policy_styles
from results.plots.window import default_window, lane_bounds, layout
from results.table import columns_of, limit_text, requests_text
from results.tradeoff import Load, front, objective_of, offered, tradeoff_of

MOST_WAVEFRONT_BYTES, MOST_CDF_BYTES = 450_000, 300_000
MOST_CDF_POINTS, BYTES_PER_POINT, BYTES_PER_BOX = 120, 14, 60
LATENCIES = (("TTFT", "ttft_ns"), ("ITL", "itl_ns"), ("E2E", "e2e_ns"))
TABLE_ROWS = 18
SHOW_WAVE = """
const at = waves.data.run.indexOf(choice.value);
const shown = {};
for (const name of names) shown[name] = waves.data[name][at];
boxes.data = shown;
wave.x_range.end = waves.data.end[at];
wave.title.text = waves.data.title[at];
"""
CHOOSE = """
const at = runs.selected.indices[0];
if (at !== undefined && waves.data.run.includes(runs.data.run[at])) choice.value = runs.data.run[at];
"""


def scripts_and_places(models: Mapping[str, Any]) -> tuple[str, str, Mapping[str, str]]:
    """(the library, the data, a place for each model by name), all inline."""
    script, places = components(dict(models), wrap_script=False)
    library = "\n".join(
        Resources(mode="inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"]).js_raw
    )
    return library, script, places


def shown_text(text: str) -> str:
    """`text` as a label: on one line, and never taken for a formula."""
    return printable(text).replace("$$", "$\u200b$")


def run_names(runs: Sequence[Run]) -> list[str]:
    """What a run is called on the page, a number behind those that would have the same name."""
    names = [shown_text(f"{run.workload} · {run.policy} · {run.chunk_tokens}") for run in runs]
    return [
        f"{name} ({names[:at].count(name) + 1})" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]


def source_of(runs: Sequence[Run], samples: Sequence[Any] | None) -> ColumnDataSource:
    """One row for each run: names, every figure of the table, and distributions where samples are there."""
    summaries = [run.summary for run in runs]
    styles = policy_styles([run.policy for run in runs])
    data: dict[str, list[Any]] = {
        "run": run_names(runs),
        "workload": [shown_text(run.workload) for run in runs],
        "policy": [
            shown_text(run.policy + ("" if _is_whole(run) else f" ({run.summary['status']})")) for run in runs
        ],
        "chunk": [run.chunk_tokens for run in runs],
        "requests": [requests_text(summary) for summary in summaries],
        "limit": [limit_text(summary) for summary in summaries],
        "color": [styles[run.policy][0] for run in runs],
        "place": [shown_text(_place(summary)) for summary in summaries],
    }
    for at, column in enumerate(columns_of(summaries)):
        data[f"c{at}"] = [_number(column.value(summary)) for summary in summaries]
    for key, name in (("ttft_ms", "ttft"), ("itl_ms", "itl")):
        data[name] = [_number(summary[key]["p99"]) for summary in summaries]
    data["output"] = [_number(summary["output_token_throughput"]) for summary in summaries]
    data["prompt"] = [_number(summary["prompt_token_throughput"]) for summary in summaries]
    if samples is not None:
        points = max(
            8, min(MOST_CDF_POINTS, MOST_CDF_BYTES // (len(LATENCIES) * BYTES_PER_POINT * len(runs)))
        )
        for name, field in LATENCIES:
            lines = [
                _tail(getattr(item, field), points) if item is not None else ([], []) for item in samples
            ]
            data[f"{name}_x"], data[f"{name}_y"] = [x for x, _ in lines], [y for _, y in lines]
    return ColumnDataSource(data)


def table_of(runs: Sequence[Run], source: ColumnDataSource) -> DataTable:
    """Every figure of every run; a click on a head sorts, one on a row chooses it in all pictures."""
    names = (
        ("workload", "workload", 190),
        ("policy", "policy", 210),
        ("chunk", "chunk", 50),
        ("requests", "requests", 70),
    )
    columns = [
        TableColumn(field=key, title=title, width=width, formatter=_plain(key)) for key, title, width in names
    ]
    for at, column in enumerate(columns_of([run.summary for run in runs])):
        digits = 1 if column.form.endswith("%") else int(column.form[-2])
        form = "0.0%" if column.form.endswith("%") else "0,0." + "0" * digits
        columns.append(
            TableColumn(
                field=f"c{at}",
                title=f"{column.head}, {column.unit}",
                width=24 + 7 * len(column.head + column.unit),
                formatter=NumberFormatter(format=form, text_align="right", nan_format="-"),
            )
        )
    columns.append(TableColumn(field="limit", title="limited by", width=90, formatter=StringFormatter()))
    height = 55 + 25 * min(len(runs), TABLE_ROWS)
    return DataTable(
        source=source,
        columns=columns,
        width=1200,
        height=height,
        index_position=None,
        autosize_mode="none",
        selectable=True,
        sortable=True,
        reorderable=False,
        frozen_columns=3,
        name="table",
    )


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
    plot = _figure(
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
        plot = _figure(
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
        plot = _figure(
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
    plot = _figure(shown_text(title), "prompt chunk, tokens", f"capacity, {axis}", 560, 360, log_x=True)
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
                "low": [_number(row["low"]) for row in mine],
                "high": [_number(row["high"]) for row in mine],
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


def wavefront_parts(runs: Sequence[Run], source: ColumnDataSource) -> tuple[Any, Any, int]:
    """(the choice of a run, its wavefront, how many runs have one): as many in order as the page has room
    for."""
    fields = ("left", "right", "bottom", "top", "color", "text", "time")
    waves: dict[str, list[Any]] = {name: [] for name in ("run", "title", "end", *fields)}
    room = MOST_WAVEFRONT_BYTES
    for run, name in zip(runs, source.data["run"], strict=True):
        if not (run.has_logs and run.summary["num_batches"]):
            continue
        batches = default_window(run).clip(run.batches(), 600)
        (boxes,) = layout([batches], run.num_loops)
        room -= BYTES_PER_BOX * len(boxes)
        if room < 0:
            break
        zero = batches[0].started_ns
        order = {item: at for at, item in enumerate(sorted({box.item.request_id for box in boxes}))}
        columns: dict[str, list[Any]] = {field: [] for field in fields}
        for box in boxes:
            item = box.item
            what = "tokens" if item.is_prompt else "decodes"
            color = REQUEST_COLORS[order[item.request_id] % len(REQUEST_COLORS)]
            values = (
                round((box.start_ns - zero) / 1e6, 3),
                round((box.end_ns - zero) / 1e6, 3),
                round(box.y, 2),
                round(box.y + box.height, 2),
                color if item.is_prompt else _darker(color),
                f"{item.request_id} {what} {item.token_start}+{item.token_count}",
                round(box.start_ns / 1e6, 2),
            )
            for field, value in zip(fields, values, strict=True):
                columns[field].append(value)
        for field in fields:
            waves[field].append(columns[field])
        waves["run"].append(name)
        waves["end"].append(round((batches[-1].finished_ns - zero) / 1e6, 3))
        waves["title"].append(f"{name}: from {zero / 1e6:,.1f} ms on, {len(batches)} batches")
    if not waves["run"]:
        return None, None, 0
    num_loops = max(run.num_loops for run in runs)
    boxes_shown = ColumnDataSource({field: waves[field][0] for field in fields})
    plot = _figure(waves["title"][0], "ms from there", "", 1200, 330)
    plot.x_range, plot.y_range = Range1d(0, waves["end"][0]), Range1d(-0.6, num_loops + 0.6)
    lanes = {-1: "embed", num_loops: "LM head", **{depth: f"depth {depth}" for depth in range(num_loops)}}
    middles = {
        sum(lane_bounds(at, num_loops)) - lane_bounds(at, num_loops)[1] / 2: name
        for at, name in lanes.items()
    }
    plot.yaxis.ticker = FixedTicker(ticks=sorted(middles))
    plot.yaxis.major_label_overrides = middles
    drawn = plot.quad(
        "left",
        "right",
        "top",
        "bottom",
        source=boxes_shown,
        color="color",
        line_color="white",
        line_width=0.5,
    )
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=[("request", "@text"), ("ms", "@time{0,0.00}")]))
    choice = Select(
        title="Wavefront of", value=waves["run"][0], options=waves["run"], width=500, name="choice"
    )
    kept = ColumnDataSource(waves)
    arguments = {"waves": kept, "choice": choice, "boxes": boxes_shown, "wave": plot, "names": list(fields)}
    choice.js_on_change("value", CustomJS(args=arguments, code=SHOW_WAVE))
    source.selected.js_on_change(
        "indices", CustomJS(args={"runs": source, "waves": kept, "choice": choice}, code=CHOOSE)
    )
    return choice, plot, len(waves["run"])


def difference_table(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], figures: Sequence[str]
) -> DataTable:
    """Differences of two sides as text, one row for each pair; a click on a head sorts."""
    data = {name: [shown_text(str(row[name])) for row in rows] for name in (*names, *figures)}
    columns = [
        TableColumn(field=name, title=name, width=160 if name in names else 190, formatter=StringFormatter())
        for name in data
    ]
    return DataTable(
        source=ColumnDataSource(data),
        columns=columns,
        width=1200,
        height=55 + 25 * min(len(rows), TABLE_ROWS),
        index_position=None,
        autosize_mode="none",
        reorderable=False,
        frozen_columns=len(names),
        name="differences",
    )


def _figure(
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


def _tail(values_ns: Any, points: int) -> tuple[list[float], list[float]]:
    if not len(values_ns):
        return [], []
    values, larger = tail_steps(values_ns / 1e6, points)
    return [float(f"{value:.5g}") for value in values], [float(f"{share:.4g}") for share in larger]


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > 8 * min(values)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(f"{value:.6g}")


def _plain(key: str) -> Any:
    return NumberFormatter(format="0") if key == "chunk" else StringFormatter()


def _place(summary: Mapping[str, Any]) -> str:
    return f"{summary['model']} on {summary['device']}"


def _is_whole(run: Run) -> bool:
    return bool(run.summary["status"] == "complete")


def _darker(color: str) -> str:
    return "#" + "".join(f"{int(int(color[at : at + 2], 16) * 0.6):02x}" for at in (1, 3, 5))
