"""`executor profile`: plans the cases, measures what is not in the file yet, and writes the profile as it goes."""

import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from executor.environment import resolve_device
from executor.kernels.worklist import SPLIT_KEYS, TILE_KEYS
from executor.profiling.cases import Case, Scale, component_cases
from executor.profiling.engine_runs import run_mixes, time_run
from executor.profiling.measure import Measurement, Repeats, query_answer, start_query
from executor.profiling.serving import all_mixes, sampled_cases
from executor.programs import BUCKETS
from executor.run import few_collections, versions
from executor.session import Session, plan_runs
from executor.source import kernel_sha256
from policies.config import RunConfig, parse_config
from policies.interrupt import CtrlC
from results.profile import HEADER_KEYS, SCHEMA, ProfileWriter

GPU_SCALE = (2048, 16384, 32, (16, 32, 64, 128, 512))
CPU_SCALE = (64, 256, 4, (8, 16, 32))
"""Rows, context and requests of a batch, and chunk sizes."""
GPU_REPEATS, CPU_REPEATS = Repeats(busy=15, idle=5), Repeats(busy=3, idle=1)
NUM_RINGS = {"cuda": 128, "cpu": 16}
"""Requests that are seated at once: several cases' worth, so that one case's repeats have other cases between them."""
NUM_SAMPLED = 330
QUICK_PART = 5
"""`--quick` measures one case in so many."""
MAY_DIFFER = frozenset({"date", "commit"})
"""Header keys that a resumed profile need not share with its beginning."""


def profile(model: str, device: str, out: Path, *, quick: bool = False, seed: int = 0) -> int:
    """Write the profile of `device` under `model` to `out`, going on from what is there; return the exit status.

    Ctrl-C keeps what was measured, says how to go on, and returns 130. Raises `InputError` for an unknown model or device and when
    `out` holds something else.
    """
    resolve_device(device)
    limits = GPU_SCALE if device == "cuda" else CPU_SCALE
    scale = Scale(*limits, pool_tokens=0)
    mixes = run_mixes(model, seed, scale)[:: 3 if quick else 1]
    session = Session([_room(model, seed, scale, device), *(config for _, config in mixes)], device)
    num_blocks = session.runs[0].config.cache.num_blocks
    assert num_blocks is not None
    pool_tokens = num_blocks // session.shape.num_loops * session.pools.kv.block_size
    cases = plan(session, Scale(*limits, pool_tokens), num_blocks, quick, seed)
    header = profile_header(session, "quick" if quick else "full", seed)
    with ProfileWriter(out, header, frozenset(HEADER_KEYS) - MAY_DIFFER) as writer, CtrlC() as ctrl_c, few_collections():
        if writer.is_complete:
            print(f"{out} is complete: {len(writer.rows)} cases", file=sys.stderr)
            return 0
        todo = [case for case in cases if not writer.is_done(case.row())]
        done_runs = {row.case.rpartition(": ")[0] for row in writer.rows if row.kind == "host"}
        runs = [(name, run) for (name, _), run in zip(mixes, session.runs[1:], strict=True) if name not in done_runs]
        if writer.rows:
            print(f"{len(writer.rows)} lines of {out} are kept, {len(todo)} cases and {len(runs)} runs remain", file=sys.stderr)
        try:
            with _progress() as progress:
                task = progress.add_task("profile", total=len(todo) + len(runs))
                measurement = Measurement(session, seed, lambda: ctrl_c.is_pressed)
                repeats = GPU_REPEATS if device == "cuda" else CPU_REPEATS
                copies = [case for case in todo if case.kind == "copies"]
                writer.append(measurement.time_copies(copies, repeats))
                progress.update(task, advance=len(copies), refresh=True)
                for group in measurement.groups([case for case in todo if case.kind != "copies"]):
                    writer.append(measurement.time(group, repeats))
                    progress.update(task, advance=len(group), refresh=True)
                for name, run in runs:
                    writer.append(time_run(session, run, name, lambda: ctrl_c.is_pressed))
                    progress.update(task, advance=1, refresh=True)
        except KeyboardInterrupt:
            session.synchronize()
            print(f"interrupted: {len(writer.rows)} lines are in {out}; the same command goes on from there", file=sys.stderr)
            return 130
        writer.finish()
    print(f"{out}: {len(writer.rows)} cases", file=sys.stderr)
    return 0


def plan(session: Session, scale: Scale, num_blocks: int, quick: bool, seed: int) -> list[Case]:
    """All cases in their random order, the same for the same device, model and seed."""
    buckets = row_buckets(scale.max_rows)
    named = all_mixes(session.runs[0].config.model, seed, scale)[:: 7 if quick else 1]
    planned = plan_runs([config for _, config in named], session.shape)
    runs = [(name, run.with_blocks(num_blocks)) for (name, _), run in zip(named, planned, strict=True)]
    parts = component_cases(scale, buckets, session.shape.num_loops)
    rng = random.Random(seed)
    rng.shuffle(parts)
    if quick:
        parts = sorted(parts, key=lambda case: case.kind)[::QUICK_PART]
    sampled = sampled_cases(runs, session.shape, buckets, NUM_SAMPLED // (QUICK_PART if quick else 1), seed)
    cases = list({case.row().key: case for case in (*parts, *sampled)}.values())
    rng.shuffle(cases)
    return cases


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that batches of up to `max_rows` rows are padded to."""
    return (*(size for size in BUCKETS if size < max_rows), max_rows)


def profile_header(session: Session, mode: str, seed: int) -> dict[str, str]:
    """The header of a profile made now on `session`."""
    query = start_query(session.device, "driver_version")
    found = versions()
    facts = session.facts_for_summary()
    values = {
        "schema": SCHEMA,
        "mode": mode,
        "seed": str(seed),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": git_commit(),
        "gpu": session.card,
        "driver": " ".join(query_answer(query)) if query else "",
        "python": found["python"],
        "torch": found["torch"],
        "cuda": found.get("cuda", ""),
        "triton": found.get("triton", ""),
        "model": session.shape.name,
        "dtype": facts["dtype"],
        "kernel_sha256": kernel_sha256(),
        "cuda_graphs": str(session.uses_graphs).lower(),
        "block_size": str(session.pools.kv.block_size),
        "row_buckets": " ".join(map(str, row_buckets(session.runs[0].config.scheduler.max_num_batched_tokens))),
        "tile_rows": " ".join(map(str, session.model.ops.tile_classes)),
        "tile_keys": str(TILE_KEYS),
        "split_keys": str(SPLIT_KEYS),
        "attention_slots": str(session.model.ops.attention_slots),
    }
    return {key: values[key] for key in HEADER_KEYS}


def git_commit() -> str:
    """The commit that this source is, `-dirty` behind it when files differ; blank outside a git checkout."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        top = subprocess.run(["git", "-C", str(root), "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True)
        if Path(top.stdout.strip()) != root:
            return ""
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _room(model: str, seed: int, scale: Scale, device: str) -> RunConfig:
    """A run nobody runs: its limits size the session's rings, buckets and KV pool."""
    raw = {
        "model": model,
        "policy": "wcpb",
        "scheduler": {
            "max_num_seqs": NUM_RINGS[device],
            "max_num_batched_tokens": scale.max_rows,
            "prefill_chunk_size": scale.chunks[-1],
        },
        "workload": {"kind": "synthetic", "num_requests": 1, "prompt_tokens": scale.max_context, "output_tokens": 16},
        "seed": seed,
    }
    return parse_config(raw, Path("."), "profile")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False, disable=not sys.stderr.isatty())
