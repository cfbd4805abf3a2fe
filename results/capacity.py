"""What a capacity search leaves: `capacity.json` (answers, one for each cell and seed), `capacity.csv` (one
row for each cell), a table and sentences. Arithmetic and words; searches nothing."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from results.files import user_file
from results.identity import policy_order
from results.table import plain_table, transfer_notes

Answer = Mapping[str, Any]
NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E", "refused": "refused"}
ADAPTIVE = ("slo",)
"""Policies that choose the size of a chunk themselves, up to the one that is given."""


@dataclass(frozen=True, slots=True)
class Row:
    """A cell over its seeds. `value` is the mean over seeds, `low` and `high` the 95 % interval of that mean
    (Student's t), None with one seed; `value` None where the objectives are out of reach."""

    policy: str
    chunk_tokens: int
    workload: str
    value: float | None
    low: float | None
    high: float | None
    answers: tuple[Answer, ...]

    @property
    def per_card(self) -> float | None:
        """Requests/s for each replica."""
        rates = [item["requests_per_s"] / item["replicas"] for item in self.answers if item["requests_per_s"]]
        return statistics.fmean(rates) if self.value is not None and rates else None

    @property
    def is_open(self) -> bool:
        return any(item["is_open"] for item in self.answers)

    @property
    def is_fixed(self) -> bool:
        """Whether its chunk is what the config says."""
        return self.policy.split()[0] not in ADAPTIVE

    @property
    def limit(self) -> str:
        """Which objectives the late requests of the next step missed."""
        missed: dict[str, int] = {}
        for item in self.answers:
            for name, count in ((item["beyond"] or item["alone"] or {}).get("missed_by") or {}).items():
                missed[name] = missed.get(name, 0) + count
        total = sum(missed.values())
        ordered = sorted(missed, key=lambda name: (-missed[name], name))
        return " ".join(f"{NAMES.get(name, name)} {missed[name] / total:.0%}" for name in ordered)


def rows_of(cells: Sequence[Sequence[Answer]]) -> list[Row]:
    """A row for each cell, in order of workload, chunk and policy."""
    rows = []
    for answers in cells:
        first, values = answers[0], [item["value"] for item in answers]
        mean = low = high = None
        if None not in values:
            mean = statistics.fmean(values)
            if len(values) > 1 and not any(item["is_open"] for item in answers):
                half = _t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
                low, high = mean - half, mean + half
        rows.append(
            Row(
                first["policy"],
                first["prefill_chunk_size"],
                first["workload"],
                mean,
                low,
                high,
                tuple(answers),
            )
        )
    workloads = list(dict.fromkeys(row.workload for row in rows))
    return sorted(
        rows, key=lambda row: (workloads.index(row.workload), row.chunk_tokens, policy_order(row.policy))
    )


def _t95(degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def winner(rows: Sequence[Row], fixed_only: bool = False) -> Row | None:
    """The row with the highest rate, or the fewest replicas; of equals the first."""
    able = [row for row in rows if row.value is not None and (row.is_fixed or not fixed_only)]
    if not able:
        return None
    if able[0].answers[0]["axis"] == "replicas":
        return min(able, key=lambda row: row.value or 0.0)
    return max(able, key=lambda row: row.value or 0.0)


def capacity_table(rows: Sequence[Row], slo: Mapping[str, Any], marks_best: bool) -> Table:
    """One line for each row; the best of each workload has a `*` where there is no colour."""
    is_rate = rows[0].answers[0]["axis"] == "rate"
    table = plain_table(
        f"{rows[0].answers[0]['model']} on {rows[0].answers[0]['device']} (sim): {objectives(slo)}"
    )
    has_seeds = any(row.low is not None for row in rows)
    heads = [("workload", False), ("policy", False), ("chunk", True)]
    heads.append(("capacity\nrequests/s" if is_rate else "cards\nneeded", True))
    heads += [("95 %\ninterval", True), ("seeds", True)] if has_seeds else []
    heads += [("per card\nrequests/s", True)] if not is_rate or rows[0].answers[0]["replicas"] > 1 else []
    heads += [
        ("output\ntok/s", True),
        ("kept by\n%", True),
        ("device\nbusy %", True),
        ("one step further late by", False),
    ]
    for head, is_number in heads:
        table.add_column(head, justify="right" if is_number else "left", no_wrap=True)
    previous = None
    for row in rows:
        mine = [item for item in rows if item.workload == row.workload]
        is_best = row is winner(mine)
        at = [item["at"] for item in row.answers if item["at"]]
        spelled = "out of reach" if row.value is None else f"{row.value:.4g}"
        spelled += " or more" if row.is_open else ""
        value = Text(spelled + ("*" if is_best and marks_best else ""), style="bold green" if is_best else "")
        cells = [
            Text("" if row.workload == previous else row.workload),
            Text(row.policy),
            Text(str(row.chunk_tokens)),
            value,
        ]
        if has_seeds:
            interval = "-" if row.low is None else f"{row.low:.4g} to {row.high:.4g}"
            cells += [Text(interval), Text(str(len(row.answers)))]
        if ("per card\nrequests/s", True) in heads:
            cells.append(Text("-" if row.per_card is None else f"{row.per_card:.4g}"))
        kept = at or [item["alone"] for item in row.answers if item["alone"] and item["alone"]["is_whole"]]
        cells += [
            Text(_mean([item["output_tokens"] / item["duration_s"] for item in at], ".0f")),
            Text(_mean([100 * item["share_met"] for item in kept if item["share_met"] is not None], ".2f")),
            Text(_mean([100 * item["gpu_busy_fraction"] for item in at], ".0f")),
            Text(row.limit or "-"),
        ]
        table.add_row(*cells)
        previous = row.workload
    return table


def _mean(values: Sequence[float], form: str) -> str:
    return format(statistics.fmean(values), form) if values else "-"


def objectives(slo: Mapping[str, Any]) -> str:
    """`TTFT <= 500 ms and ITL <= 20 ms for 99 % of requests`."""
    limits = " and ".join(f"{NAMES[name]} <= {slo[name]:g} ms" for name in NAMES if name in slo)
    return f"{limits} for {100 * slo['share']:g} % of requests"


def sentences(rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know: what is out of reach, what is open, where it is not one piece."""
    found = []
    able = [row for row in rows if row.value is not None]
    for row in rows:
        name = f"{row.policy} at chunk {row.chunk_tokens}" + (f", {row.workload}" if row.workload else "")
        if row.value is None and not able:
            continue
        for item in row.answers:
            seed = f", seed {item['seed']}" if len(row.answers) > 1 else ""
            if item["exceptions"] and item["value"] is not None:
                others = [
                    f"{value:.4g} ({'does not hold' if _is_lighter(item, value) else 'holds'})"
                    for value in item["exceptions"]
                ]
                found.append(
                    f"{name}{seed}: not one piece: it holds at {item['value']:.4g} and not one step further, "
                    f"but {', '.join(others)}"
                )
    if not able:
        best = max(
            rows, key=lambda row: max((item["alone"] or {}).get("share_met") or 0.0 for item in row.answers)
        )
        share = max((item["alone"] or {}).get("share_met") or 0.0 for item in best.answers)
        found.append(
            f"out of reach: with every request alone {share:.2%} keep "
            f"{objectives(best.answers[0]['slo'])}; the "
            f"best there is is {best.policy} at chunk {best.chunk_tokens}, and there requests are late by "
            f"{best.limit}"
        )
    found += transfer_notes(str(item["device"]) for row in rows for item in row.answers)
    if any(row.is_open for row in able):
        found.append("or more: the objectives hold however fast these requests come; take more of them")
    return found


def _is_lighter(item: Answer, value: float) -> bool:
    return bool(value < item["value"] if item["axis"] == "rate" else value > item["value"])


def write_capacity(rows: Sequence[Row], out: Path, more: Mapping[str, Any]) -> None:
    """`capacity.csv` and `capacity.json` in `out`; `more` goes into the latter."""
    table = [
        {
            "workload": row.workload,
            "policy": row.policy,
            "prefill_chunk_size": row.chunk_tokens,
            "axis": row.answers[0]["axis"],
            "capacity": row.value,
            "low": row.low,
            "high": row.high,
            "seeds": len(row.answers),
            "replicas": row.answers[0]["replicas"],
            "requests_per_s_per_card": row.per_card,
            "is_open": row.is_open,
            "is_one_piece": not any(item["exceptions"] for item in row.answers),
            "late_by": row.limit,
        }
        for row in rows
    ]
    with user_file(out / "capacity.csv") as draft:
        pd.DataFrame(table).to_csv(draft, index=False, errors="backslashreplace")
    answers = [answer for row in rows for answer in row.answers]
    with user_file(out / "capacity.json") as draft:
        draft.write_text(json.dumps({**more, "answers": answers}, indent=1) + "\n", encoding="utf-8")
