"""The comparison table: one line per run, from summaries alone. Plain text of full width when nobody looks at
a terminal."""

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from results.identity import policy_label, policy_order, printable
from results.window import run_s

Summary = Mapping[str, Any]
MIN_LEAD = 0.01
"""A figure that is nearer to another run's is no better than it."""
LEGEND = (
    "wait: from arrival until first scheduled, part of TTFT.",
    "limited by: places (max_num_seqs) or kv, with the share of the time in which a request waited for it; "
    "else device, host or arrivals.",
)


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: its two header lines, where it is in a summary, how it is written, and which way is better
    (None: neither)."""

    head: str
    unit: str
    value: Callable[[Summary], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = None
    is_optional: bool = False
    """It has no place in a table where no run has it."""


def _latency(name: str, statistic: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[name][statistic]


def _key(name: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[name]


def _slo(name: str) -> Callable[[Summary], float | None]:
    return lambda summary: (summary.get("slo") or {}).get(name)


COLUMNS = (
    Column("offered", "/s", lambda summary: summary.get("offered_request_rate"), ",.3f"),
    Column("prompt", "tok/s", _key("prompt_token_throughput"), ",.1f", max),
    Column("output", "tok/s", _key("output_token_throughput"), ",.1f", max),
    Column("requests", "/s", _key("request_throughput"), ",.3f", max),
    Column("SLO", "met", _slo("share_met"), ".1%", max, is_optional=True),
    Column("goodput", "/s", _slo("goodput"), ",.3f", max, is_optional=True),
    Column("wait p99", "ms", lambda summary: (summary.get("queue_ms") or {}).get("p99"), ",.1f"),
    Column("TTFT p50", "ms", _latency("ttft_ms", "p50"), ",.1f", min),
    Column("TTFT p99", "ms", _latency("ttft_ms", "p99"), ",.1f", min),
    Column("ITL p50", "ms", _latency("itl_ms", "p50"), ",.2f", min),
    Column("ITL p99", "ms", _latency("itl_ms", "p99"), ",.2f", min),
    Column("TPOT p50", "ms", _latency("tpot_ms", "p50"), ",.2f", min),
    Column("E2E p50", "ms", _latency("e2e_ms", "p50"), ",.1f", min),
    Column("E2E p99", "ms", _latency("e2e_ms", "p99"), ",.1f", min),
    Column("rows per", "invocation", _key("rows_per_recurrent_invocation"), ",.2f"),
    Column("GPU", "busy", _key("gpu_busy_fraction"), ".1%"),
    Column("limit", "fraction", _key("limit_fraction"), ".1%"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One run as text: names, then a cell per column of `columns_of` with whether it is its workload's best,
    then what limited it."""

    workload: str
    policy: str
    chunk: str
    requests: str
    cells: tuple[tuple[str, bool], ...]
    limit: str


def columns_of(summaries: Sequence[Summary]) -> list[Column]:
    """The columns of a table of `summaries`."""
    return [
        column
        for column in COLUMNS
        if not column.is_optional or any(column.value(item) is not None for item in summaries)
    ]


def table_lines(summaries: Sequence[Summary]) -> list[Line]:
    """Lines by workload (in the order given), then chunk, then policy in the menu's order.

    A figure is best when no run of the same workload beats it by more than `MIN_LEAD`, and some run does
    worse by more than that. A
    run that did not complete says so beside its policy and competes for nothing; refused requests are in the
    `requests` field as `98 + 2 refused`.
    """
    workloads = list(dict.fromkeys(_group(summary) for summary in summaries))
    ordered = sorted(
        summaries,
        key=lambda item: (
            workloads.index(_group(item)),
            item["prefill_chunk_size"],
            policy_order(policy_label(item)),
        ),
    )
    columns = columns_of(summaries)
    best = {
        workload: _best([item for item in summaries if _group(item) == workload], columns)
        for workload in workloads
    }
    several = len({(item["model"], item["device"], item.get("world")) for item in summaries}) > 1
    lines = []
    for item in ordered:
        texts = [_format(column.value(item), column.form) for column in columns]
        can_win = item["status"] == "complete"
        cells = tuple(
            (text, can_win and _is_as_good(column.value(item), winner))
            for text, winner, column in zip(texts, best[_group(item)], columns, strict=True)
        )
        name = printable(item["workload"] + (f" · {_place(item)}" if several else ""))
        policy = policy_label(item) + ("" if can_win else f" ({item['status']})")
        lines.append(
            Line(name, policy, str(item["prefill_chunk_size"]), requests_text(item), cells, limit_text(item))
        )
    return lines


