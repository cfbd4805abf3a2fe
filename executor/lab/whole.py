"""All that a change of kernels must show, on one card in one go: products beside a cuBLAS that may split
them, attention beside torch's, batches beside their limits with CUDA graphs and without, a token at batch 1
all in, serving, and the eager loop.

`python -m executor.lab.whole OUT [--attention KIND] [--seconds N] [--set KEY=VALUE] [PART ...]` prints tables
and writes the figures to OUT/whole.json after every part. `--set` is for the grid of `serving`, whose second
workload is a trace to be found where the command runs. After `--seconds` no further part begins; those left
out are named. A part that fails does not end the others; the status is 1 then.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from executor.lab import peer_bench, products, tall_rows
from executor.lab.bench import STANDARD_CASES, print_timings, time_cases
from executor.run import execute
from executor.session import PlannedRun, Session
from policies.config.grid import load_grid
from policies.config.runconfig import RunConfig, load_config, parse_config
from policies.core.errors import InputError
from policies.process.command import OneLineParser, exit_status
from results.table import print_table

CONFIGS = Path(__file__).parents[1] / "configs"
ONE_ROW = {
    "policy": "wcpb",
    "scheduler": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1024,
        "prefill_chunk_size": 512,
        "inflight": 4,
    },
    "workload": {"kind": "synthetic", "num_requests": 4, "prompt_tokens": 480, "output_tokens": 64},
    "seed": 0,
}
"""One request at a time, 64 tokens around context 512."""
KEYS = (
    "workload", "policy", "output_token_throughput", "itl_ms", "ttft_ms", "gpu_busy_fraction", "clock_mhz",
    "kernels", "kernel_sha256", "output_token_sha256", "card",
)  # fmt: skip
"""What is kept of a run's summary."""


class Whole:
    """The parts; all but the first two run on one loaded model."""

    def __init__(self, out: Path, attention: str, settings: list[str]) -> None:
        self._out, self._attention, self._settings = out, attention, settings
        self.parts: dict[str, Callable[[], object]] = {
            "products": self.products,
            "attention": lambda: tall_rows.compare(tall_rows.BENCHED),
            "batches": self.batches,
            "one-row": lambda: self.summaries("one-row"),
            "serving": lambda: self.summaries("serving"),
            "eager": self.eager,
            "peers": self.peers,
        }

    def configs(self) -> dict[str, list[RunConfig]]:
        """By part. All share a pool, the one of `bench.yaml`: the eager loop's cache must fit beside it."""
        bench = load_config(CONFIGS / "bench.yaml", [f"attention={self._attention}"])
        shared = {"attention": self._attention, "cache": {"num_blocks": bench.cache.num_blocks}}
        choices = [f"{key}={json.dumps(value)}" for key, value in shared.items()]
        cells = load_grid(CONFIGS / "heights-serving.yaml", [*choices, *self._settings])
        return {
            "batches": [bench],
            "one-row": [parse_config({"model": bench.model, **shared, **ONE_ROW}, Path("."), "whole")],
            "serving": [config for _, config in cells],
            "peers": peer_bench.configs(bench.model, shared),
        }

    @cached_property
    def loaded(self) -> tuple[Session, dict[str, list[PlannedRun]]]:
        """The model, and the runs of every part."""
        configs = self.configs()
        session = Session([config for part in configs.values() for config in part], "cuda")
        runs = iter(session.runs)
        return session, {name: [next(runs) for _ in part] for name, part in configs.items()}

    def products(self) -> object:
        found = products.compare()
        products.print_products(found)
        return found

    def batches(self) -> object:
        timings = time_cases(self.loaded[0], STANDARD_CASES)
        print_timings(timings)
        return [asdict(item) for item in timings]

    def eager(self) -> object:
        """Batches whose kernels are launched one by one."""
        programs = self.loaded[0].programs
        programs.use_graphs = False
        try:
            return self.batches()
        finally:
            programs.use_graphs = True

    def summaries(self, name: str) -> object:
        session, runs = self.loaded
        found = []
        for at, run in enumerate(runs[name]):
            found.append(execute(session, run, self._out / "runs" / f"{name}-{at}", plots=False)[1])
        print_table(found)
        return [{key: summary.get(key) for key in KEYS} for summary in found]

    def peers(self) -> object:
        session, runs = self.loaded
        rows = peer_bench.compare(session, runs["peers"], self._out / "runs", 1)
        peer_bench.print_rows(rows)
        return [asdict(row) for row in rows]


def main() -> int:
    parser = OneLineParser(prog="executor.lab.whole")
    parser.add_argument("out", type=Path)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("part", nargs="*")
    options = parser.parse_args()
    whole = Whole(options.out, options.attention, options.set)
    unknown = [name for name in options.part if name not in whole.parts]
    if unknown:
        raise InputError(f"{unknown[0]}: expected one of {', '.join(whole.parts)}")
    options.out.mkdir(parents=True, exist_ok=True)
    found, began, status = {}, time.monotonic(), 0
    for name in options.part or whole.parts:
        if time.monotonic() - began > options.seconds:
            print(f"left out, for want of time: {name}", flush=True)
            continue
        print(f"== {name}", flush=True)
        try:
            found[name] = whole.parts[name]()
        except InputError:
            raise
        except Exception:
            traceback.print_exc()
            status = 1
        (options.out / "whole.json").write_text(json.dumps(found, indent=1, default=str))
        print(f"[{name} done at {time.monotonic() - began:.1f} s]", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(exit_status("executor.lab.whole", main))
