"""One self-contained HTML page about several runs: a table that sorts, pictures that answer to the mouse,
configs, provenance. No file beside it, no network, less than 3 MB.

The plotting library, which embeds itself, draws everything that moves (`results.page`); this file frames it
with what is said in words, all of it escaped.
"""

import html
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from policies.core.errors import InputError
from results.difference import LEGEND as LEGEND_OF_DIFFERENCES
from results.difference import Row, places, verdicts
from results.files import user_file
from results.identity import policy_order, printable
from results.load import Run
from results.plots.gallery import MAX_WORKLOADS
from results.requestlog import read_requests
from results.rundir import REQUESTS
from results.table import LEGEND
from results.tradeoff import loads_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; margin: 2rem auto;
       max-width: 1240px; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #e5e7eb }
.row { display: flex; flex-wrap: wrap; gap: .8rem } .wide { overflow-x: auto }
pre { background: #f9fafb; padding: .8rem; overflow-x: auto; font-size: 12px }
summary { cursor: pointer } .note { color: #6b7280 }
"""
CAPACITY = "capacity.csv"
MOST_NAMED = 3
FEW_RUNS = 100
"""Up to so many runs every line of their logs is read before a page is made of them; of more, what it
shows."""


def write_report(
    runs: Sequence[Run], path: Path, unfinished: Sequence[Path] = (), folders: Sequence[Path] = ()
) -> list[str]:
    """Write the page to `path`, whole or not at all; return what it lacks, a sentence each. Capacity searches
    are looked for in `folders`.

    Raises `InputError` when it cannot be written, or when the log of a run cannot be read.
    """
    from results import page, page_figures

    order = list(dict.fromkeys(run.workload for run in runs))
    runs = sorted(
        runs, key=lambda run: (order.index(run.workload), run.chunk_tokens, policy_order(run.policy))
    )
    samples = [run.latencies() if run.has_logs or (run.path / REQUESTS).is_file() else None for run in runs]
    if len(runs) <= FEW_RUNS:
        for run in runs:
            check_logs(run)
    source = page.source_of(runs, samples)
    notes = [f"left out, did not end: {printable(str(item))}" for item in unfinished]
    models: dict[str, Any] = {"table": page.table_of(runs, source)}
    workloads = list(dict.fromkeys(run.workload for run in runs))
    if len(workloads) > MAX_WORKLOADS:
        notes.append(f"{MAX_WORKLOADS} of {len(workloads)} workloads have pictures")
    sections: dict[str, list[str]] = {}

    def add(section: str, model: Any) -> None:
        if model is not None:
            name = f"m{len(models)}"
            models[name] = model
            sections.setdefault(section, []).append(name)

    for workload in workloads[:MAX_WORKLOADS]:
        add("What to run", page_figures.tradeoff_figure(runs, source, workload))
    for load in loads_of(runs)[:MAX_WORKLOADS]:
        for plot in page_figures.load_figures(load):
            add("Against the offered rate", plot)
    for folder in folders:
        for title, rows in capacities(folder):
            add("Capacity", page_figures.capacity_figure(rows, title))
    for plot in page_figures.cdf_figures(source):
        add("Latencies", plot)
    choice, wave, num_waves = page.wavefront_parts(runs, source)
    for model in (choice, wave):
        add("Which chunk runs at which depth", model)
    if num_waves < len(runs):
        notes.append(
            f"{num_waves} of {len(runs)} runs have a wavefront here; `results plot RUN` draws that of any"
        )
    body = [
        f"<h1>{len(runs)} run{'s' if len(runs) != 1 else ''}: {_names(runs)}</h1>",
        "<h2>Comparison</h2>",
        _mark("table"),
        "<p class='note'>A click on a head sorts, one on a row (with Ctrl or Shift on several) chooses runs "
        "in all pictures. Latencies in ms; percentiles interpolate linearly between ranks. Rows per "
        "invocation: rows summed over recurrent invocations, divided by their number. "
        f"{html.escape(' '.join(LEGEND))}</p>",
        *(
            f"<h2>{html.escape(name)}</h2><div class='row'>{''.join(map(_mark, places))}</div>"
            for name, places in sections.items()
        ),
        "<h2>Where these numbers come from</h2>",
        *(f"<p class='note'>{html.escape(note)}</p>" for note in notes),
        *provenance(runs, source.data["run"]),
    ]
    write_page(path, "Runs", body, models)
    return notes


def write_page(path: Path, title: str, body: Sequence[str], models: Mapping[str, Any]) -> None:
    """Write `body` to `path` with each of `models` in the place of its `_mark`."""
    from results import page

    library, script, places = page.scripts_and_places(models)
    text = "\n".join(body)
    for name, place in places.items():
        text = text.replace(_mark(name), f"<div class='wide'>{place}</div>", 1)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style><noscript><p>The table and pictures of this page need "
        "JavaScript.</p></noscript>",
        text,
        f"<script>{library}</script>",
        f"<script>{script}</script>",
        "</html>\n",
    ]
    with user_file(path) as draft:
        draft.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")


def write_difference(
    a: Sequence[Run], b: Sequence[Run], rows: Sequence[Row], notes: Sequence[str], path: Path
) -> None:
    """Write the page that sets two sides of runs side by side: a table of differences, and each side's
    pictures."""
    from results import page, page_figures

    models: dict[str, Any] = {"differences": page.difference_table(rows)}
    body = [
        f"<h1>{len(rows)} pairs of runs, B against A</h1>",
        _mark("differences"),
        f"<p class='note'>{html.escape(LEGEND_OF_DIFFERENCES)}</p>",
    ]
    body += [f"<p>{html.escape(sentence)}</p>" for sentence in (*places(rows), *verdicts(rows))]
    sources = [page.source_of(side, None) for side in (a, b)]
    for workload in list(dict.fromkeys(row.a.workload for row in rows))[:MAX_WORKLOADS]:
        body.append("<div class='row'>")
        for side, runs, source in zip("AB", (a, b), sources, strict=True):
            plot = page_figures.tradeoff_figure(runs, source, workload)
            if plot is not None:
                plot.title.text = f"{side}: {plot.title.text}"
                models[f"m{len(models)}"] = plot
                body.append(_mark(f"m{len(models) - 1}"))
        body.append("</div>")
    body += [f"<p class='note'>{html.escape(printable(note))}</p>" for note in notes]
    write_page(path, "Differences", body, models)


def _mark(name: str) -> str:
    """What stands for a model until the page is put together; no name that is shown can hold it."""
    return f"\0{name}\0"


def check_logs(run: Run) -> None:
    """Read what is there of a run's logs. Raises `InputError` for what is none."""
    if run.has_logs:
        for _ in read_requests(run.path / REQUESTS):
            pass
        for _ in run.batches():
            pass


def capacities(folder: Path) -> Iterator[tuple[str, list[dict[Any, Any]]]]:
    """(workload, rows of its `capacity.csv`) of every capacity search in `folder`. Raises `InputError` for a
    file that is none."""
    for file in sorted(folder.rglob(CAPACITY)) if folder.is_dir() else ():
        try:
            table = pd.read_csv(
                file, keep_default_na=False, na_values={name: [""] for name in ("capacity", "low", "high")}
            )
            groups = list(table.groupby("workload", sort=False))
            rows = [(str(name), mine.to_dict("records")) for name, mine in groups]
            _ = [
                (
                    row["prefill_chunk_size"] + 0,
                    row["capacity"] + 0,
                    row["low"] + 0,
                    row["late_by"],
                    row["axis"],
                )
                for _, mine in rows
                for row in mine
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{file}: {printable(str(error))[:200]}, expected what `sim capacity` writes"
            ) from None
        yield from rows


def provenance(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """What runs say of themselves: notes once with the runs that have them, what all configs share, and of
    each run what is its own."""
    held: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for note in run.summary.get("notes", ()):
            held.setdefault(printable(note), []).append(name)
    for note, holders in held.items():
        who = (
            ""
            if len(holders) == len(runs)
            else f"{', '.join(holders[:MOST_NAMED])}{' and more' if len(holders) > MOST_NAMED else ''}: "
        )
        yield f"<p class='note'>{html.escape(who + note)}</p>"
    flat = [dict(flat_keys(run.config)) for run in runs]
    counts = Counter(item for config in flat for item in config.items())
    common = {
        key: value for key, value in (flat[0] if flat else {}).items() if counts[key, value] == len(flat)
    }
    yield f"<details><summary>what all configs share</summary><pre>{_lines(common)}</pre></details>"
    for run, name, config in zip(runs, names, flat, strict=True):
        own = {key: value for key, value in config.items() if key not in common}
        text = f"<p>{_facts(run)}</p><pre>{_lines(own)}</pre>"
        yield f"<details><summary>{html.escape(name)}</summary>{text}</details>"


def flat_keys(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a config and their values as text."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from flat_keys(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item, sort_keys=True, default=str, ensure_ascii=False)


def _facts(run: Run) -> str:
    summary = run.summary
    world = "simulated" if summary.get("world") == "sim" else "measured"
    facts = [
        printable(str(run.path)),
        f"{world}, {summary['status']}, {summary['num_requests']} requests, {summary['num_batches']} batches",
        f"config SHA-256 {summary['config_sha256'][:12]}",
    ]
    if summary.get("skipped_rows"):
        facts.append(f"{summary['skipped_rows']} workload rows skipped")
    facts += [f"refused {count}: {reason}" for reason, count in summary.get("refusal_reasons", {}).items()]
    return "<br>".join(html.escape(printable(fact)) for fact in facts)


def _lines(config: Mapping[str, str]) -> str:
    return html.escape("\n".join(printable(f"{key}: {value}") for key, value in config.items()))


def _names(runs: Sequence[Run]) -> str:
    models = sorted({f"{run.summary['model']} on {run.summary['device']}" for run in runs})
    return html.escape(printable(", ".join(models)))
