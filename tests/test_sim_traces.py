"""The recorded traces under every policy: nothing is lost, and the log passes the outside checker.

`TRACE_ROWS` says how many rows of each (thousands take their time).
"""

import io
import os
from collections import Counter
from pathlib import Path

import pytest
from log_checker import Rules, check_log
from toy_backend import requests_text
from worlds import spelled

from policies.config.runconfig import parse_config
from policies.core.engine.runlog import RequestRecord
from policies.core.seam.request import Status
from policies.registry import POLICIES
from sim.run import Simulation

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
NUM_ROWS = int(os.environ.get("TRACE_ROWS", "100"))
CASES = {
    "AzureLLMInferenceTrace_conv.csv": {"limit": NUM_ROWS, "max_context": 4096, "time_scale": 0.25},
    "AzureLLMInferenceTrace_code.csv": {"limit": NUM_ROWS, "max_context": 4096},
    "mooncake_conversation_trace.jsonl": {"limit": NUM_ROWS, "max_tokens": 24},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_every_row_of_a_recorded_trace_ends_finished_or_refused_with_a_reason(name: str, policy: str) -> None:
    if not (TRACES / name).is_file():
        pytest.skip(f"the shared trace is not at {TRACES / name}")
    raw = {
        "policy": spelled(policy),
        "scheduler": {"max_num_seqs": 32, "prefill_chunk_size": 512, "inflight": 4},
        "workload": {"kind": "trace", "path": str(TRACES / name), **CASES[name]},
    }
    config = parse_config(raw, Path("."), "test")
    simulation = Simulation.prepare(config)
    workload, batches = simulation.workload, io.StringIO()
    ended: list[RequestRecord] = []
    engine = simulation.engine(batches, ended.append)
    simulation.backend(engine).run()

    assert len(workload.requests) == NUM_ROWS
    assert (
        sorted(record.request.request_id for record in ended) == list(range(NUM_ROWS))
        and not engine.log.records
    )
    counts = Counter(record.status for record in ended)
    assert counts[Status.FINISHED] + counts[Status.REFUSED] == NUM_ROWS
    assert counts[Status.REFUSED] > 0
    assert all(bool(record.reason) == (record.status is Status.REFUSED) for record in ended)
    engine.scheduler.check_drained()
    settings, host = engine.scheduler.settings, simulation.latency.loop
    rules = Rules(
        num_loops=engine.scheduler.num_loops,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        chunk_tokens=settings.chunk_tokens,
        inflight=settings.inflight,
        resident_chunks=engine.scheduler.rings.slots_per_ring,
        num_groups=engine.scheduler.blocks.num_groups,
        block_size=engine.scheduler.blocks.block_size,
        max_context_tokens=engine.scheduler.max_context_tokens,
        rank_ns_per_token=round(1e6 * getattr(config.policy, "ms_per_token", 0)),
        after_submit_ns=host.after_submit_ns,
        after_collect_ns=host.after_collect_ns,
        wake_ns=host.wake_ns,
        outputs={
            request.request_id: workload.oracle.output_tokens(request.request_id)
            for request in workload.requests
        },
    )
    check_log(batches.getvalue(), requests_text(ended), rules)
