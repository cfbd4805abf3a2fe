"""Times single batches on a device, as the runner launches them, beside their physical limits.

Each case is a composition of ranges over requests that already hold context; the same batch runs again and
again from its captured graph, and the median of many replays is reported with its spread. K/V contents are
random, so nothing measures zeros.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from executor.kernels.worklist import Packer
from executor.packing import BatchPacker, RunningRequest
from executor.session import Session
from policies.core.errors import InputError
from policies.core.seam.batch import Allocation, ExecutionBatch, ScheduledRange, Stage
from policies.costs.limit import Roofline

WARM_UPS, REPEATS = 5, 30


@dataclass(frozen=True, slots=True)
class Case:
    """`segments` are (stage, depth, context before, rows), one request each."""

    name: str
    segments: tuple[tuple[Stage, int, int, int], ...]
    loops: int = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one case: median and the 10th and 90th percentile of device time, and the limit."""

    name: str
    rows: int
    median_ms: float
    low_ms: float
    high_ms: float
    limit_ms: float


def decode_case(requests: int, context: int, loops: int = 1) -> Case:
    name = f"{requests} decode rows at context {context}" + (f", {loops} loops" if loops > 1 else "")
    return Case(name, ((Stage.RECURRENT, 0, context - 1, 1),) * requests, loops)


def wavefront_case(requests: int, chunk: int, context: int, depths: int = 4) -> Case:
    """Every request has `depths` chunks in flight, the deepest ending at `context`."""
    segments = tuple(
        (Stage.PREFILLING_RECURRENT, depth, context + (depths - 1 - depth) * chunk - chunk, chunk)
        for _ in range(requests)
        for depth in range(depths - 1, -1, -1)
    )
    return Case(f"{requests} x {depths} x {chunk} wavefront rows at context {context}", segments)


def prompt_case(requests: int, chunk: int, context: int, loops: int = 1) -> Case:
    segments = ((Stage.PREFILLING_RECURRENT, 0, context - chunk, chunk),) * requests
    return Case(f"{requests} x {chunk} prompt rows at context {context}", segments, loops)


STANDARD_CASES = (
    decode_case(1, 512),
    decode_case(1, 512, 4),
    decode_case(8, 1024),
    decode_case(8, 1024, 4),
    decode_case(8, 8192),
    wavefront_case(4, 16, 1024),
    wavefront_case(4, 16, 4096),
    wavefront_case(1, 16, 1024),
    prompt_case(4, 16, 1024),
    prompt_case(4, 128, 4096),
    prompt_case(8, 128, 1024),
    prompt_case(1, 1024, 1024),
    wavefront_case(2, 128, 4096),
)


def time_cases(session: Session, cases: Sequence[Case]) -> list[Timing]:
    """Time every case in order on `session`, whose pools must hold the contexts of one case at a time.

    Raises `InputError` on a card without known ceilings: there is no limit to compare with.
    """
    if session.facts is None:
        raise InputError(
            f"bench: {session.card} has no ceilings in policies/costs/devices.yaml; add its bandwidth and "
            "peak there"
        )
    session.programs.eager_uses = 0
    pools, shape = session.pools, session.shape
    for pool in (pools.kv.k, pools.kv.v):
        for layer in pool:
            layer.normal_()
    pools.hidden.normal_()
    packer = BatchPacker(
        Packer(
            pools.host_groups,
            pools.kv.planes,
            pools.kv.block_size,
            shape.num_heads,
            session.model.ops.attention_slots,
            session.model.ops.tile_classes,
        ),
        pools,
        shape.num_loops,
    )
    roofline = Roofline(shape, session.facts)
    return [_time_case(session, packer, roofline, case) for case in cases]


def _time_case(session: Session, packer: BatchPacker, roofline: Roofline, case: Case) -> Timing:
    pools, block_size = session.pools, session.pools.kv.block_size
    requests: dict[int, RunningRequest] = {}
    ranges = []
    next_group = 0
    by_chain: dict[int, int] = {}
    for at, (stage, depth, start, count) in enumerate(case.segments):
        # wavefront ranges of one request share its blocks: a new request starts at the deepest depth
        chain = (
            at
            if stage is Stage.RECURRENT or not by_chain or depth >= case.segments[at - 1][1]
            else by_chain[at - 1]
        )
        by_chain[at] = chain
        if chain not in requests:
            longest = max(item[2] + item[3] for item in case.segments)
            num_groups = -(-longest // block_size)
            groups = tuple(range(next_group, next_group + num_groups))
            next_group += num_groups
            ring_id = len(requests)
            requests[chain] = RunningRequest(chain, ring_id, np.zeros(longest + 1, dtype=np.int32), groups)
            pools.admit(Allocation(chain, groups, ring_id))
        offset = 0 if stage is Stage.PREFILLING_RECURRENT else None
        ranges.append(ScheduledRange(chain, stage, depth, start, count, start, offset))
    rows = sum(item.token_count for item in ranges)
    stage = Stage.RECURRENT if case.segments[0][0] is Stage.RECURRENT else Stage.PREFILLING_RECURRENT
    batch = ExecutionBatch(0, stage, case.loops, tuple(ranges), rows, len(requests), 0, -1)
    bucket = session.programs.bucket_for(rows)
    host = bucket.next_host()
    packed = packer.pack(host, batch, requests)
    bucket.meta.update(host, packed.num_words)
    for _ in range(WARM_UPS):
        session.programs.run(batch, bucket, packed.tile_rows)
    marks = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        session.programs.run(batch, bucket, packed.tile_rows)
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in marks)
    limit_ms = sum(roofline.parts(batch)) / 1e6
    return Timing(
        case.name,
        rows,
        statistics.median(times),
        times[len(times) // 10],
        times[-1 - len(times) // 10],
        limit_ms,
    )


def print_timings(timings: Sequence[Timing]) -> None:
    table = Table("batch", "rows", "median ms", "p10", "p90", "limit ms", "x limit")
    for item in timings:
        figures = (item.median_ms, item.low_ms, item.high_ms, item.limit_ms, item.median_ms / item.limit_ms)
        table.add_row(item.name, str(item.rows), *(f"{value:.3f}" for value in figures))
    Console(width=120).print(table)
