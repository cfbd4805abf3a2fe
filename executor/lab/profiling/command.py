"""`executor profile`: plans the cases, measures what is not in the file yet, and writes the profile as it
goes."""

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from executor.kernels.meta import MetaLayout
from executor.kernels.worklist import SHORT_ROWS, SPLIT_KEYS, TILE_KEYS
from executor.lab.profiling.cases import Case, Scale, component_cases
from executor.lab.profiling.engine_runs import run_mixes, time_run
from executor.lab.profiling.measure import Measurement, Repeats
from executor.lab.profiling.serving import INFLIGHT, all_mixes, sampled_cases
from executor.programs import BUCKETS
from executor.run import few_collections, versions
from executor.session import PlannedRun, Session, plan_runs
from executor.source import kernel_sha256
from policies.config.runconfig import RunConfig, parse_config
from policies.process.interrupt import CtrlC
from results.profile import HEADER_KEYS, LATER_KEYS, SCHEMA, ProfileWriter


@dataclass(frozen=True, slots=True)
class Setup:
    """What a kind of device is asked: sizes of batches, and repeats for each visit to a case. Cases are
    visited at several times, each time in other company: clocks and the host's speed change from second to
    second.

    `num_rings` requests are given slots at once: several cases' worth, so that one case's repeats have other
    cases between them.
    """

    max_rows: int
    max_context: int
    max_requests: int
    chunks: tuple[int, ...]
    visits: tuple[Repeats, ...]
    num_rings: int

    def scale(self, pool_tokens: int = 0) -> Scale:
        return Scale(self.max_rows, self.max_context, self.max_requests, self.chunks, pool_tokens)


GPU = Setup(2048, 16384, 64, (16, 32, 64, 128, 512), (Repeats(busy=4, idle=1),) * 4, num_rings=128)
CPU = Setup(64, 256, 4, (8, 16, 32), (Repeats(busy=3, idle=1),), num_rings=16)
NUM_SAMPLED = 330
QUICK_PART = 5
"""`--quick` measures one case in so many."""
MAY_DIFFER = frozenset({"date", "commit"})
"""Header keys that a resumed profile need not share with its beginning."""


def profile(model: str, device: str, out: Path, *, quick: bool = False, seed: int = 0) -> int:
    """Write the profile of `device` under `model` to `out`, going on from what is there; return the exit
    status.

    Ctrl-C keeps what was measured, says how to go on, and returns 130. Raises `InputError` for an unknown
    model or device and when `out` holds something else.
    """
    setup = CPU if device == "cpu" else GPU
    mixes = run_mixes(model, seed, setup.scale())[:: 3 if quick else 1]
    session = Session([_room(model, seed, setup), *(config for _, config in mixes)], device)
    cases = plan(session, setup, quick, seed)
    header = profile_header(session, "quick" if quick else "full", seed)
    with (
        ProfileWriter(out, header, frozenset(HEADER_KEYS) - MAY_DIFFER) as writer,
        CtrlC() as ctrl_c,
        few_collections(),
    ):
        if writer.is_complete:
            print(f"{out} is complete: {len(writer.lines)} lines", file=sys.stderr)
            return 0
        done_runs = {line.case.rpartition(": ")[0] for line in writer.lines if line.kind == "host"}
        runs = [
            (name, run)
            for (name, _), run in zip(mixes, session.runs[1:], strict=True)
            if name not in done_runs
        ]
        try:
            measure(
                session, setup, cases, runs, writer, Measurement(session, seed, lambda: ctrl_c.is_pressed)
            )
        except KeyboardInterrupt:
            session.synchronize()
            print(
                f"interrupted: {len(writer.lines)} lines are in {out}; the same command goes on from there",
                file=sys.stderr,
            )
            return 130
        writer.finish()
    print(f"{out}: {len(cases)} cases, {len(writer.lines)} lines", file=sys.stderr)
    return 0


def measure(
    session: Session,
    setup: Setup,
    cases: Sequence[Case],
    runs: Sequence[tuple[str, PlannedRun]],
    writer: ProfileWriter,
    measurement: Measurement,
) -> None:
    """Make the visits to `cases` that `writer` lacks, then `runs`. Raises `KeyboardInterrupt` when the
    measurement is stopped."""
    left = sum(max(0, len(setup.visits) - writer.visits(case.row())) for case in cases)
    if writer.lines:
        print(
            f"{len(writer.lines)} lines are kept, {left} visits and {len(runs)} runs remain", file=sys.stderr
        )
    with _progress() as progress:
        task = progress.add_task("profile", total=left + len(runs))
        for visit, repeats in enumerate(setup.visits):
            todo = [case for case in cases if writer.visits(case.row()) <= visit]
            copies = [case for case in todo if case.kind == "copies"]
            writer.append(measurement.time_copies(copies, repeats))
            writer.append(measurement.time_swaps(repeats, lambda row, at=visit: writer.visits(row) <= at))
            progress.update(task, advance=len(copies), refresh=True)
            for group in measurement.groups(case for case in todo if case.kind != "copies"):
                writer.append(measurement.time(group, repeats))
                progress.update(task, advance=len(group), refresh=True)
        for name, run in runs:
            writer.append(time_run(session, run, name, measurement.is_stopped))
            progress.update(task, advance=1, refresh=True)


