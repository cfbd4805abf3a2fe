"""A run with several engines: in threads of one process, which share a card, or in processes, with a card
each (NCCL) or none (gloo).

Whichever fails or dies, the others end their runs as failed; each leaves its run directory in `replicas`. The
first of those that compute prompts runs here, and the clients stand before it.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.apart.posts import Hub, Outpost
from executor.apart.side import DecodeSide, PromptSide, Side
from executor.apart.whole import write_whole
from executor.apart.wire import Pipe, Socket, Wires, connect
from executor.errors import RunError
from executor.run import execute, one_line
from executor.session import Session
from policies.config.fleet import Fleet
from policies.config.runconfig import RunConfig
from policies.core.errors import InputError
from results.identity import RunIdentity
from results.rundir import REPLICAS, RunDirectory

Join = Callable[[Session, list[Path], Callable[[Wires], Hub]], tuple[Hub, dict[str, Any], int]]
"""Runs the first session's engine beside the others; how differs. Returns its summary and the number of
processes."""
JOIN_S = 20.0
"""How long others may take to write down what they have, once this one is done."""


def run_apart(
    config: RunConfig,
    device: str,
    out: Path | None,
    *,
    use_graphs: bool = True,
    processes: bool | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run, write all run directories, return where the whole's is and its summary.

    In `processes` by default where each can have a card, or none has. Raises `InputError` for what cannot be
    run, `RunError` when an engine failed.
    """
    fleet, parts = check(config), config.parts()
    if processes is None:
        processes = device == "cpu" or torch.cuda.device_count() >= len(parts)
    if not processes and device != "cpu" and config.cache.num_blocks is None:
        raise InputError(
            f"{config.where}: cache.num_blocks: null, expected that of each of {len(parts)} pools on one card"
        )
    first = Session([parts[0]], device, use_graphs=use_graphs)
    if processes:
        return run_with(config, first, partial(_in_processes, config=config, device=device), out)
    others = [Session([part], device, use_graphs=use_graphs, like=first) for part in parts[1:]]
    return run_with(config, first, partial(in_threads, fleet=fleet, others=others), out)


def run_with(config: RunConfig, first: Session, join: Join, out: Path | None) -> tuple[Path, dict[str, Any]]:
    """`run_apart` with a session whose first run is that of engine 0; `join` runs it beside the others."""
    fleet = check(config)
    identity = RunIdentity.from_config(config.resolved, "executor", first.shape.num_loops, device=first.card)
    with RunDirectory.create(config.resolved, identity, out) as directory:
        paths = [directory.path / REPLICAS / str(at) for at in range(fleet.replicas)]
        clients = first.runs[0].workload.clients()
        hub, own, processes = join(first, paths, lambda wires: Hub(fleet, clients, config.seed, wires))
        facts = {key: own[key] for key in ("card", "dtype", "weights", "kernel_sha256")}
        places = list(hub.door.places.values())
        whole = write_whole(
            directory, config, identity, paths, hub.door.requests, places, facts, processes, own["status"]
        )
    return directory.path, whole


def check(config: RunConfig) -> Fleet:
    """The fleet of `config`. Raises `InputError` for one that an executor does not run."""
    fleet = config.fleet
    if fleet is None or fleet.link is None:
        raise InputError(
            f"{config.where}: fleet: an executor runs one engine, or some for prompts and some that decode "
            "(prefill, decode); a simulation runs others"
        )
    for at, fault in enumerate(fleet.link.faults):
        if fault.speed:
            raise InputError(
                f"{config.where}: fleet.link.faults.{at}.speed: {fault.speed}, a device's link is as fast as "
                "it is, expected 0, which breaks it"
            )
    return fleet


def side_of(at: int, fleet: Fleet, wires: Wires, hub: Hub | None = None) -> Side:
    """What engine `at` of `fleet` does beside its batches."""
    post = hub or Outpost(at, wires)
    if isinstance(post, Outpost) and at >= fleet.prefill:
        return DecodeSide(post, wires)
    link = fleet.link
    assert link is not None

    def is_broken(receiver: int, now_ns: int) -> bool:
        number = link.between(at, receiver - fleet.prefill, fleet.decode)
        return any(
            item.link == number and 1e9 * item.from_s <= now_ns < 1e9 * item.until_s for item in link.faults
        )

    return PromptSide(at, post, wires, is_broken)


def _serve(session: Session, out: Path, side: Side, wires: Wires) -> dict[str, Any]:
    """Run one engine to its end; the others hear how it was."""
    try:
        summary = execute(session, session.runs[0], out, plots=False, side=side)[1]
        if summary["status"] == "interrupted":
            wires.send("interrupted")
        return summary
    except BaseException as error:
        wires.send("failed", one_line(error))
        raise
    finally:
        wires.close()


