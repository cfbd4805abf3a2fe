"""A long bad day, shortened: whatever the scheduler holds is of requests that are there, so more requests
leave no more behind.

The whole of it, 100,000 requests of a recorded trace, is `sim/configs/soak.yaml`.
"""

import gc
import tracemalloc
from collections import Counter
from pathlib import Path

from policies.config.runconfig import parse_config
from policies.core.engine.runlog import RequestRecord
from sim.run import Simulation

CORE = [
    tracemalloc.Filter(True, "*/policies/core/*"),
    tracemalloc.Filter(False, "*/policies/core/engine/runlog.py"),
]
"""All of the core but the log, which keeps ids of requests and counts of host times; its records are
counted."""


def bytes_left_behind(num_requests: int) -> tuple[int, Counter[str]]:
    """What the core's code has allocated and not freed when a run has ended, and how its requests ended."""
    raw = {
        "policy": "wcpb", "device": "roofline:h200",
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 512, "prefill_chunk_size": 128,
        "admission": "priority"},
        "cache": {"num_blocks": 400, "allocation": "incremental", "preemption": "swap",
        "prefix_caching": True, "admit": "first_chunk"},
        "workload": {
            "kind": "synthetic", "num_requests": num_requests, "prompt_tokens": [300, 90, 700, 40],
            "output_tokens": [9, 20, 4],
            "arrival": {"process": "poisson", "rate": 90},
            "patience_ms": {"distribution": "lognormal", "median": 150, "sigma": 1.2},
            "shared_prefix": {"groups": 30, "tokens": 64},
        },
    }  # fmt: skip
    simulation = Simulation.prepare(parse_config(raw, Path(), "test"))
    ends: Counter[str] = Counter()

    def note(record: RequestRecord) -> None:
        ends[record.status.value] += 1
        ends["preemptions"] += record.preemptions
        ends["most_records"] = max(ends["most_records"], len(engine.log.records) + 1)

    gc.collect()
    tracemalloc.start()
    try:
        engine = simulation.engine(on_ended=note)
        simulation.backend(engine).run()
        gc.collect()
        held = tracemalloc.take_snapshot().filter_traces(CORE)
    finally:
        tracemalloc.stop()
    engine.scheduler.check_drained()
    assert not engine.log.records
    return sum(trace.size for trace in held.traces), ends


def test_three_times_the_requests_leave_nothing_more_behind() -> None:
    short, few = bytes_left_behind(120)
    long, ends = bytes_left_behind(360)
    assert ends["finished"] + ends["cancelled"] == 360
    assert min(ends["finished"], ends["cancelled"], ends["preemptions"]) > 30
    assert max(few["most_records"], ends["most_records"]) < 30
    assert long < short + 4_000, f"{long - short} bytes more after 240 requests more"
