"""How fast the simulator is, beside plain SimPy in the same process. A benchmark, not a test: nothing depends
on its figures.

Every figure is measured twice and the better one kept; what is compared is compared within one run of this
program.
"""

import io
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import simpy
from rich.console import Console
from rich.table import Table

from policies.config.runconfig import parse_config
from sim.run import Simulation

PEERS = (
    "peers on two such cores, metrics on: Vidur 10 k iterations/s at mean batch 7, 4.8 k at 52, 20 s "
    "start-up, 3.7 GiB"
)


@dataclass(frozen=True, slots=True)
class Load:
    """A synthetic overload: all requests wait from the start, so batches are as full as `max_num_seqs`
    allows."""

    policy: str
    max_num_seqs: int
    num_requests: int
    prompt_tokens: int = 128
    output_tokens: int = 100
    output_spread: int = 50

    def simulation(self) -> Simulation:
        """Lengths cycle, so that requests do not end together."""
        raw = {
            "policy": self.policy,
            "scheduler": {"max_num_seqs": self.max_num_seqs, "prefill_chunk_size": 64, "inflight": 2},
            "cache": {"num_blocks": self.max_num_seqs * 4 * 32},
            "workload": {
                "kind": "synthetic",
                "num_requests": self.num_requests,
                "prompt_tokens": [self.prompt_tokens + at for at in range(64)],
                "output_tokens": [self.output_tokens + at for at in range(self.output_spread)],
            },
        }
        return Simulation.prepare(parse_config(raw, Path("."), "bench"))


@dataclass(frozen=True, slots=True)
class Speed:
    """Batches per second of wall time, requests in a mean batch (0: not counted), how many stretches were
    taken in one step, and the share of batches in them."""

    batches_per_s: float
    mean_batch: float
    num_stretches: int
    share: float


class _Sink(io.StringIO):
    """Takes the batch log and keeps none of it, so that memory measures the simulator."""

    def write(self, text: str) -> int:
        return len(text)


class _CountingSink(_Sink):
    """Counts requests in lines that come one by one."""

    num_requests = 0

    def write(self, text: str) -> int:
        fields = text.split(",", 4)
        if fields[0] != "seq":
            self.num_requests += int(fields[3])
        return len(text)


def measure(load: Load, skips: bool) -> Speed:
    """Simulate `load`, with its log, in stretches or batch by batch."""
    simulation, counted = load.simulation(), _CountingSink()
    engine = simulation.engine(_Sink() if skips else counted)
    backend = simulation.backend(engine, skips=skips)
    started = time.perf_counter()
    backend.run()
    seconds = time.perf_counter() - started
    batches = engine.log.totals.num_batches
    return Speed(
        batches / seconds, counted.num_requests / batches, engine.num_stretches, engine.num_repeated / batches
    )


def simpy_timeouts_per_s(count: int = 400_000) -> float:
    """Plain SimPy: one process, `count` timeouts."""
    env = simpy.Environment()

    def ticker() -> Iterator[simpy.Event]:
        for _ in range(count):
            yield env.timeout(1)

    env.process(ticker())  # type: ignore[arg-type]
    started = time.perf_counter()
    env.run()
    return count / (time.perf_counter() - started)


def start_up_s() -> float:
    """Wall time of `python -m sim run` on a one-request workload, in a process of its own."""
    config = Path(__file__).parent / "configs" / "one-request.yaml"
    command = [
        sys.executable,
        "-m",
        "sim",
        "run",
        str(config),
        "--no-plots",
        "--out",
        "results/runs/start-up",
    ]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main(trace: Path | None) -> None:
    """Print the table; with `trace` also simulate that whole trace and report its peak memory."""
    console = Console(width=120)
    timeouts = max(simpy_timeouts_per_s() for _ in range(2))
    table = Table(
        "load", "mean batch", "batches/s one by one", "in stretches", "SimPy timeouts per batch", "stretches",
        "batches in them",
    )  # fmt: skip
    for load in (
        Load("wcpb", 8, 300),
        Load("mixed", 8, 300),
        Load("wcpb", 64, 600),
        Load("mixed", 64, 600),
        Load("atomic", 64, 600),
        Load("wcpb", 7, 21, 16, 1000),
        Load("wcpb", 54, 108, 16, 1000),
    ):
        single, skipping = (
            max((measure(load, skips) for _ in range(2)), key=lambda item: item.batches_per_s)
            for skips in (False, True)
        )
        table.add_row(
            f"{load.policy}, max_num_seqs {load.max_num_seqs}, {load.output_tokens} tokens",
            f"{single.mean_batch:.1f}",
            f"{single.batches_per_s:,.0f}",
            f"{skipping.batches_per_s:,.0f}",
            f"{timeouts / single.batches_per_s:.0f}, {timeouts / skipping.batches_per_s:.0f}",
            f"{skipping.num_stretches:,}",
            f"{skipping.share:.0%}",
        )
    console.print(table)
    console.print(f"plain SimPy: {timeouts:,.0f} timeouts/s; {PEERS}")
    console.print(f"start-up to finished one-request run: {min(start_up_s() for _ in range(2)):.2f} s")
    growth = [
        (count, measure(Load("wcpb", 8, count, 16, 1, 1), True).batches_per_s)
        for count in (10_000, 100_000, 1_000_000)
    ]
    told = ", ".join(f"{count:,} requests: {speed:,.0f}" for count, speed in growth)
    console.print(f"overloaded queue, batches/s by its length: {told}")
    if trace is not None:
        _measure_trace(console, trace)


def _measure_trace(console: Console, trace: Path) -> None:
    command = [
        sys.executable, "-m", "sim", "run", str(Path(__file__).parent / "configs" / "run.yaml"), "--no-plots",
        "--set", f"workload={{kind: trace, path: '{trace.resolve()}'}}", "--set", "scheduler.max_num_seqs=32",
        "--out", "results/runs/bench-trace",
    ]  # fmt: skip
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    console.print(
        f"{trace.name}, whole: {seconds:.0f} s, peak memory {peak_mib:.0f} MiB (log and requests.csv written)"
    )
