"""A profiler window over steady batches of a run: does the host ever wait for the device, and where is the
device idle?

Counts every CUDA call that the host makes between the first and the last launch of the window, and measures
the gaps between device work. The profiler itself slows launches and kernels down, so its times are upper
bounds; `gpu_busy_fraction` of a run without it is the figure to quote.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from executor.errors import RunError
from executor.run import execute
from executor.runner import Launched
from executor.session import Session
from policies.config.runconfig import RunConfig
from policies.core.seam.batch import ExecutionBatch

API, DEVICE = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a Kineto trace: calls of the host, and work of the device."""
BLOCKING = (
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cudaMemset",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaFreeHost",
)
"""Calls that wait for the device, beside everything with `Synchronize` in its name."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """Stretches without device work: how many, in all, the median and the longest (microseconds)."""

    count: int
    total_us: float
    median_us: float
    longest_us: float

    @classmethod
    def of(cls, gaps: Sequence[float]) -> "Gaps":
        gaps = sorted(gaps)
        return cls(len(gaps), sum(gaps), gaps[len(gaps) // 2], gaps[-1]) if gaps else cls(0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TraceAccount:
    """What a window showed. `calls` is (count, mean microseconds) of every CUDA call by name; `blocking`
    counts those that wait for the device, and copies from or to pageable memory, which do too."""

    num_batches: int
    window_us: float
    busy_us: float
    calls: dict[str, tuple[int, float]]
    blocking: dict[str, int]
    gaps_within_launches: Gaps
    gaps_between_launches: Gaps


class TraceWindow:
    """An observer that profiles `num_batches` batches after the first `skip` and writes the trace to `path`
    at the end of them."""

    def __init__(self, skip: int, num_batches: int, path: Path) -> None:
        self._skip, self._end, self._path = skip, skip + num_batches, path
        self._num_launched = 0
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities)

    def launching(self, batch: ExecutionBatch) -> None:
        if self._num_launched == self._skip:
            self._profiler.start()
        elif self._num_launched == self._end:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._path))
        self._num_launched += 1

    def collected(self, batch: ExecutionBatch, launched: Launched, stops: frozenset[int]) -> None:
        """Nothing to do."""


def trace(config: RunConfig, out: Path, skip: int, num_batches: int) -> TraceAccount:
    """Run `config` on CUDA, profile a window, write `trace-account.json` into `out`. Raises `RunError` for a
    run too short."""
    session = Session([config], "cuda")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "window.json"
        execute(session, session.runs[0], out, plots=False, observers=(TraceWindow(skip, num_batches, path),))
        if not path.exists():
            raise RunError(
                f"the run ended before batch {skip + num_batches}, the end of the window; lower --skip or "
                "--batches"
            )
        account = account_of(json.loads(path.read_text())["traceEvents"], num_batches)
    (out / "trace-account.json").write_text(json.dumps(asdict(account), indent=1) + "\n")
    return account


def account_of(events: Sequence[dict[str, Any]], num_batches: int) -> TraceAccount:
    """The account of a Kineto trace. Only what lies between the first and the last launch counts: the
    profiler itself waits for the device when it starts and stops."""
    calls = [event for event in events if event.get("cat") in API]
    launches = [event["ts"] for event in calls if "Launch" in event["name"]]
    begin, end = min(launches), max(launches)
    calls = [event for event in calls if begin <= event["ts"] <= end]
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"].get("correlation"), event["name"])
        for event in events
        if event.get("cat") in DEVICE and begin <= event["ts"] <= end
    )
    counts = Counter(event["name"] for event in calls)
    times = Counter[str]()
    for event in calls:
        times[event["name"]] += event["dur"]
    blocking = Counter(
        {name: count for name, count in counts.items() if "Synchronize" in name or name in BLOCKING}
    )
    blocking.update(name for *_, name in work if "Pageable" in name)
    within, between = [], []
    busy, free, last_correlation = 0.0, work[0][0], work[0][2]
    for start, stop, correlation, _ in work:
        if start > free:
            (within if correlation == last_correlation else between).append(start - free)
        busy += max(0.0, stop - max(start, free))
        free, last_correlation = max(free, stop), correlation
    return TraceAccount(
        num_batches,
        free - work[0][0],
        busy,
        {name: (count, times[name] / count) for name, count in counts.most_common()},
        dict(blocking),
        Gaps.of(within),
        Gaps.of(between),
    )


def print_account(account: TraceAccount) -> None:
    console = Console(width=120)
    calls = Table(
        "CUDA call of the host", "count", "mean us", title=f"{account.num_batches} batches under the profiler"
    )
    for name, (count, mean_us) in account.calls.items():
        calls.add_row(name, str(count), f"{mean_us:.1f}")
    console.print(calls)
    gaps = Table(
        "device idle",
        "gaps",
        "total us",
        "median us",
        "longest us",
        title=f"window of {account.window_us:,.0f} us",
    )
    for name, item in (
        ("within a launch", account.gaps_within_launches),
        ("between launches", account.gaps_between_launches),
    ):
        gaps.add_row(
            name,
            str(item.count),
            *(f"{value:,.1f}" for value in (item.total_us, item.median_us, item.longest_us)),
        )
    console.print(gaps)
    found = ", ".join(f"{count} x {name}" for name, count in account.blocking.items()) or "none"
    console.print(f"calls that wait for the device: {found}")
