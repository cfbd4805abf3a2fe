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
    ColumnDataSource,
    CustomJS,
    DataTable,
    FixedTicker,
    HoverTool,
    HTMLTemplateFormatter,
    NumberFormatter,
    Range1d,
    Select,
    StringFormatter,
    TableColumn,
)
from bokeh.resources import Resources

from results.difference import Row, figure_names
from results.load import Run
from results.page_figures import LATENCIES, new_figure, number, shown_text
from results.plots.cdf import tail_steps
from results.plots.style import REQUEST_COLORS, policy_styles
from results.plots.window import default_window, lane_bounds, layout
from results.table import columns_of, limit_text, requests_text

MOST_WAVEFRONT_BYTES, MOST_CDF_BYTES = 450_000, 300_000
LEAST_WAVEFRONT_BYTES, BYTES_PER_RUN = 60_000, 400
"""What a run takes of the page elsewhere, wavefronts leave out: 1,000 runs make a page of less than 3 MB."""
MOST_CDF_POINTS, BYTES_PER_POINT, BYTES_PER_BOX = 120, 14, 60
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
        data[f"c{at}"] = [number(column.value(summary)) for summary in summaries]
    for key, name in (("ttft_ms", "ttft"), ("itl_ms", "itl")):
        data[name] = [number(summary[key]["p99"]) for summary in summaries]
    data["output"] = [number(summary["output_token_throughput"]) for summary in summaries]
    data["prompt"] = [number(summary["prompt_token_throughput"]) for summary in summaries]
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


def wavefront_parts(runs: Sequence[Run], source: ColumnDataSource) -> tuple[Any, Any, int]:
    """(the choice of a run, its wavefront, how many runs have one): as many in order as the page has room
    for."""
    fields = ("left", "right", "bottom", "top", "color", "text", "time")
    waves: dict[str, list[Any]] = {name: [] for name in ("run", "title", "end", *fields)}
    room = max(MOST_WAVEFRONT_BYTES - BYTES_PER_RUN * len(runs), LEAST_WAVEFRONT_BYTES)
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
    plot = new_figure(waves["title"][0], "ms from there", "", 1200, 330)
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


def difference_table(rows: Sequence[Row]) -> DataTable:
    """Differences of two sides, one row for each pair; a click on a head sorts by the difference itself,
    those without one at an end."""
    names, figures = ("workload", "policy", "chunk"), figure_names(rows)
    data: dict[str, list[Any]] = {
        name: [shown_text(row.names[at]) for row in rows] for at, name in enumerate(names)
    }
    data["chunk"] = [row.a.chunk_tokens for row in rows]
    columns = [TableColumn(field=name, title=name, width=160, formatter=_plain(name)) for name in names]
    for at, name in enumerate(figures):
        found = [{item.name: item for item in row.figures}.get(name) for row in rows]
        data[f"change{at}"] = [-math.inf if item is None else item.change for item in found]
        data[f"text{at}"] = ["-" if item is None else str(item) for item in found]
        shown = HTMLTemplateFormatter(template=f"<%- text{at} %>")
        columns.append(TableColumn(field=f"change{at}", title=name, width=190, formatter=shown))
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


def _tail(values_ns: Any, points: int) -> tuple[list[float], list[float]]:
    if not len(values_ns):
        return [], []
    values, larger = tail_steps(values_ns / 1e6, points)
    return [float(f"{value:.5g}") for value in values], [float(f"{share:.4g}") for share in larger]


def _plain(key: str) -> Any:
    return NumberFormatter(format="0") if key == "chunk" else StringFormatter()


def _place(summary: Mapping[str, Any]) -> str:
    return f"{summary['model']} on {summary['device']}"


def _is_whole(run: Run) -> bool:
    return bool(run.summary["status"] == "complete")


def _darker(color: str) -> str:
    return "#" + "".join(f"{int(int(color[at : at + 2], 16) * 0.6):02x}" for at in (1, 3, 5))
