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
from pydantic import TypeAdapter, ValidationError

from policies.core.errors import InputError
from policies.core.seam.events import COMPONENTS
from policies.process.documents import read_json
from policies.process.sentences import first_problem
from results.csvlog import Columns
from results.files import drafted
from results.frames import WHOLE, read_frames
from results.rundir import PREDICTED, REPLAY

PREDICTED_COLUMNS = ("seq", "select_ns", "host_ns", "device_ns", *(f"{name}_ns" for name in COMPONENTS))


@dataclass(frozen=True, slots=True)
class Replay:
    """The verdict on the decisions of one measured run: its name, how many batches were decided alike, the
    first difference."""

    run: str
    num_batches: int
    difference: str | None


REPLAYS = TypeAdapter(list[Replay])


def write_replays(folder: Path, replays: Sequence[Replay]) -> None:
    text = json.dumps([asdict(item) for item in replays], indent=2)
    with drafted(folder / REPLAY) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def read_replays(folder: Path) -> list[Replay]:
    """The verdicts beside a simulated run, none when nothing was replayed. Raises `InputError` for a file
    that is not ours."""
    path = folder / REPLAY
    if not path.is_file():
        return []
    found = read_json(path, "what `sim predict` writes")
    try:
        return REPLAYS.validate_json(json.dumps(found), strict=True)
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error, '')}") from None


def write_predictions(folder: Path, rows: Iterable[Sequence[int]]) -> None:
    """Write rows of `PREDICTED_COLUMNS`, one per batch, as they come."""
    with (
        drafted(folder / PREDICTED) as draft,
        open(draft, "w", encoding="ascii", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(PREDICTED_COLUMNS)
        writer.writerows(rows)


def read_predictions(folder: Path) -> pd.DataFrame | None:
    """`predicted.csv` of a simulated run, one line per batch of the measured run, or None. Raises
    `InputError`."""
    path = folder / PREDICTED
    if not path.is_file():
        return None
    columns = Columns(PREDICTED_COLUMNS, ())
    return pd.concat(list(read_frames(path, columns, dict.fromkeys(PREDICTED_COLUMNS, WHOLE))))
