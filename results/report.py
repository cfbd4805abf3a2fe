"""One self-contained HTML page about several runs: table, pictures, configs, provenance. No file beside it,
no network."""

import base64
import html
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from policies.core.errors import InputError
from results.identity import policy_order
from results.load import Run
from results.plots import plot_latency_cdfs, plot_pareto, plot_rows, plot_wavefront
from results.rundir import BATCHES
from results.table import COLUMNS, table_lines

MAX_PANELS = 8
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff;
       margin: 2rem auto; max-width: 1240px;
       padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #e5e7eb }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 12.5px; white-space: nowrap }
th { text-align: right; font-weight: 600; color: #4b5563; vertical-align: bottom }
td { text-align: right; font-variant-numeric: tabular-nums }
th, td { padding: .22rem .55rem; border-bottom: 1px solid #f3f4f6 }
tr.first td { border-top: 2px solid #d1d5db }
.name { text-align: left } .best { font-weight: 700; color: #15803d } img { max-width: 100%; margin: .6rem 0 }
pre { background: #f9fafb; padding: .8rem; overflow-x: auto; font-size: 12px }
summary { cursor: pointer } .note { color: #6b7280 }
"""


def write_report(runs: Sequence[Run], path: Path, unfinished: Sequence[Path] = ()) -> None:
    """Write the page to `path`, naming the `unfinished` run directories. Raises `InputError` when it cannot
    be written."""
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Runs</title><style>{STYLE}</style>",
        f"<h1>{len(runs)} run{'s' if len(runs) != 1 else ''}: {_names(runs)}</h1>",
        "<h2>Comparison</h2>",
        _table(runs),
        "<p class='note'>Green: best of its workload. Latencies in ms. Percentiles interpolate linearly "
        "between ranks. Rows per invocation: rows summed over recurrent invocations, divided by their "
        "number.</p>",
    ]
    with tempfile.TemporaryDirectory() as folder:
        parts += _pictures(runs, Path(folder))
    parts += ["<h2>Where these numbers come from</h2>", *_provenance(runs, unfinished), "</html>\n"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _names(runs: Sequence[Run]) -> str:
    models = sorted({f"{run.summary['model']} on {run.summary['device']}" for run in runs})
    return html.escape(", ".join(models))


def _table(runs: Sequence[Run]) -> str:
    heads = "".join(f"<th class='name'>{name}</th>" for name in ("workload", "policy", "chunk", "requests"))
    heads += "".join(
        f"<th>{html.escape(column.head)}<br>{html.escape(column.unit)}</th>" for column in COLUMNS
    )
    rows, previous = [], None
    for line in table_lines([run.summary for run in runs]):
        names = "".join(
            f"<td class='name'>{html.escape(text)}</td>"
            for text in (line.workload, line.policy, line.chunk, line.requests)
        )
        cells = "".join(
            f"<td{' class=best' if is_best else ''}>{html.escape(text)}</td>" for text, is_best in line.cells
        )
        rows.append(f"<tr{' class=first' if line.workload != previous else ''}>{names}{cells}</tr>")
        previous = line.workload
    return f"<div class='wide'><table><tr>{heads}</tr>{''.join(rows)}</table></div>"


def _pictures(runs: Sequence[Run], folder: Path) -> list[str]:
    parts = ["<h2>Throughput against tail latency</h2>"]
    file = folder / "picture.png"
    plot_pareto(runs, file)
    parts.append(_inline(file, "throughput against p99 latency by policy and chunk size"))
    for workload in dict.fromkeys(run.workload for run in runs):
        mine = [run for run in runs if run.workload == workload]
        parts.append(f"<h2>{html.escape(workload)}</h2>")
        plot_latency_cdfs(mine, file)
        parts.append(_inline(file, f"latency distributions on {workload}"))
        shown = typical_runs(
            [run for run in mine if (run.path / BATCHES).is_file() and run.summary["num_batches"]]
        )
        if shown:
            plot_rows(shown, file)
            parts.append(_inline(file, f"rows per invocation over time on {workload}"))
            if len({run.num_loops for run in shown}) == 1:
                plot_wavefront(shown, file)
                parts.append(_inline(file, f"wavefront on {workload}"))
    return parts


def typical_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs to set side by side: the chunk size that most policies ran, the smallest of equals; at most
    `MAX_PANELS`."""
    if not runs:
        return []
    counts = Counter(run.chunk_tokens for run in runs)
    chunk = min(counts, key=lambda size: (-counts[size], size))
    return sorted(
        (run for run in runs if run.chunk_tokens == chunk), key=lambda run: policy_order(run.policy)
    )[:MAX_PANELS]


def _inline(file: Path, alternative: str) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f"<img alt='{html.escape(alternative, quote=True)}' src='data:image/png;base64,{data}'>"


def _provenance(runs: Sequence[Run], unfinished: Sequence[Path]) -> list[str]:
    parts = []
    if unfinished:
        names = ", ".join(html.escape(str(path)) for path in unfinished)
        parts.append(f"<p class='note'>Left out because they did not end: {names}</p>")
    for run in runs:
        summary = run.summary
        world = "simulated" if summary.get("world") == "sim" else "measured"
        facts = [
            f"{world}, {summary['status']}, {summary['num_requests']} requests, {summary['num_batches']} "
            "batches",
            f"config SHA-256 {str(summary.get('config_sha256', ''))[:12]}",
        ]
        if summary.get("skipped_rows"):
            facts.append(f"{summary['skipped_rows']} workload rows skipped")
        facts += [
            f"refused {count}: {reason}" for reason, count in summary.get("refusal_reasons", {}).items()
        ]
        facts += [str(note) for note in summary.get("notes", ())]
        text = "<br>".join(html.escape(fact) for fact in facts)
        config = html.escape(yaml.safe_dump(dict(run.config), sort_keys=False))
        parts.append(
            f"<details><summary>{html.escape(str(run.path))}</summary><p>{text}</p><pre>{config}</pre></details>"
        )
    return parts
