"""What a simulated run knows of the measured runs it stands for: replays of their decisions, and predicted
times of their batches.

`replay.json` and `predicted.csv` lie in the simulated run's directory beside what every run has. Format only:
`sim` fills them.
"""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from policies.core.errors import InputError
from policies.core.seam.events import COMPONENTS
from results.rundir import PREDICTED, REPLAY

PREDICTED_COLUMNS = ("seq", "select_ns", "host_ns", "device_ns", *(f"{name}_ns" for name in COMPONENTS))


@dataclass(frozen=True, slots=True)
class Replay:
    """The verdict on the decisions of one measured run: its name, how many batches were decided alike, the
    first difference."""

    run: str
    num_batches: int
    difference: str | None


def write_replays(folder: Path, replays: Sequence[Replay]) -> None:
    text = json.dumps([asdict(item) for item in replays], indent=2)
    (folder / REPLAY).write_text(text + "\n", encoding="utf-8")


def read_replays(folder: Path) -> list[Replay]:
    """The verdicts beside a simulated run, none when nothing was replayed. Raises `InputError` for a file
    that is not ours."""
    path = folder / REPLAY
    if not path.is_file():
        return []
    try:
        return [Replay(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: is not what `sim predict` writes ({' '.join(str(error).split())})"
        ) from None


def write_predictions(folder: Path, rows: Iterable[Sequence[int]]) -> None:
    """Write rows of `PREDICTED_COLUMNS`, one per batch, as they come."""
    with open(folder / PREDICTED, "w", encoding="ascii", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(PREDICTED_COLUMNS)
        writer.writerows(rows)


def read_predictions(folder: Path) -> pd.DataFrame | None:
    """`predicted.csv` of a simulated run, one line per batch of the measured run, or None. Raises
    `InputError`."""
    path = folder / PREDICTED
    if not path.is_file():
        return None
    try:
        return pd.read_csv(path, usecols=list(PREDICTED_COLUMNS), dtype="int64")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: is not what `sim predict` writes ({' '.join(str(error).split())})"
        ) from None
