"""Which simulated run stands for which measured runs, and the refusal to compare what was not run alike."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.core.errors import InputError
from results.identity import comparable
from results.load import Run

PER_REQUEST = ["request_id", "prompt_tokens", "max_tokens", "status", "output_tokens"]
SAME_IN_ALL = ("num_requests", "num_refused")
SAME_WHEN_ALL_FINISH = ("num_finished", "prompt_tokens", "output_tokens")
NUM_BLOCKS = "cache.num_blocks"


@dataclass(frozen=True, slots=True)
class Pair:
    """One configuration: its simulated run, and the measured repeats of it in order of path."""

    predicted: Run
    measured: tuple[Run, ...]

    @property
    def label(self) -> str:
        return f"{self.workload}, {self.predicted.policy}"

    @property
    def workload(self) -> str:
        """Workload and chunk size: within one of these, policies are ranked."""
        return f"{self.measured[0].workload}, chunk {self.predicted.chunk_tokens}"

    @property
    def logged(self) -> Run | None:
        """The first measured repeat whose logs were kept."""
        return next((run for run in self.measured if run.has_logs), None)


def pair_runs(predicted: Sequence[Run], measured: Sequence[Run]) -> tuple[list[Pair], list[str]]:
    """Pairs in the order of `measured`, and a sentence for every run that has no partner or did not complete.

    Two runs belong together when their configs differ in nothing but the device. Raises `InputError`, one
    sentence that names the difference, when nothing belongs together, when two sides of a pair had different
    KV blocks or token counts, when one config was simulated twice, and when the sides were given the wrong
    way round.
    """
    if {run.summary["world"] for run in predicted} == {"executor"} and {
        run.summary["world"] for run in measured
    } == {"sim"}:
        raise InputError(
            f"{predicted[0].path}: was measured and {measured[0].path} simulated, expected the simulated "
            "side first"
        )
    notes = [
        f"{run.path.name}: {run.summary['status']}, not compared"
        for run in (*predicted, *measured)
        if not _is_whole(run)
    ]
    predicted, measured = [list(filter(_is_whole, side)) for side in (predicted, measured)]
    partners: dict[int, list[Run]] = {}
    for run in measured:
        found = [at for at, other in enumerate(predicted) if config_difference(other, run) is None]
        if len(found) > 1:
            first, second = (predicted[at].path for at in found[:2])
            raise InputError(f"{first} and {second}: simulate the same config, expected it once")
        if found:
            partners.setdefault(found[0], []).append(run)
        else:
            notes.append(f"{run.path.name}: measured, not simulated")
    notes += [
        f"{run.path.name}: simulated, not measured" for at, run in enumerate(predicted) if at not in partners
    ]
    if not partners:
        raise InputError(_nothing_alike(predicted, measured, notes))
    pairs = [Pair(predicted[at], tuple(runs)) for at, runs in partners.items()]
    for pair in pairs:
        check_alike(pair)
    return pairs, notes


def config_difference(predicted: Run, measured: Run) -> str | None:
    """The first key in which two configs differ beyond device and KV blocks, with both values, or None.

    A key that only one of them has counts in the workload alone: elsewhere it is an option that came later,
    at its default.
    """
    left, right = (dict(_flat(comparable(run.config))) for run in (predicted, measured))
    for key in {**left, **right}:
        is_told = key in left and key in right
        if key != NUM_BLOCKS and (is_told or key.startswith("workload.")) and left.get(key) != right.get(key):
            return f"{key}: {left.get(key)} simulated, {right.get(key)} measured"
    return None


def check_alike(pair: Pair) -> None:
    """Raise `InputError` for the first difference between what the two sides of `pair` were given."""
    left = pair.predicted
    devices = sorted({str(run.summary["device"]) for run in pair.measured})
    if len(devices) > 1:
        raise InputError(
            f"{pair.label}: measured on {devices[0]} and on {devices[1]}, expected repeats on one device"
        )
    for right in pair.measured:
        where = f"{pair.label} ({left.path.name} and {right.path.name})"
        blocks = [run.config.get("cache", {}).get("num_blocks") for run in (left, right)]
        if blocks[0] != blocks[1]:
            raise InputError(
                f"{where}: {NUM_BLOCKS}: {blocks[0]} simulated, {blocks[1]} measured, expected the same KV "
                "blocks"
            )
        hung_up = left.summary.get("num_cancelled") or right.summary.get("num_cancelled")
        for key in SAME_IN_ALL if hung_up else (*SAME_IN_ALL, *SAME_WHEN_ALL_FINISH):
            if left.summary.get(key) != right.summary.get(key):
                raise InputError(
                    f"{where}: {key}: {left.summary.get(key)} simulated, {right.summary.get(key)} measured"
                )
        if left.has_logs and right.has_logs:
            _check_requests(left, right, where)


def _check_requests(left: Run, right: Run, where: str) -> None:
    """Prompts and limits must be the same, and the outputs of what finished on both sides: a client may hang
    up on one alone."""
    frames = [run.requests()[PER_REQUEST].sort_values("request_id") for run in (left, right)]
    if len(frames[0]) != len(frames[1]):
        raise InputError(
            f"{where}: requests.csv has {len(frames[0])} lines simulated, {len(frames[1])} measured"
        )
    for ours, theirs in zip(*(frame.itertuples(index=False) for frame in frames), strict=True):
        both_finished = ours[3] == theirs[3] == "finished"
        names = PER_REQUEST[:3] + (PER_REQUEST[4:] if both_finished else [])
        for name, mine, other in zip(names, (*ours[:3], ours[4]), (*theirs[:3], theirs[4]), strict=False):
            if mine != other:
                raise InputError(f"{where}: request {ours[0]}: {name}: {mine} simulated, {other} measured")


def _is_whole(run: Run) -> bool:
    return bool(run.summary["status"] == "complete")


def _nothing_alike(predicted: Sequence[Run], measured: Sequence[Run], notes: Sequence[str]) -> str:
    if not predicted or not measured:
        return f"nothing to compare: {notes[0] if notes else 'no run'}"
    difference = config_difference(predicted[0], measured[0])
    sentence = f"{predicted[0].path} and {measured[0].path}: {difference}, expected the same config"
    worlds = {run.summary["world"] for run in (*predicted, *measured)}
    if len(worlds) == 1:
        both = "simulated" if worlds == {"sim"} else "measured"
        sentence += (
            f"; both were {both}: `results diff` sets two such sides against each other, `results report` "
            "all of them"
        )
    return sentence


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as JSON text; lists are values."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(item, sort_keys=True, default=str)
