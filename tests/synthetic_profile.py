"""Profiles computed from known coefficients, as an executor would have written them. Not a test."""

import dataclasses
import math
from itertools import product
from pathlib import Path

from policies.core.engine.batchlines import ranges_text
from policies.core.models.shape import OURO_1_4B
from policies.core.seam.batch import ScheduledRange, Stage
from policies.costs.features import Cutting
from policies.costs.modelfile import Attention, Combine, Copies, DeviceTimes, FewRows, Swap, Table
from results.profile import HEADER_KEYS, ProfileRow, ProfileWriter

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
HEADER = {
    **dict.fromkeys(HEADER_KEYS, "unknown"),
    "schema": "1",
    "seed": "0",
    "date": "2026-01-01",
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "model": "ouro-1.4b",
    "dtype": "bfloat16",
    "kernel_sha256": "0123456789abcdef",
    "row_buckets": " ".join(map(str, BUCKETS)),
    "tile_rows": "16 32 64 128",
    "tile_keys": "64",
    "split_keys": "512",
    "attention_slots": "264",
    "attention_partials": "8192",
    "attention_spare_items": "1024",
    "short_rows": "16",
    "few_rows": "4",
}
CUTTING = Cutting(BUCKETS, (16, 32, 64, 128), 64, 512, 264, 8192, 1024, OURO_1_4B.num_heads, 16, 4)
TRUTH = DeviceTimes(
    launch_ns=12_000,
    linear=Table(
        BUCKETS, (1.2e6, 1.21e6, 1.22e6, 1.23e6, 1.24e6, 1.25e6, 1.3e6, 1.4e6, 1.6e6, 2.4e6, 4.2e6, 8.1e6)
    ),
    attention={
        16: Attention(30_000, 1_100, 50_000),
        32: Attention(33_000, 1_300, 70_000),
        64: Attention(40_000, 2_000, 150_000),
        128: Attention(46_000, 4_000, 65_000),
    },
    combine=Combine(5_000, 250),
    few=FewRows(3_200, 7_700),
    prelude=Table((1, 8, 32), (12_000, 12_500, 13_000)),
    staging=Table((16, 64, 128, 512), (31_000, 33_000, 36_000, 40_000)),
    coda=Table((1, 8, 32), (75_000, 77_000, 80_000)),
    copies=Copies(3_000, 60, 25),
    swap=Swap(40_000, 0.02),
)
GAPS = (
    ("from a batch's end to the start of the next, which was queued", 1_300),
    ("from having prepared a batch to its start on an idle device", 2_000),
    ("from a batch's end until the waiting host noticed", 15_000),
    (
        "from collecting a batch until the next is being chosen, what is between choosing and preparing "
        "included",
        9_000,
    ),
    ("from handing a batch over until the next is being chosen, likewise", 4_000),
    ("what a batch takes the host longer for each request that is let in with it", 160_000),
    ("what the first batch after an idle millisecond takes the host longer", 500_000),
)


def prompts(spans: list[tuple[int, int]]) -> tuple[ScheduledRange, ...]:
    return tuple(
        ScheduledRange(at, Stage.PREFILLING_RECURRENT, 0, start, count)
        for at, (start, count) in enumerate(spans)
    )


def decodes(count: int, context: int) -> tuple[ScheduledRange, ...]:
    return tuple(ScheduledRange(at, Stage.RECURRENT, 0, context - 1 + 70 * at, 1) for at in range(count))


