"""A comparison as a Markdown page: the worst misses first, then every figure of every pair with its spread,
batches and ranks."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from results.comparison.compare import Cell, Comparison
from results.comparison.figures import LATENCY_NAMES, THROUGHPUT, by_label
from results.comparison.ranking import agreement
from results.comparison.requests import RequestErrors
from results.comparison.show import decisions, error_text, repeats, stage_cells, verdict
from results.files import user_file
from results.identity import printable

MOST_MISSES = 20
FIGURES = (
    THROUGHPUT,
    *(f"{name} {statistic}" for name in LATENCY_NAMES.values() for statistic in ("p50", "p90", "p99")),
)


def write_markdown(comparison: Comparison, path: Path) -> None:
    """Write the page to `path`. Raises `InputError` when it cannot be written."""
    parts = [
        "# Simulated against measured",
        _sides(comparison),
        escaped(verdict(comparison)) + ".",
        _claims(comparison),
        *_misses(comparison),
        *_figures(comparison),
        *_batches(comparison),
        *_requests(comparison),
        *_ranking(comparison),
    ]
    if comparison.notes:
        parts += [
            "## Not compared, or with less than should be",
            "\n".join(f"- {escaped(note)}" for note in comparison.notes),
        ]
    with user_file(path) as draft:
        draft.write_text("\n\n".join(parts) + "\n", encoding="utf-8", errors="backslashreplace")


def _sides(comparison: Comparison) -> str:
    data = comparison.as_json()
    lines = []
    for name in ("simulated", "measured"):
        side = data[name]
        versions = ", ".join(
            f"{key} {value}" for item in side.get("versions", ()) for key, value in item.items()
        )
        devices = ", ".join(side.get("device", ()))
        lines.append(
            f"- {name}: {side['num_runs']} runs of {escaped(', '.join(side['model']))} on "
            f"{escaped(devices)}{f' ({versions})' if versions else ''}"
        )
    return "\n".join(lines)


def _claims(comparison: Comparison) -> str:
    """What there is to check: runs, logs that were kept, batches decided again."""
    replays = [item for cell in comparison.cells for item in cell.replays]
    runs = sum(len(cell.pair.measured) for cell in comparison.cells)
    batches = sum(item.num_batches for item in replays)
    return (
        f"{len(comparison.counted)} configurations that differ in their batches (of "
        f"{len(comparison.cells)}), {runs} runs, {len(replays)} logs kept: {batches:,} batches decided "
        f"again, {len(comparison.differences)} logs differ."
    )


def _misses(comparison: Comparison) -> list[str]:
    misses = comparison.misses
    if not misses:
        return []
    rows = [
        (
            cell.pair.workload,
            cell.pair.predicted.policy,
            figure.label,
            f"{figure.predicted:,.3f}",
            f"{figure.measured:,.3f}",
            f"{error_text(figure)} %",
            f"{100 * (figure.tolerance or 0):g} %",
        )
        for cell, figure in misses[:MOST_MISSES]
    ]
    head = ("workload", "policy", "figure", "simulated", "measured", "error", "tolerance")
    more = f" (the worst {MOST_MISSES} of {len(misses)})" if len(misses) > MOST_MISSES else ""
    return [
        f"## Beyond their tolerance{more}",
        "Latencies in ms, throughput in requests a second.",
        _table(head, rows, 3),
    ]


def _figures(comparison: Comparison) -> list[str]:
    text = (
        "Error in % of the measured mean, ± the spread of the repeats (the largest distance of one from "
        "their mean); bold is beyond the tolerance, * fewer than three repeats."
    )
    rows = [
        (
            cell.pair.workload,
            cell.pair.predicted.policy,
            repeats(cell),
            *_errors(cell),
            decisions(cell),
        )
        for cell in comparison.cells
    ]
    return [
        "## Every figure",
        text,
        _table(("workload", "policy", "repeats", *FIGURES, "decisions"), rows, 2),
    ]


def _errors(cell: Cell) -> Iterable[str]:
    figures = by_label(cell.figures)
    for label in FIGURES:
        figure = figures.get(label)
        text = "-" if figure is None else error_text(figure)
        yield text if figure is None or figure.holds else f"**{text}**"


def _batches(comparison: Comparison) -> list[str]:
    if not comparison.stages:
        return []
    head = ("stage", "batches", "measured s", "simulated s", "bias", "median error", "p95 error")
    text = (
        "Device time of the batches that were really run, each predicted alone, but for the wait of an idle "
        "device for a launch, which is by the recorded host; `host` is select, prepare and launch."
    )
    return ["## The same batches", text, _table(head, map(stage_cells, comparison.stages), 1)]


def _requests(comparison: Comparison) -> list[str]:
    rows = []
    for cell in comparison.cells:
        if cell.queues is None:
            continue
        latencies = [_request_cell(cell.requests.get(name)) for name in ("TTFT", "TPOT", "E2E")]
        predicted, measured = cell.queues
        waiting = f"{measured.mean_depth:,.1f} / {predicted.mean_depth:,.1f}"
        load = (
            measured.verdict
            if measured.verdict == predicted.verdict
            else f"{measured.verdict} (simulated: {predicted.verdict})"
        )
        rows.append((cell.pair.workload, cell.pair.predicted.policy, *latencies, waiting, load))
    if not rows:
        return []
    head = ("workload", "policy", "TTFT", "TPOT", "E2E", "waiting, measured / simulated", "load")
    text = (
        "Request by request: mean absolute error / bias in ms / correlation. Then how many requests wait in "
        "the mean, and whether they came faster than they were served, so that their wait grew for as long "
        "as they came. A closed loop sends a request when one ends: its wait cannot grow, however busy the "
        "device is."
    )
    return ["## Requests and queues", text, _table(head, rows, 2)]


def _request_cell(errors: RequestErrors | None) -> str:
    if errors is None:
        return "-"
    correlation = "-" if errors.correlation is None else f"{errors.correlation:.2f}"
    return f"{errors.mean_absolute_ms:,.1f} / {errors.bias_ms:+,.1f} / {correlation}"


def _ranking(comparison: Comparison) -> list[str]:
    if not comparison.ranking:
        return []
    gap = comparison.tolerances.rank_gap
    parts = [
        "## Order of the policies",
        f"Of policies that differ by more than {gap:.0%} and by more than their repeats: "
        f"{agreement(comparison.ranking)}.",
    ]
    rows = []
    for workload in comparison.workloads:
        mine = [order for order in comparison.ranking if order.workload == workload]
        wrong = "; ".join(f"{order.figure}: {order.sentence}" for order in mine if not order.is_alike)
        if mine:
            rows.append((workload, agreement(mine), wrong or "-"))
    return [*parts, _table(("workload", "alike", "the other way round"), rows, 3)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], num_names: int) -> str:
    """A Markdown table; columns from `num_names` on are right-aligned, names may hold anything."""
    rules = ["---" if at < num_names else "---:" for at in range(len(head))]
    plain = [[*map(escaped, row[:num_names]), *row[num_names:]] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rules, *plain))


def escaped(text: str) -> str:
    r"""`text` as Markdown that shows just that: `a|b [x]` becomes `a\|b \[x\]`. An underscore inside a word
    means nothing there."""
    return re.sub(r"[\\`*\[\]<>|$#~&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", printable(text))
