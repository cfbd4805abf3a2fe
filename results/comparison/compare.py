"""A whole comparison: two sets of runs in, everything that is said about them out, as values and as
`compare.json`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from results.comparison.batches import StageErrors, batch_times, stage_errors
from results.comparison.figures import ENOUGH_REPEATS, Figure, Tolerances, by_label, figures_of
from results.comparison.pairs import Pair, pair_runs
from results.comparison.ranking import Order, orders
from results.comparison.requests import Queue, RequestErrors, queue_of, request_errors
from results.files import user_file
from results.find import find_runs
from results.identity import policy_order
from results.load import Run
from results.predictions import Replay, read_replays
from results.window import run_s


@dataclass(frozen=True)
class Cell:
    """What is known of one pair. `requests` and `queues` (predicted, measured) need logs, `stages`
    predictions of batches."""

    pair: Pair
    figures: Sequence[Figure]
    replays: Sequence[Replay]
    requests: Mapping[str, RequestErrors]
    queues: tuple[Queue, Queue] | None
    stages: Sequence[StageErrors]
    times: pd.DataFrame | None
    same_as: str | None = None
    """The policy before this one whose simulated run has the same batches: it is counted there."""

    @property
    def is_replayed(self) -> bool | None:
        """Whether all replays found all batches equal; None when nothing was replayed."""
        return all(item.difference is None for item in self.replays) if self.replays else None

    @property
    def misses(self) -> list[Figure]:
        return [figure for figure in self.figures if not figure.holds]


@dataclass(frozen=True)
class Comparison:
    """Cells by workload, chunk size and policy; `stages` over the batches of all of them; `notes` on what was
    left out."""

    cells: Sequence[Cell]
    stages: Sequence[StageErrors]
    ranking: Sequence[Order]
    tolerances: Tolerances
    notes: Sequence[str]

    @property
    def counted(self) -> list[Cell]:
        """Configurations that differ in what they do: policies that coincide count once."""
        return [cell for cell in self.cells if cell.same_as is None]

    @property
    def misses(self) -> list[tuple[Cell, Figure]]:
        """Figures beyond their tolerance, the one that exceeds it by the largest factor first."""
        found = [(cell, figure) for cell in self.counted for figure in cell.misses]
        return sorted(found, key=lambda item: -abs(item[1].error) / (item[1].tolerance or 1.0))

    @property
    def differences(self) -> list[Replay]:
        """Measured runs whose decisions the simulator's scheduler does not repeat."""
        return [item for cell in self.cells for item in cell.replays if item.difference is not None]

    @property
    def wrong_orders(self) -> list[Order]:
        return [order for order in self.ranking if not order.is_alike]

    @property
    def holds(self) -> bool:
        """No figure beyond its tolerance, no decision that differs, no pair of policies in another order."""
        return not (self.misses or self.differences or self.wrong_orders)

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(cell.pair.workload for cell in self.cells))

    def of_workload(self, workload: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.pair.workload == workload]

    def as_json(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "tolerances": asdict(self.tolerances),
            "simulated": _side([cell.pair.predicted for cell in self.cells]),
            "measured": _side([run for cell in self.cells for run in cell.pair.measured]),
            "cells": [_cell_json(cell) for cell in self.cells],
            "batches": {item.stage: _stage_json(item) for item in self.stages},
            "ranking": [order.as_json() for order in self.ranking],
            "notes": list(self.notes),
        }

    def write_json(self, path: Path) -> None:
        text = json.dumps(self.as_json(), indent=1, allow_nan=False)
        with user_file(path) as draft:
            draft.write_text(text + "\n", encoding="utf-8")