def plain_table(title: str | None) -> Table:
    """An empty table in the one style that all tables of figures have."""
    return Table(
        title=None if title is None else Text(title),
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def comparison_table(summaries: Sequence[Summary], marks_best: bool = False) -> Table:
    """A rich table of `summaries`. The best of each workload is bold green, and with `marks_best` also has a
    `*`."""
    models = sorted({printable(_place(item)) for item in summaries})
    title = models[0] if len(models) == 1 else None
    table = plain_table(title)
    for name, justify in (
        ("workload", "left"),
        ("policy", "left"),
        ("chunk", "right"),
        ("requests\nfinished", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for column in columns_of(summaries):
        table.add_column(f"{column.head}\n{column.unit}", justify="right", no_wrap=True)
    table.add_column("limited\nby", no_wrap=True)
    previous = None
    for line in table_lines(summaries):
        if previous is not None and line.workload != previous:
            table.add_row()
        mark = "*" if marks_best else ""
        cells = [
            Text(text + mark, style="bold green") if is_best else Text(text) for text, is_best in line.cells
        ]
        names = (line.workload if line.workload != previous else "", line.policy, line.chunk, line.requests)
        table.add_row(*map(Text, names), *cells, Text(line.limit))
        previous = line.workload
    return table


def print_table(summaries: Sequence[Summary], file: TextIO | None = None) -> None:
    """Print the table to `file` (default: standard output), never narrower than its content.

    Without a terminal there is no colour, and the best figures carry a `*`.
    """
    file = file if file is not None else sys.stdout
    is_terminal = Console(file=file).is_terminal
    print_whole(comparison_table(summaries, marks_best=not is_terminal), file)
    if not is_terminal:
        file.write(f"* best of its workload, or within {MIN_LEAD:.0%} of it\n")
    file.write("\n".join([*LEGEND, *transfer_notes(item["device"] for item in summaries)]) + "\n")


def transfer_notes(devices: Iterable[str]) -> list[str]:
    """What must be known of figures on a device that was scaled to another card, if one of `devices` was."""
    names = {name for item in devices for name in item.split("+") if name.startswith("transfer:")}
    return [
        f"{printable(name)} is scaled by datasheets, not measured: no second card was profiled with these "
        "kernels, so its error is unknown (`python -m sim transfer` has all that is known)"
        for name in sorted(names)
    ]


def print_whole(table: Table, file: TextIO) -> None:
    """Print `table` to `file` at the width it needs, without colour when nobody looks at a terminal."""
    console = Console(file=file)
    wide = console.options.update(width=10_000)
    needed = Measurement.get(console, wide, table).maximum
    if console.is_terminal:
        Console(file=file, width=max(console.width, needed)).print(table)
        return
    plain = Console(file=io.StringIO(), width=needed, color_system=None)
    with plain.capture() as capture:
        plain.print(table)
    file.write("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")


def _place(summary: Summary) -> str:
    return f"{summary['model']} on {summary['device']} ({summary.get('world')})"


def _group(summary: Summary) -> tuple[str, ...]:
    """What runs must share to compete: the workload, on the same model and device of the same world."""
    return tuple(str(summary.get(key)) for key in ("workload", "model", "device", "world"))


def limit_text(summary: Summary) -> str:
    """`places 87%` or `kv 12%` of the time in which somebody waited for it; else what it was, without a
    share."""
    name, duration_s = summary.get("limited_by") or "-", run_s(summary)
    waited_s = summary.get(f"waited_for_{name}_s")
    return printable(name if waited_s is None or not duration_s else f"{name} {waited_s / duration_s:.0%}")


def _best(summaries: Sequence[Summary], columns: Sequence[Column]) -> list[float | None]:
    """The winning value of every column among complete runs, None where nothing wins.

    A column has a winner when some run is worse than it by more than `MIN_LEAD`.
    """
    found: list[float | None] = []
    for column in columns:
        values = [
            value
            for item in summaries
            if item["status"] == "complete" and (value := column.value(item)) is not None
        ]
        best = column.best(values) if column.best and values else None
        is_won = best is not None and not all(_is_as_good(value, best) for value in values)
        found.append(best if is_won else None)
    return found


def _is_as_good(value: float | None, best: float | None) -> bool:
    return value is not None and best is not None and abs(value - best) <= MIN_LEAD * abs(best)


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def requests_text(summary: Summary) -> str:
    finished, refused, total = summary["num_finished"], summary["num_refused"], summary["num_requests"]
    sent = summary.get("num_sent", 0)
    rest = total - finished - refused - sent
    if sent and not finished:
        return f"{sent} sent" + (f" of {total}" if rest or refused else "")
    return str(finished) + (f" + {refused} refused" if refused else "") + (f" of {total}" if rest else "")
