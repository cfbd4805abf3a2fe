"""`python -m sim capacity`: search, then say what was found, in a table, a picture and a config that runs."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from policies.config.runconfig import RunConfig
from results.capacity import Row, capacity_table, objectives, rows_of, sentences, winner, write_capacity
from results.files import cannot_write, user_file
from results.plots.capacity import plot_capacity
from results.plots.gallery import Picture, draw_pictures
from results.rundir import PLOTS
from results.table import print_whole, transfer_notes
from sim.capacity.axes import at_rate, changed
from sim.capacity.grid import Answer, Question, burstiness, find_all, load_questions, poisson_questions

BEST, PICTURE = "best.yaml", "capacity.png"


def capacity(
    path: Path,
    overrides: Sequence[str],
    *,
    axis: str = "rate",
    seeds: int | None = None,
    jobs: int = -1,
    cluster: str | None = None,
    out: Path,
) -> list[Row]:
    """Search every cell of `path`, print and write what was found to `out`, and return it.

    Raises `InputError` for a wrong input, `KeyboardInterrupt` after Ctrl-C; the next call goes on from there.
    """
    questions = load_questions(path, overrides, axis, seeds, out)
    if cluster is None:  # which says itself that it sees no such folder
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(out, error) from None
    found = find_all(questions, jobs, cluster, out)
    cells: dict[int, list[Answer]] = {}
    for question, answer in found:
        cells.setdefault(question.cell, []).append(answer)
    rows = rows_of(list(cells.values()))
    best = winner(rows)
    lines = sentences(rows)
    more: dict[str, object] = {}
    if best is not None:
        won = [question for question, answer in found if any(answer is item for item in best.answers)]
        if axis == "rate" and not best.is_open:
            lines += _about_bursts(won, best, jobs, cluster, out, more)
        config = _best_config(won[0], best)
        with user_file(out / BEST) as draft:
            draft.write_text(_best_text(config, best), encoding="utf-8")
    slo = rows[0].answers[0]["slo"]
    write_capacity(rows, out, {"slo": slo, "notes": lines, **more})
    pictures = [Picture(PICTURE, lambda place: plot_capacity(rows, place, slo))] if best is not None else []
    files, faults = draw_pictures(pictures, out / PLOTS)
    print_whole(capacity_table(rows, slo, marks_best=not Console(file=sys.stdout).is_terminal), sys.stdout)
    for line in [*lines, *faults]:
        print(f"note: {line}", file=sys.stderr)
    names = ["capacity.csv", "capacity.json", *([BEST] if best else []), *[file.name for file in files]]
    print(f"{', '.join(names)} in {out}", file=sys.stderr)
    return rows


def _about_bursts(
    won: Sequence[Question], best: Row, jobs: int, cluster: str | None, out: Path, more: dict[str, object]
) -> list[str]:
    """What the arrivals are like, and what the same requests would take if they came independently."""
    assert best.value is not None
    arrivals = burstiness(won[0].config)
    factor = best.value / arrivals.rate
    lines = [
        f"arrivals of {best.workload} as they are: {arrivals}; at {best.value:.4g} requests/s the windows "
        f"carry {factor * arrivals.slowest:.2f} to {factor * arrivals.fastest:.2f}"
    ]
    more["arrivals"] = {
        "requests_per_s": arrivals.rate, "cv": arrivals.cv, "window_s": arrivals.window_s,
        "slowest": arrivals.slowest, "fastest": arrivals.fastest,
    }  # fmt: skip
    even = poisson_questions(won, best.value)
    if even:
        row = rows_of([[answer for _, answer in find_all(even, jobs, cluster, out)]])[0]
        more["poisson"] = {"capacity": row.value, "low": row.low, "high": row.high}
        if row.value is not None:
            lines.append(
                f"the same requests at Poisson arrivals: {row.value:.4g} requests/s "
                f"({row.value / best.value - 1:+.0%}) under {best.policy} at chunk {best.chunk_tokens}"
            )
    return lines


def _best_config(question: Question, best: Row) -> RunConfig:
    assert best.value is not None
    if question.axis == "rate":
        return at_rate(question.config, float(f"{best.value:.4g}"))
    fleet = {**(question.config.resolved.get("fleet") or {}), "replicas": round(best.value)}
    return changed(question.config, fleet=fleet)


def _best_text(config: RunConfig, best: Row) -> str:
    answer = best.answers[0]
    held = f"{best.value:.4g} requests/s" if answer["axis"] == "rate" else f"{best.value:g} replicas"
    held += " or more, which only more requests can tell," if best.is_open else ""
    runs = "sim run`" if config.fleet is not None else "sim run` and `python -m executor run`"
    transferred = "".join(f"# {note}.\n" for note in transfer_notes([answer["device"]]))
    return (
        f"# {held} keep {objectives(answer['slo'])},\n"
        f"# says a simulation on {answer['device']}. `python -m {runs} take this file.\n"
        + transferred
        + yaml.safe_dump(_plain(config.resolved), sort_keys=False, allow_unicode=True)
    )


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