def batches() -> list[tuple[str, Stage, int, tuple[ScheduledRange, ...]]]:
    """(kind, stage, loop_count, ranges) of every case."""
    cases: list[tuple[str, Stage, int, tuple[ScheduledRange, ...]]] = []
    for bucket, loops in product(BUCKETS, (1, 4)):
        spans = [(0, min(16, bucket - first)) for first in range(0, bucket, 16)]
        cases.append(("linear", Stage.PREFILLING_RECURRENT, loops, prompts(spans)))
    for count, context, loops in product((1, 2, 4, 8, 16, 32), (16, 200, 700, 1500, 4000, 9000), (1, 4)):
        cases.append(("attention", Stage.RECURRENT, loops, decodes(count, context)))
    for requests, count, start in product((1, 2, 4, 8), (16, 32, 64, 128, 200), (0, 500, 2000, 8000)):
        cases.append(("attention", Stage.PREFILLING_RECURRENT, 1, prompts([(start, count)] * requests)))
    for number, count in product((1, 4, 8), (32, 64, 128)):
        mixed = prompts([(300 * number, count)])[0]._replace(request_id=99)
        cases.append(("batch", Stage.RECURRENT, 1, (*decodes(number, 900), mixed)))
        cases.append(
            (
                "batch",
                Stage.PREFILL,
                4,
                tuple(item._replace(stage=Stage.PREFILL) for item in prompts([(0, count)] * number)),
            )
        )
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32)
    for stage, kind in ((Stage.PRELUDE, "prelude"), (Stage.CODA, "coda")):
        cases += [
            (kind, stage, 0, tuple(item._replace(stage=stage) for item in decodes(size, 100)))
            for size in sizes
        ]
    for size in (16, 30, 32, 60, 64, 100, 128, 400, 512):
        cases.append(
            (
                "staging",
                Stage.PREFILLING_PRELUDE,
                0,
                tuple(item._replace(stage=Stage.PREFILLING_PRELUDE) for item in prompts([(0, size)])),
            )
        )
    return cases


def true_ns(stage: Stage, loops: int, ranges: tuple[ScheduledRange, ...]) -> float:
    features = CUTTING.features(CUTTING.key(ranges))
    if loops:
        return sum(TRUTH.recurrent_ns(features, loops))
    tables = {Stage.CODA: TRUTH.coda, Stage.PRELUDE: TRUTH.prelude}
    return tables.get(stage, TRUTH.staging).at(features.bucket)


def host_ns(stage: Stage, num_ranges: int, loops: int) -> tuple[int, int, int]:
    """(select, prepare, launch)."""
    return 20_000 + 1_500 * num_ranges, 60_000 + 2_000 * num_ranges, 15_000 + 5_000 * loops


def write_profile(path: Path, host_spread: float = 0.3) -> Path:
    """A whole profile of every case, exact to the nanosecond; the host's times vary by `host_spread`, as
    `HostLoop` has it."""
    with ProfileWriter(path, HEADER, frozenset()) as writer:
        rows = []
        for at, (kind, stage, loops, ranges) in enumerate(batches()):
            device = round(true_ns(stage, loops, ranges))
            select, prepare, launch = host_ns(stage, len(ranges), loops)
            row = ProfileRow(
                kind,
                f"case {at}",
                stage,
                loops,
                sum(item.token_count for item in ranges),
                ranges_text(ranges),
            )
            timed = {"n": 20, "device_ns": device, "device_p10_ns": device, "device_p90_ns": device}
            rows.append(
                dataclasses.replace(
                    row, **timed, idle_device_ns=device + launch // 2, prepare_ns=prepare, launch_ns=launch
                )
            )
            if kind in ("attention", "prelude", "coda"):
                p90 = round((prepare + launch) * math.exp(host_spread * 1.2816))
                host = dataclasses.replace(
                    row, kind="host", n=20, select_ns=select, prepare_ns=prepare, launch_ns=launch
                )
                rows.append(dataclasses.replace(host, host_p90_ns=p90))
        for count, depth in product((1, 4, 8, 32), range(3)):
            left = tuple(item._replace(depth=depth) for item in decodes(count, 100))
            ns = round(TRUTH.copies.of(count, count * (3 - depth)))
            name = f"{count} rows after depth {depth}"
            rows.append(
                ProfileRow("copies", name, Stage.RECURRENT, 0, count, ranges_text(left), 20, ns, ns, ns)
            )
        for groups in (1, 4, 16):
            assert TRUTH.swap is not None
            ns = round(
                TRUTH.swap.of(16 * groups * OURO_1_4B.num_loops * OURO_1_4B.kv_bytes_per_token_and_depth)
            )
            rows.append(ProfileRow("swap", f"{groups} block groups out", rows=16 * groups, n=9, device_ns=ns))
        rows += [ProfileRow("gap", f"a run: {case}", n=9, device_ns=ns) for case, ns in GAPS]
        writer.append(rows)
        writer.finish()
    return path
