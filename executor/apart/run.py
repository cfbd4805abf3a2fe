"""A run with two engines: in two threads of one process, which share a card, or in two processes, with a card
each (NCCL) or none (gloo).

Whichever fails or dies, the other ends its run as failed; each leaves its run directory in `replicas`.
"""

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.apart.side import DecodeSide, PromptSide, Side
from executor.apart.whole import write_whole
from executor.apart.wire import FOREVER, Pipe, Socket, Wire
from executor.errors import RunError
from executor.run import execute, one_line
from executor.session import Session
from policies.config.runconfig import RunConfig
from policies.core.errors import InputError
from results.identity import RunIdentity
from results.rundir import REPLICAS, RunDirectory

Join = Callable[[Session, list[Path], Callable[[Wire], PromptSide]], tuple[PromptSide, dict[str, Any]]]
"""Runs the first session's side beside the other; how differs."""
JOIN_S = 20.0
"""How long the other side may take to write down what it has, once this one is done."""


def run_apart(
    config: RunConfig,
    device: str,
    out: Path | None,
    *,
    use_graphs: bool = True,
    processes: bool | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run, write all three run directories, return where the whole's is and its summary.

    In two `processes` by default where each can have a card, or none has. Raises `InputError` for what cannot
    be run, `RunError` when either side failed.
    """
    check(config)
    if processes is None:
        processes = device == "cpu" or torch.cuda.device_count() > 1
    if not processes and device != "cpu" and config.cache.num_blocks is None:
        raise InputError(
            f"{config.where}: cache.num_blocks: null, expected that of each of two pools on one card"
        )
    place = f"{device}:0" if processes and device == "cuda" else device
    prompts, rest = config.parts()
    first = Session([prompts], place, use_graphs=use_graphs)
    if processes:
        return run_with(config, first, partial(_in_processes, rest=rest, device=device), out)
    second = Session([rest], device, use_graphs=use_graphs)
    return run_with(config, first, partial(in_threads, second=second), out)


def run_with(config: RunConfig, first: Session, join: Join, out: Path | None) -> tuple[Path, dict[str, Any]]:
    """`run_apart` with a session whose first run is the side that computes prompts; `join` runs it beside the
    other."""
    identity = RunIdentity.from_config(config.resolved, "executor", first.shape.num_loops, device=first.card)
    with RunDirectory.create(config.resolved, identity, out) as directory:
        paths = [directory.path / REPLICAS / str(at) for at in range(2)]
        run = first.runs[0]
        chooser = config.fleet.router.chooser(1, config.seed) if config.fleet is not None else None
        assert chooser is not None

        def prompt_side(wire: Wire) -> PromptSide:
            return PromptSide(run.workload.clients(), (1, 1), (chooser, chooser), wire)

        side, summary = join(first, paths, prompt_side)
        facts = {
            **{
                key: value
                for key, value in summary.items()
                if key in ("card", "dtype", "weights", "kernel_sha256")
            },
            "fleet": {"copied_gb": side.copied_bytes / 1e9, "processes": 2 if side.is_socket else 1},
        }
        whole = write_whole(directory, config, identity, paths, side.door.requests, facts, summary["status"])
    return directory.path, whole


def check(config: RunConfig) -> None:
    """Raise `InputError` for a fleet that an executor does not run."""
    fleet = config.fleet
    if fleet is None or fleet.link is None or (fleet.prefill, fleet.decode) != (1, 1):
        raise InputError(
            f"{config.where}: fleet: an executor runs one engine, or one for prompts and one that decodes "
            "(prefill: 1, decode: 1); a simulation runs others"
        )
    if fleet.link.faults:
        raise InputError(f"{config.where}: fleet.link.faults: a simulation's links fail, expected none")


def _serve(session: Session, out: Path, side: Side, wire: Wire) -> dict[str, Any]:
    """Run one side to its end; the other hears how it was."""
    try:
        summary = execute(session, session.runs[0], out, plots=False, side=side)[1]
        if summary["status"] == "interrupted":
            wire.send("interrupted")
        return summary
    except BaseException as error:
        wire.send("failed", one_line(error))
        raise
    finally:
        wire.close()


def in_threads(
    first: Session,
    paths: list[Path],
    prompt_side: Callable[[Wire], PromptSide],
    *,
    second: Session,
    streams_apart: bool = False,
) -> tuple[PromptSide, dict[str, Any]]:
    """Both sides on one card. Their batches share a stream, and only copies have streams of their own:
    kernels of two engines at the same time were seen to change bits (`executor.lab.apart`, which asks for
    `streams_apart`)."""
    for session in (first, second):  # one after the other: graphs are captured while nothing else runs
        config = session.runs[0].config
        longest = min(config.scheduler.chunk_tokens, config.scheduler.max_num_batched_tokens)
        session.warm_up(longest, config, config.sampling.temperature > 0)
    here, there = Pipe.pair()
    side, faults = prompt_side(here), list[BaseException]()
    streams = _streams(first.device, streams_apart)

    def decode() -> None:
        try:
            with streams[1]:
                _serve(second, paths[1], DecodeSide(there), there)
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=decode, name="decode")
    thread.start()
    try:
        with streams[0]:
            summary = _serve(first, paths[0], side, here)
    finally:
        thread.join()
    if faults:
        raise faults[0]
    return side, summary


def _streams(device: torch.device, are_apart: bool) -> list[AbstractContextManager[object]]:
    """Contexts of both engines' batches; on a CPU none."""
    if device.type != "cuda":
        return [nullcontext(), nullcontext()]
    first = torch.cuda.Stream(device)
    return [torch.cuda.stream(first), torch.cuda.stream(torch.cuda.Stream(device) if are_apart else first)]


def _in_processes(
    first: Session,
    paths: list[Path],
    prompt_side: Callable[[Wire], PromptSide],
    *,
    rest: RunConfig,
    device: str,
) -> tuple[PromptSide, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        child = multiprocessing.get_context("spawn").Process(
            target=_decode,
            args=(rest, f"{device}:1" if device == "cuda" else device, store, paths[1], first.uses_graphs),
        )
        child.start()
        try:
            wire = _connect(0, first.device, store)
            side = prompt_side(wire)
            summary = _serve(first, paths[0], side, wire)
        finally:
            child.join(JOIN_S)
            if child.is_alive():
                child.terminate()
            if dist.is_initialized():
                dist.destroy_process_group()
    if child.exitcode:
        raise RunError(
            f"the engine that decodes ended with status {child.exitcode}; what it had is in {paths[1]}"
        )
    return side, summary


def _decode(config: RunConfig, device: str, store: str, out: Path, use_graphs: bool) -> None:
    session = Session([config], device, use_graphs=use_graphs)
    wire = _connect(1, session.device, store)
    _serve(session, out, DecodeSide(wire), wire)
    dist.destroy_process_group()


def _connect(rank: int, device: torch.device, store: str) -> Socket:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=FOREVER)
    return Socket(rank, device)
