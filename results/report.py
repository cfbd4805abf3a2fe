"""One self-contained HTML page about several runs: table, pictures, configs, provenance. No file beside it,
no network."""

import base64
import html
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from results.files import user_file
from results.identity import printable
from results.load import Run
from results.plots.gallery import MAX_WORKLOADS, draw_pictures, pictures_of_runs
from results.requestlog import read_requests
from results.rundir import CONFIG, MARKER, REQUESTS
from results.table import LEGEND, MIN_LEAD, columns_of, table_lines

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


def write_report(runs: Sequence[Run], path: Path, unfinished: Sequence[Path] = ()) -> list[str]:
    """Write the page to `path`, whole or not at all; return what it lacks, a sentence each: the `unfinished`
    run directories, pictures that could not be drawn.

    Raises `InputError` when it cannot be written, or when the log of a run cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        files, notes = draw_pictures(pictures_of_runs(checked(runs)), Path(folder))
        pictures = [_inline(file) for file in files]
    notes += [f"left out, did not end: {printable(str(item))}" for item in unfinished]
    if (num_workloads := len({run.workload for run in runs})) > MAX_WORKLOADS:
        notes.append(f"{MAX_WORKLOADS} of {num_workloads} workloads have pictures")
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Runs</title><style>{STYLE}</style>",
        f"<h1>{len(runs)} run{'s' if len(runs) != 1 else ''}: {_names(runs)}</h1>",
        "<h2>Comparison</h2>",
        _table(runs),
        "<p class='note'>Green: best of its workload, or within "
        f"{MIN_LEAD:.0%} of it. Latencies in ms. Percentiles interpolate linearly "
        "between ranks. Rows per invocation: rows summed over recurrent invocations, divided by their "
        f"number. {html.escape(' '.join(LEGEND))}</p>",
        *pictures,
        "<h2>Where these numbers come from</h2>",
        *(f"<p class='note'>{html.escape(note)}</p>" for note in notes),
        *map(_provenance, runs),
        "</html>\n",
    ]
    with user_file(path) as draft:
        draft.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")
    return notes


def checked(runs: Sequence[Run]) -> Sequence[Run]:
    """`runs` once every log that a picture may show is known to be one. Raises `InputError`."""
    for run in runs:
        if run.has_logs:
            for _ in chain(read_requests(run.path / REQUESTS), run.batches()):
                pass
    return runs


def _names(runs: Sequence[Run]) -> str:
    models = sorted({f"{run.summary['model']} on {run.summary['device']}" for run in runs})
    return html.escape(", ".join(models))


def _table(runs: Sequence[Run]) -> str:
    summaries = [run.summary for run in runs]
    heads = "".join(f"<th class='name'>{name}</th>" for name in ("workload", "policy", "chunk", "requests"))
    heads += "".join(
        f"<th>{html.escape(column.head)}<br>{html.escape(column.unit)}</th>"
        for column in columns_of(summaries)
    )
    heads += "<th class='name'>limited<br>by</th>"
    rows, previous = [], None
    for line in table_lines(summaries):
        names = "".join(
            f"<td class='name'>{html.escape(text)}</td>"
            for text in (line.workload, line.policy, line.chunk, line.requests)
        )
        cells = "".join(
            f"<td{' class=best' if is_best else ''}>{html.escape(text)}</td>" for text, is_best in line.cells
        )
        cells += f"<td class='name'>{html.escape(line.limit)}</td>"
        rows.append(f"<tr{' class=first' if line.workload != previous else ''}>{names}{cells}</tr>")
        previous = line.workload
    return f"<div class='wide'><table><tr>{heads}</tr>{''.join(rows)}</table></div>"


def _inline(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    return f"<img alt='{html.escape(file.stem, quote=True)}' src='data:image/png;base64,{data}'>"


def _provenance(run: Run) -> str:
    summary = run.summary
    world = "simulated" if summary.get("world") == "sim" else "measured"
    facts = [
        f"{world}, {summary['status']}, {summary['num_requests']} requests, {summary['num_batches']} batches",
        f"config SHA-256 {summary['config_sha256'][:12]}",
    ]
    if summary.get("skipped_rows"):
        facts.append(f"{summary['skipped_rows']} workload rows skipped")
    facts += [f"refused {count}: {reason}" for reason, count in summary.get("refusal_reasons", {}).items()]
    facts += summary.get("notes", ())
    text = "<br>".join(html.escape(printable(fact)) for fact in facts)
    config = html.escape((run.path / CONFIG).read_text(encoding="utf-8").removeprefix(MARKER))
    name = html.escape(printable(str(run.path)))
    return f"<details><summary>{name}</summary><p>{text}</p><pre>{config}</pre></details>"