def plan(session: Session, setup: Setup, quick: bool, seed: int) -> list[Case]:
    """All cases, the same for the same device, model and seed."""
    num_blocks = session.runs[0].config.cache.num_blocks
    assert num_blocks is not None
    scale = setup.scale(num_blocks // session.shape.num_loops * session.pools.kv.block_size)
    buckets = row_buckets(scale.max_rows)
    named = all_mixes(session.runs[0].config.model, seed, scale)[:: 7 if quick else 1]
    planned = plan_runs([config for _, config in named], session.shape)
    runs = [(name, run.with_blocks(num_blocks)) for (name, _), run in zip(named, planned, strict=True)]
    sampled = sampled_cases(runs, session.shape, buckets, NUM_SAMPLED // (QUICK_PART if quick else 1), seed)
    parts = component_cases(scale, buckets, session.shape.num_loops)
    if quick:
        random.Random(seed).shuffle(parts)
        by_kind = groupby(sorted(parts, key=lambda case: case.kind), lambda case: case.kind)
        parts = [case for _, alike in by_kind for case in list(alike)[::QUICK_PART]]
    return list({case.row().key: case for case in (*parts, *sampled)}.values())


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that batches of up to `max_rows` rows are padded to."""
    return (*(size for size in BUCKETS if size < max_rows), max_rows)


def profile_header(session: Session, mode: str, seed: int) -> dict[str, str]:
    """The header of a profile made now on `session`."""
    found = versions()
    facts = session.facts_for_summary()
    layout = MetaLayout.for_rows(1)
    values = {
        "schema": SCHEMA,
        "mode": mode,
        "seed": str(seed),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": git_commit(),
        "gpu": session.card,
        "driver": session.sensors.driver,
        "python": found["python"],
        "torch": found["torch"],
        "cuda": found.get("cuda", ""),
        "triton": found.get("triton", ""),
        "model": session.shape.name,
        "dtype": facts["dtype"],
        "kernel_sha256": kernel_sha256(),
        "cuda_graphs": str(session.uses_graphs).lower(),
        "block_size": str(session.pools.kv.block_size),
        "row_buckets": " ".join(
            map(str, row_buckets(session.runs[0].config.scheduler.max_num_batched_tokens))
        ),
        "tile_rows": " ".join(map(str, session.model.ops.tile_classes)),
        "tile_keys": str(TILE_KEYS),
        "split_keys": str(SPLIT_KEYS),
        "attention_slots": str(session.model.ops.attention_slots),
        "attention_partials": str(layout.max_partials),
        "attention_spare_items": str(layout.max_items - layout.max_rows),
        "short_rows": str(SHORT_ROWS),
        "tall_margin": str(session.model.ops.tall_margin),
        "few_rows": str(getattr(session.model.ops.attention, "max_rows", 0)),  # of CUDA's, Triton's has none
    }
    return {key: values[key] for key in (*HEADER_KEYS, *LATER_KEYS)}


def git_commit() -> str:
    """The commit that this source is, `-dirty` behind it when files differ; blank outside a git checkout."""
    root = Path(__file__).resolve().parents[3]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        top = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--show-toplevel"],
            capture_output=True,
            text=True,
            check=True,
        )
        if Path(top.stdout.strip()) != root:
            return ""
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _room(model: str, seed: int, setup: Setup) -> RunConfig:
    """A run nobody runs: its limits size the session's rings, buckets and KV pool."""
    raw = {
        "model": model,
        "policy": "wcpb",
        "scheduler": {
            "max_num_seqs": setup.num_rings,
            "max_num_batched_tokens": setup.max_rows,
            "prefill_chunk_size": setup.chunks[-1],
            "inflight": INFLIGHT,
        },
        "workload": {
            "kind": "synthetic",
            "num_requests": 1,
            "prompt_tokens": setup.max_context,
            "output_tokens": 16,
        },
        "seed": seed,
    }
    return parse_config(raw, Path("."), "profile")


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(
        *columns, console=Console(stderr=True), auto_refresh=False, disable=not sys.stderr.isatty()
    )