def compare(predicted: str | Path, measured: str | Path, tolerances: Tolerances) -> Comparison:
    """Compare the runs at `predicted` with those at `measured`: run directories, folders of them, or packs.

    Raises `InputError`, one sentence, when they cannot be compared (`results.comparison.pairs`).
    """
    pairs, notes = pair_runs(find_runs([predicted])[0], find_runs([measured])[0])
    order = {pair.workload: at for at, pair in reversed(list(enumerate(pairs)))}
    pairs.sort(key=lambda pair: (order[pair.workload], policy_order(pair.predicted.policy)))
    cells = _marked([compare_pair(pair, tolerances) for pair in pairs])
    notes += [
        f"{cell.pair.label}: the very batches of {cell.same_as}, counted there"
        for cell in cells
        if cell.same_as
    ]
    few = sum(len(cell.pair.measured) < ENOUGH_REPEATS for cell in cells)
    if few:
        notes.append(
            f"{few} of {len(cells)} configs were measured fewer than {ENOUGH_REPEATS} times: their spread is "
            "not known well"
        )
    times = [cell.times for cell in cells if cell.times is not None]
    ranking = [
        item
        for workload in order
        for item in orders(
            workload,
            {
                cell.pair.predicted.policy: by_label(cell.figures)
                for cell in cells
                if cell.pair.workload == workload and cell.same_as is None
            },
            tolerances.rank_gap,
        )
    ]
    return Comparison(cells, stage_errors(pd.concat(times)) if times else (), ranking, tolerances, notes)


def _marked(cells: Sequence[Cell]) -> list[Cell]:
    """`cells` with `same_as`: of one workload and chunk, and the same batches in the same order without
    times."""
    seen: dict[tuple[str, str], str] = {}
    marked = []
    for cell in cells:
        key = (cell.pair.workload, work_sha256(cell.pair.predicted))
        same_as = seen.setdefault(key, cell.pair.predicted.policy)
        is_first = same_as == cell.pair.predicted.policy or not key[1]
        marked.append(cell if is_first else replace(cell, same_as=same_as))
    return marked


def work_sha256(run: Run) -> str:
    """A hash of what the batches of `run` did, in order, whenever it was; blank where no log was kept."""
    if not run.has_logs:
        return ""
    digest = hashlib.sha256()
    for frame in run.batch_frames(["stage", "loop_count", "ranges"]):
        digest.update(frame.to_csv(index=False, header=False).encode())
    return digest.hexdigest()


def compare_pair(pair: Pair, tolerances: Tolerances) -> Cell:
    times = batch_times(pair)
    logged = pair.logged
    requests: Mapping[str, RequestErrors] = {}
    queues = None
    if logged is not None and pair.predicted.has_logs:
        tables = [run.requests() for run in (pair.predicted, logged)]
        requests = request_errors(*tables)
        predicted, measured = (
            queue_of(table, run_s(run.summary))
            for table, run in zip(tables, (pair.predicted, logged), strict=True)
        )
        queues = (predicted, measured)
    return Cell(
        pair,
        figures_of(pair, tolerances),
        read_replays(pair.predicted.path),
        requests,
        queues,
        stage_errors(times) if times is not None else (),
        times,
    )


def _cell_json(cell: Cell) -> dict[str, Any]:
    predicted = cell.pair.predicted
    return {
        "workload": cell.pair.measured[0].workload,
        "policy": predicted.policy,
        "prefill_chunk_size": predicted.chunk_tokens,
        "num_repeats": len(cell.pair.measured),
        "same_as": cell.same_as,
        "simulated_run": predicted.path.name,
        "measured_runs": [run.path.name for run in cell.pair.measured],
        "figures": {figure.label: figure.as_json() for figure in cell.figures},
        "decisions": [asdict(item) for item in cell.replays],
        "requests": {name: asdict(item) for name, item in cell.requests.items()},
        "queue": dict(zip(("simulated", "measured"), (item.as_json() for item in cell.queues), strict=True))
        if cell.queues
        else None,
        "batches": {item.stage: _stage_json(item) for item in cell.stages},
    }


def _stage_json(item: StageErrors) -> dict[str, Any]:
    return {**{key: value for key, value in asdict(item).items() if key != "stage"}, "bias": item.bias}


def _side(runs: Sequence[Run]) -> dict[str, Any]:
    """What the runs of a side have said of where their numbers come from."""
    keys = ("model", "device", "world", "card", "versions", "dtype", "weights", "cuda_graphs")
    found: dict[str, list[Any]] = {}
    for run in runs:
        for key in keys:
            value = run.summary.get(key)
            if value is not None and value not in found.setdefault(key, []):
                found[key].append(value)
    return {"num_runs": len(runs), **found}
