"""How long batches take beside their physical limits: a few cases of the profile, timed by its harness.

A batch is launched by the runner while another keeps the device busy, as in a run, in a random order with the
others of its size; the median of many launches is reported with its spread. K/V contents are random, so
nothing measures zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from executor.lab.profiling.cases import Case, decode_case, mixed_case, prompt_case, wavefront_case
from executor.lab.profiling.measure import Measurement, Repeats
from executor.session import Session
from policies.core.errors import InputError
from policies.costs.limit import Roofline

REPEATS = Repeats(busy=30, idle=1)
NUM_LOOPS = 4

STANDARD_CASES = (
    decode_case(1, 512),
    decode_case(1, 512, NUM_LOOPS),
    decode_case(8, 1024),
    decode_case(8, 1024, NUM_LOOPS),
    decode_case(8, 8192),
    decode_case(16, 512),
    wavefront_case(4, 16, 1024, NUM_LOOPS),
    wavefront_case(4, 16, 4096, NUM_LOOPS),
    wavefront_case(1, 16, 1024, NUM_LOOPS),
    prompt_case(4, 16, 1024),
    prompt_case(4, 128, 4096),
    prompt_case(8, 128, 1024),
    prompt_case(1, 1024, 1024),
    wavefront_case(2, 128, 4096, NUM_LOOPS),
    decode_case(60, 1200),
    mixed_case(60, 1200, 64, 1200),
    mixed_case(60, 1200, 65, 1200),
)
AIMS = {
    "1 decode rows at 512": 1.55,
    "8 decode rows at 1024": 1.35,
    "16 decode rows at 512": 1.38,
    "1 x 4 x 16 wavefront rows at 1024": 1.7,
    "4 x 4 x 16 wavefront rows at 1024": 1.4,
    "4 x 128 prompt rows to 4096": 1.5,
    "2 x 4 x 128 wavefront rows at 4096": 1.3,
    "1 x 1024 prompt rows to 1024": 1.35,
}
"""What these kernels are meant to reach on an H200, in multiples of the limit."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one case: median and the 10th and 90th percentile of device time, and the limit."""

    name: str
    rows: int
    median_ms: float
    low_ms: float
    high_ms: float
    limit_ms: float


def time_cases(session: Session, cases: Sequence[Case]) -> list[Timing]:
    """Time every case on `session`, whose pools must hold the contexts of one case at a time.

    Raises `InputError` on a card without known ceilings: there is no limit to compare with.
    """
    if session.facts is None:
        raise InputError(
            f"bench: {session.card} has no ceilings in policies/costs/devices.yaml; add its bandwidth and "
            "peak there"
        )
    roofline = Roofline(session.shape, session.facts)
    measurement = Measurement(session, session.seed, lambda: False)
    found = {}
    for group in measurement.groups(cases):
        for case, row in zip(group, measurement.time(group, REPEATS), strict=True):
            times_ns = (row.device_ns or 0, row.device_p10_ns or 0, row.device_p90_ns or 0)
            median_ms, low_ms, high_ms = (time_ns / 1e6 for time_ns in times_ns)
            limit_ms = sum(roofline.parts(case.work())) / 1e6
            found[case.name] = Timing(case.name, case.rows, median_ms, low_ms, high_ms, limit_ms)
    return [found[case.name] for case in cases]


def print_timings(timings: Sequence[Timing]) -> None:
    table = Table("batch", "rows", "median ms", "p10", "p90", "limit ms", "x limit", "aim")
    for item in timings:
        figures = (item.median_ms, item.low_ms, item.high_ms, item.limit_ms, item.median_ms / item.limit_ms)
        aim = AIMS.get(item.name)
        shown = "" if aim is None else f"{aim:.2f}"
        table.add_row(item.name, str(item.rows), *(f"{value:.3f}" for value in figures), shown)
    Console(width=120).print(table)
