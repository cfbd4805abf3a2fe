"""A run directory read back: config and summary at once, requests as a table, batches in pieces. Writes
nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import pandas as pd
import yaml

from policies.core.engine.runlog import BATCH_COLUMNS, REQUEST_COLUMNS
from policies.core.errors import InputError
from results.batchlog import CONTRACT_COLUMNS, LoggedBatch, read_batches
from results.identity import policy_label
from results.metrics import LATENCIES, STATISTICS
from results.pack import SUFFIX, is_pack, unpacked
from results.rundir import BATCHES, CONFIG, REQUESTS, SUMMARY, is_run_directory

BATCHES_PER_PIECE = 50_000
NUMBER = (int, float)
REQUIRED_KEYS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("policy", "model", "device", "workload", "world", "config_sha256", "status"), (str,)),
    **dict.fromkeys(
        ("prefill_chunk_size", "num_loops", "num_requests", "num_finished", "num_refused", "num_batches"),
        (int,),
    ),
    **dict.fromkeys(("first_arrival_ns", "duration_s", "device_idle_s"), NUMBER),
    **dict.fromkeys(
        ("request_throughput", "prompt_token_throughput", "output_token_throughput"), (*NUMBER, NoneType)
    ),
    **dict.fromkeys(
        ("rows_per_recurrent_invocation", "gpu_busy_fraction", "limit_fraction"), (*NUMBER, NoneType)
    ),
    **dict.fromkeys(("stages", *LATENCIES), (dict,)),
}
"""What every summary has, and of which type."""


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
        return str(self.summary["workload"])

    @property
    def chunk_tokens(self) -> int:
        return int(self.summary["prefill_chunk_size"])

    @property
    def num_loops(self) -> int:
        return int(self.summary["num_loops"])

    def requests(self) -> pd.DataFrame:
        """`requests.csv`; times that never came are `<NA>`. Raises `InputError` when it is missing or not
        ours."""
        path = self.path / REQUESTS
        numbers = (
            "request_id",
            "arrival_ns",
            "prompt_tokens",
            "output_tokens",
            "preemptions",
            "max_tokens",
            "priority",
        )
        times = ("first_scheduled_ns", "first_token_ns", "finished_ns")
        texts = ("status", "reason", "token_ns", "content")
        types = dict.fromkeys(numbers, "int64") | dict.fromkeys(times, "Int64") | dict.fromkeys(texts, "str")
        _check_columns(path, REQUEST_COLUMNS[:9])
        try:
            frame = pd.read_csv(path, dtype=types)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {_one_line(error)}") from None
        return frame.fillna({"reason": "", "token_ns": "", "content": ""})

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
        """`batches.csv` as tables of at most `num_batches` lines and the wanted columns, so that memory stays
        bounded."""
        path = self.path / BATCHES
        _check_columns(path, CONTRACT_COLUMNS)
        try:
            with pd.read_csv(path, usecols=list(columns), chunksize=num_batches) as pieces:
                yield from pieces
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {_one_line(error)}") from None


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
    try:
        config = yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: {CONFIG} or {SUMMARY} is corrupt: {_one_line(error)}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path / CONFIG}: holds {type(config).__name__}, expected a mapping")
    if not all(isinstance(config.get(key), dict) for key in ("workload", "policy")):
        raise InputError(f"{path / CONFIG}: workload or policy is missing, expected the config of a run")
    _check_summary(summary, path / SUMMARY)
    return Run(path, config, summary)


def finished_summary(path: Path, input_sha256: str) -> dict[str, Any] | None:
    """The summary of an earlier complete run in `path` with the same inputs, or None: what a resumed sweep
    asks before a cell."""
    try:
        summary: dict[str, Any] = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_same = summary.get("status") == "complete" and summary.get("input_sha256") == input_sha256
    return summary if is_same else None


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Run], list[Path]]:
    """The runs at `paths`: run directories, packs (`results.pack`), or folders that hold some of either, in
    order of path.

    The second list holds unfinished runs found inside a folder. Raises `InputError` for a path with no run at
    all.
    """
    runs: list[Run] = []
    unfinished: list[Path] = []
    for path in map(Path, paths):
        packs = [path] if is_pack(path) else sorted(path.rglob(f"*{SUFFIX}"))
        for folder in (path, *map(unpacked, packs)):
            inner = sorted(item.parent for item in folder.rglob(CONFIG) if is_run_directory(item.parent))
            if is_run_directory(folder) or not (inner or packs):
                runs.append(load_run(folder))
                break
            for item in inner:
                if (item / SUMMARY).is_file():
                    runs.append(load_run(item))
                else:
                    unfinished.append(item)
    if not runs:
        raise InputError(f"{', '.join(map(str, paths))}: no finished run")
    return runs, unfinished


def _check_summary(summary: Any, path: Path) -> None:
    for key, types in REQUIRED_KEYS.items():
        if not isinstance(summary, dict) or key not in summary:
            raise InputError(f"{path}: key {key} is missing")
        if not isinstance(summary[key], types):
            raise InputError(
                f"{path}: {key}: {summary[key]!r}, expected {' or '.join(kind.__name__ for kind in types)}"
            )
    for key in LATENCIES:
        if not all(isinstance(summary[key].get(name, ""), (*NUMBER, NoneType)) for name in STATISTICS):
            raise InputError(f"{path}: {key}: expected a number for each of {', '.join(STATISTICS)}")
    if not isinstance(summary.get("policy_options", {}), dict):
        raise InputError(f"{path}: policy_options: {summary['policy_options']!r}, expected a mapping")


def _check_columns(path: Path, expected: Sequence[str]) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            header = file.readline().rstrip("\n").split(",")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not a text file") from None
    if header[: len(expected)] != list(expected):
        raise InputError(
            f"{path} line 1: columns start {','.join(header[:4])}, expected {','.join(expected)}"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
