"""Late tokens of a run, and whose they are: what lay between two tokens of a request, batch by batch, beside
what a latency model had said of the same batches (`sim predict`).

    admission   late by the model's word too: the work that was let in needs longer than promised
    model       in time had every batch taken what the model said
    host        neither: the device waited for the host
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from policies.core.errors import InputError
from results.load import Run
from results.predictions import read_predictions


@dataclass(slots=True)
class Late:
    """Of `gaps` between tokens, those above `itl_ms` by cause, and how far the worst of them were, in ms."""

    itl_ms: float
    gaps: int = 0
    by: Counter[str] = field(default_factory=Counter)
    worst_ms: dict[str, float] = field(default_factory=dict)

    def add(self, cause: str, gap_ns: int) -> None:
        self.by[cause] += 1
        self.worst_ms[cause] = max(self.worst_ms.get(cause, 0.0), gap_ns / 1e6)

    def __str__(self) -> str:
        causes = ", ".join(
            f"{cause} {self.by[cause]}"
            + (f" (worst {self.worst_ms[cause]:.1f} ms)" if self.by[cause] else "")
            for cause in ("admission", "model", "host")
        )
        return f"{self.by.total()} of {self.gaps} tokens later than {self.itl_ms:g} ms: {causes}"


def late_tokens(run: Run, predicted: Path, itl_ms: float) -> Late:
    """The late tokens of `run`, whose batches were predicted in the simulated run at `predicted`. A gap from
    the end of one batch to the end of another is made of the batches after the first, and of the device's
    waiting. Raises `InputError` where they are not the same batches."""
    table = read_predictions(predicted)
    if table is None:
        raise InputError(f"{predicted}: has no predicted.csv, expected a run of `sim predict`")
    if not run.has_logs:
        raise InputError(f"{run.path}: kept no logs, expected requests.csv and batches.csv")
    rows = [(batch.seq, batch.started_ns, batch.finished_ns) for batch in run.batches()]
    if [seq for seq, *_ in rows] != list(table["seq"]):
        raise InputError(f"{predicted}: predicts other batches than {run.path} has")
    ends_ns = [finished_ns for *_, finished_ns in rows]
    took_ns = np.cumsum([0, *(finished_ns - started_ns for _, started_ns, finished_ns in rows)])
    said_ns = np.cumsum([0, *table["device_ns"]])
    late, itl_ns = Late(itl_ms), 1e6 * itl_ms
    for text in run.requests()["token_ns"]:
        times = np.fromstring(text, dtype=np.int64, sep=" ")
        late.gaps += max(len(times) - 1, 0)
        for before, after in pairwise(times):
            gap_ns = int(after - before)
            if gap_ns <= itl_ns:
                continue
            first, last = bisect_right(ends_ns, before), bisect_right(ends_ns, after)
            took, said = took_ns[last] - took_ns[first], said_ns[last] - said_ns[first]
            if said > itl_ns:
                late.add("admission", gap_ns)
            elif gap_ns - took + said <= itl_ns:
                late.add("model", gap_ns)
            else:
                late.add("host", gap_ns)
    return late