def in_threads(
    first: Session,
    paths: list[Path],
    make_hub: Callable[[Wires], Hub],
    *,
    fleet: Fleet,
    others: Sequence[Session],
    streams_apart: bool = False,
) -> tuple[Hub, dict[str, Any], int]:
    """All engines on one card. Their batches share a stream, and only copies have streams of their own:
    beside another stream's kernels bits of few decode rows change now and then, for a reason not found yet
    (`executor.lab.beside`), and prompts come later (`executor.lab.apart`, which asks for `streams_apart`)."""
    for session in (first, *others):  # one after another: graphs are captured while nothing else runs
        config = session.runs[0].config
        longest = min(config.scheduler.chunk_tokens, config.scheduler.max_num_batched_tokens)
        session.warm_up(longest, config, config.sampling.temperature > 0)
    wires, faults = Pipe.between(fleet.prefill, fleet.decode), list[BaseException]()
    hub, streams = make_hub(wires[0]), _streams(first.device, fleet.replicas, streams_apart)

    def serve(at: int, session: Session) -> None:
        try:
            with streams[at]:
                _serve(session, paths[at], side_of(at, fleet, wires[at]), wires[at])
        except BaseException as error:
            faults.append(error)

    threads = [
        threading.Thread(target=serve, args=(at, session), name=f"engine {at}")
        for at, session in enumerate(others, 1)
    ]
    for thread in threads:
        thread.start()
    try:
        with streams[0]:
            summary = _serve(first, paths[0], side_of(0, fleet, wires[0], hub), wires[0])
    finally:
        for thread in threads:
            thread.join()
    if faults:
        raise faults[0]
    return hub, summary, 1


def _streams(device: torch.device, number: int, are_apart: bool) -> list[AbstractContextManager[object]]:
    """Contexts of all engines' batches; on a CPU none."""
    if device.type != "cuda":
        return [nullcontext()] * number
    first = torch.cuda.Stream(device)
    return [
        torch.cuda.stream(torch.cuda.Stream(device) if are_apart and at else first) for at in range(number)
    ]


def _in_processes(
    first: Session,
    paths: list[Path],
    make_hub: Callable[[Wires], Hub],
    *,
    config: RunConfig,
    device: str,
) -> tuple[Hub, dict[str, Any], int]:
    fleet, context = check(config), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store, children = f"{folder}/store", list[tuple[BaseProcess, Connection]]()
        for at in range(1, fleet.replicas):
            here, there = context.Pipe()
            child = context.Process(
                target=_engine, args=(at, config, device, store, paths[at], first.uses_graphs, there)
            )
            child.start()
            there.close()
            stack.callback(_end, child)
            stack.callback(here.close)  # before that: one that waits for the others hears it
            children.append((child, here))
        try:
            _await(children)
        except BaseException:
            for child, _ in children:
                child.terminate()
            raise
        try:
            wires = connect(0, fleet.prefill, fleet.decode, first.device, store)
            hub = make_hub(wires)
            summary = _serve(first, paths[0], side_of(0, fleet, wires, hub), wires)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    for at, (child, _) in enumerate(children, 1):
        if child.exitcode:
            raise RunError(f"engine {at} ended with status {child.exitcode}; what it had is in {paths[at]}")
    return hub, summary, fleet.replicas


def _await(children: Sequence[tuple[BaseProcess, Connection]]) -> None:
    """Until all have loaded the model; then they may begin. Raises what one of them says, or `RunError` when
    it ended."""
    for at, (child, connection) in enumerate(children, 1):
        if connection not in wait([connection, child.sentinel]):
            raise RunError(f"engine {at} ended with status {child.exitcode} before it began")
        try:
            fault = connection.recv()
        except EOFError:
            raise RunError(f"engine {at} ended before it began") from None
        if fault is not None:
            raise InputError(fault)
    for _, connection in children:
        connection.send(None)


def _end(child: BaseProcess) -> None:
    child.join(JOIN_S)
    if child.is_alive():
        child.terminate()
        child.join()


def _engine(
    at: int, config: RunConfig, device: str, store: str, out: Path, use_graphs: bool, parent: Connection
) -> None:
    """Engine `at`, in a process of its own."""
    fleet = check(config)
    try:
        if device == "cuda":  # the environment that must be there before CUDA starts comes from the parent
            torch.cuda.set_device(at)
        session = Session([config.parts()[at]], device, use_graphs=use_graphs)
        fault = None
    except InputError as error:
        fault = str(error)
    try:
        parent.send(fault)
        parent.recv()
    except (EOFError, OSError):  # this one cannot begin, or another
        return
    wires = connect(at, fleet.prefill, fleet.decode, session.device, store)
    sockets = [wire for wire in wires.lanes.values() if isinstance(wire, Socket)]
    try:
        _serve(session, out, side_of(at, fleet, wires), wires)
    except RunError:  # its summary says why
        sys.exit(1)
    if any(socket.is_stuck for socket in sockets):  # the interpreter would wait for it, or be aborted
        sys.stderr.flush()
        os._exit(0)
    dist.destroy_process_group()
