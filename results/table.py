"""The comparison table: one line per run, from summaries alone. Plain text of full width when nobody looks at
a terminal."""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from results.identity import policy_label, policy_order

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: its two header lines, where it is in a summary, how it is written, and which way is better
    (None: neither)."""

    head: str
    unit: str
    value: Callable[[Summary], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = None


def _latency(name: str, statistic: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[name][statistic]


def _key(name: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[name]


COLUMNS = (
    Column("prompt", "tok/s", _key("prompt_token_throughput"), ",.1f", max),
    Column("output", "tok/s", _key("output_token_throughput"), ",.1f", max),
    Column("requests", "/s", _key("request_throughput"), ",.3f", max),
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
    """One run as text: names, then a cell per `COLUMNS` entry with whether it is its workload's best."""

    workload: str
    policy: str
    chunk: str
    requests: str
    cells: tuple[tuple[str, bool], ...]


def table_lines(summaries: Sequence[Summary]) -> list[Line]:
    """Lines by workload (in the order given), then chunk, then policy in the menu's order.

    A figure is best when no run of the same workload beats it in what is shown, and some run does worse. A
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
    best = {
        workload: _best([item for item in summaries if _group(item) == workload]) for workload in workloads
    }
    several = len({(item["model"], item["device"], item.get("world")) for item in summaries}) > 1
    lines = []
    for item in ordered:
        texts = [_format(column.value(item), column.form) for column in COLUMNS]
        can_win = item["status"] == "complete"
        cells = tuple(
            (text, can_win and text == winner) for text, winner in zip(texts, best[_group(item)], strict=True)
        )
        name = item["workload"] + (
            f" · {item['model']} on {item['device']} ({item.get('world')})" if several else ""
        )
        policy = policy_label(item) + ("" if can_win else f" ({item['status']})")
        lines.append(Line(name, policy, str(item["prefill_chunk_size"]), _requests(item), cells))
    return lines


def plain_table(title: str | None) -> Table:
    """An empty table in the one style that all tables of figures have."""
    return Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def comparison_table(summaries: Sequence[Summary], marks_best: bool = False) -> Table:
    """A rich table of `summaries`. The best of each workload is bold green, and with `marks_best` also has a
    `*`."""
    models = sorted({f"{item['model']} on {item['device']} ({item.get('world')})" for item in summaries})
    title = models[0] if len(models) == 1 else None
    table = plain_table(title)
    for name, justify in (
        ("workload", "left"),
        ("policy", "left"),
        ("chunk", "right"),
        ("requests\nfinished", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for column in COLUMNS:
        table.add_column(f"{column.head}\n{column.unit}", justify="right", no_wrap=True)
    previous = None
    for line in table_lines(summaries):
        if previous is not None and line.workload != previous:
            table.add_row()
        mark = "*" if marks_best else ""
        cells = [
            Text(text + mark, style="bold green") if is_best else Text(text) for text, is_best in line.cells
        ]
        table.add_row(
            line.workload if line.workload != previous else "", line.policy, line.chunk, line.requests, *cells
        )
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
        file.write("* best of its workload\n")


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


def _group(summary: Summary) -> tuple[str, ...]:
    """What runs must share to compete: the workload, on the same model and device of the same world."""
    return tuple(str(summary.get(key)) for key in ("workload", "model", "device", "world"))


def _best(summaries: Sequence[Summary]) -> list[str | None]:
    """The winning text of every column among complete runs, None where nothing wins."""
    found: list[str | None] = []
    for column in COLUMNS:
        values = [
            value
            for item in summaries
            if item["status"] == "complete" and (value := column.value(item)) is not None
        ]
        texts = {_format(value, column.form) for value in values}
        found.append(_format(column.best(values), column.form) if column.best and len(texts) > 1 else None)
    return found


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _requests(summary: Summary) -> str:
    finished, refused, total = summary["num_finished"], summary["num_refused"], summary["num_requests"]
    rest = total - finished - refused
    return str(finished) + (f" + {refused} refused" if refused else "") + (f" of {total}" if rest else "")
