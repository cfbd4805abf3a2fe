"""A run directory read back: config and summary at once, requests as a table, batches in pieces. Writes
nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from policies.core.engine.batchlines import BATCH_COLUMNS
from policies.core.errors import InputError
from policies.process.documents import MAX_CONFIG_BYTES, parse_yaml, read_text
from results.batchlog import LoggedBatch, read_batches
from results.frames import BATCHES_PER_PIECE, batch_frames, requests_frame
from results.identity import policy_label, printable
from results.latency import Latencies
from results.rundir import BATCHES, CONFIG, REQUESTS, SUMMARY, is_run_directory
from results.summaryfile import read_summary


@dataclass(frozen=True)
class Run:
    """One run: where it lies, its resolved config, its summary. Tables are read when asked for."""

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def policy(self) -> str:
        """The policy and what was set beside it, as a label: `wcpb`, `wcpb mix_decode=false`."""
        return policy_label(self.summary)

    @property
    def workload(self) -> str:
        return printable(str(self.summary["workload"]))

    @property
    def chunk_tokens(self) -> int:
        return int(self.summary["prefill_chunk_size"])

    @property
    def num_loops(self) -> int:
        return int(self.summary["num_loops"])

    def requests(self) -> pd.DataFrame:
        """`requests.csv` as a table (see `results.frames.requests_frame`)."""
        return requests_frame(self.path / REQUESTS)

    def latencies(self) -> Latencies:
        """Latencies of its requests, those that count."""
        requests, measured = self.requests(), self.summary.get("measured")
        if measured:
            order = np.lexsort((requests["request_id"], requests["arrival_ns"]))
            requests = requests.iloc[order[measured["skip_requests"] :]]
            arrival_ns = requests["arrival_ns"]
            is_in = arrival_ns >= (measured["from_ns"] or 0)
            if measured["to_ns"] is not None:
                is_in &= arrival_ns < measured["to_ns"]
            requests = requests[is_in]
        return Latencies.of_frame(requests)

    @property
    def has_logs(self) -> bool:
        """Whether its requests and batches were kept: a sweep may delete them, a pack keeps one repeat's."""
        return (self.path / REQUESTS).is_file() and (self.path / BATCHES).is_file()

    def batches(self) -> Iterator[LoggedBatch]:
        """`batches.csv`, one batch at a time (see `results.batchlog.read_batches`)."""
        return read_batches(self.path / BATCHES)

    def batch_frames(
        self, columns: Sequence[str] = BATCH_COLUMNS, num_batches: int = BATCHES_PER_PIECE
    ) -> Iterator[pd.DataFrame]:
        """`batches.csv` as tables of bounded length (see `results.frames.batch_frames`)."""
        return batch_frames(self.path / BATCHES, columns, num_batches)


def load_run(path: str | Path) -> Run:
    """Read a run directory. Raises `InputError`, one sentence, when it is missing, unfinished, corrupt or
    somebody else's."""
    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such directory, expected a run directory")
    if not is_run_directory(path):
        raise InputError(f"{path}: not a run directory (its {CONFIG} is missing or was not written by a run)")
    if not (path / SUMMARY).is_file():
        raise InputError(f"{path}: has no {SUMMARY}, so the run there did not end")
    return Run(path, _config(path / CONFIG), read_summary(path / SUMMARY))


def _config(path: Path) -> dict[str, Any]:
    """The resolved config of a run. Raises `InputError` for what none is."""
    config = parse_yaml(read_text(path, "the config of a run", MAX_CONFIG_BYTES), str(path))
    if not isinstance(config, dict):
        raise InputError(f"{path}: holds {type(config).__name__}, expected a mapping")
    for key in ("workload", "policy"):
        if key not in config:
            raise InputError(f"{path}: {key} is missing, expected the config of a run")
    for key in ("workload", "policy", "scheduler", "cache", "exit"):
        if not isinstance(config.get(key, {}), dict):
            raise InputError(f"{path}: {key}: {type(config[key]).__name__}, expected a mapping")
    return config


def finished_summary(path: Path, input_sha256: str) -> dict[str, Any] | None:
    """The summary of an earlier complete run in `path` with the same inputs, or None: what a resumed sweep
    asks before a cell."""
    try:
        summary = read_summary(path / SUMMARY)
    except InputError:
        return None
    is_same = summary.get("status") == "complete" and summary.get("input_sha256") == input_sha256
    return summary if is_same else None
