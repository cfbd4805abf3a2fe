"""A comparison on the screen: errors of the figures, of batches by stage, orders of policies, and the verdict
in one line."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from results.comparison.batches import StageErrors
from results.comparison.compare import Cell, Comparison
from results.comparison.figures import ENOUGH_REPEATS, Figure, by_label
from results.comparison.ranking import RANKED, agreement
from results.table import plain_table, print_whole

MOST_ORDERS = 8


def print_comparison(comparison: Comparison, file: TextIO | None = None) -> None:
    """Print to `file` (default: standard output). Beyond a tolerance is bold red, and `!` where there is no
    terminal."""
    file = file if file is not None else sys.stdout
    marks = not Console(file=file).is_terminal
    print_whole(figure_table(comparison, marks), file)
    if comparison.stages:
        print_whole(stage_table(comparison.stages), file)
    for line in sentences(comparison):
        print(line, file=file)


def figure_table(comparison: Comparison, marks: bool) -> Table:
    """A line per cell: errors in percent with the measured spread, and whether the decisions were equal."""
    table = plain_table("simulated / measured - 1, in % (± spread of the repeats)")
    for name, justify in (("workload", "left"), ("policy", "left"), ("repeats", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for label in RANKED:
        table.add_column(label.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("decisions", no_wrap=True)
    previous = None
    for cell in comparison.cells:
        pair = cell.pair
        if previous not in (None, pair.workload):
            table.add_row()
        figures = by_label(cell.figures)
        table.add_row(
            Text(pair.workload if pair.workload != previous else ""),
            Text(pair.predicted.policy),
            repeats(cell),
            *(_error_cell(figures.get(label), marks) for label in RANKED),
            decisions(cell),
        )
        previous = pair.workload
    return table


def stage_table(stages: Sequence[StageErrors]) -> Table:
    table = plain_table("device time of the same batches; host: select, prepare and launch")
    for name in ("stage", "batches", "measured s", "simulated s", "bias", "median error", "p95 error"):
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for item in stages:
        table.add_row(*stage_cells(item))
    return table


def stage_cells(item: StageErrors) -> tuple[str, ...]:
    return (
        item.stage,
        f"{item.num_batches:,}",
        f"{item.measured_s:,.2f}",
        f"{item.predicted_s:,.2f}",
        f"{item.bias:+.1%}",
        f"{item.median:.1%}",
        f"{item.p95:.1%}",
    )


def error_text(figure: Figure) -> str:
    """`+3.1 ±0.4` percent; without a second run no spread."""
    return f"{100 * figure.error:+.1f}" + (
        f" ±{100 * figure.spread:.1f}" if figure.spread is not None else ""
    )


def repeats(cell: Cell) -> str:
    """How often it was measured, `*` behind fewer than that a spread can be known from."""
    count = len(cell.pair.measured)
    return f"{count}*" if count < ENOUGH_REPEATS else str(count)


def decisions(cell: Cell) -> str:
    if cell.is_replayed is None:
        return "not replayed"
    return "equal" if cell.is_replayed else "DIFFER"


def sentences(comparison: Comparison) -> list[str]:
    """What the tables do not say, the verdict last."""
    found = [f"note: {note}" for note in comparison.notes]
    found += [
        f"decisions differ: {item.run} after {item.num_batches} equal batches: {item.difference}"
        for item in comparison.differences
    ]
    if comparison.ranking:
        gap = comparison.tolerances.rank_gap
        found.append(f"policies that differ by more than {gap:.1%}: {agreement(comparison.ranking)}")
        wrong = comparison.wrong_orders
        found += [
            f"  other way round: {order.workload}, {order.figure}: {order.sentence}"
            for order in wrong[:MOST_ORDERS]
        ]
        if len(wrong) > MOST_ORDERS:
            found.append(f"  and {len(wrong) - MOST_ORDERS} more")
    return [*found, verdict(comparison)]


def verdict(comparison: Comparison) -> str:
    checked = [
        figure for cell in comparison.counted for figure in cell.figures if figure.tolerance is not None
    ]
    limits = comparison.tolerances
    text = (
        f"{len(checked) - len(comparison.misses)} of {len(checked)} figures within {limits.p50:.1%} at p50, "
        f"{limits.p99:.1%} at p99 and {limits.throughput:.1%} of throughput"
    )
    if comparison.misses:
        cell, figure = comparison.misses[0]
        text += f"; the worst: {figure.label} of {cell.pair.label}, {100 * figure.error:+.1f} %"
    return text


def _error_cell(figure: Figure | None, marks: bool) -> Text:
    if figure is None:
        return Text("-")
    if figure.holds:
        return Text(error_text(figure))
    return Text(error_text(figure) + ("!" if marks else ""), style="bold red")
