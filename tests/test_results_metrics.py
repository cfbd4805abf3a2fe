"""Every figure of a summary, computed by hand."""

import json
import math
import random
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from results_runs import complete_batch, config_of, identity_of, records_with_tokens, write_run

from policies.core.engine.runlog import RequestRecord, RunLog
from policies.core.seam.batch import ExecutionBatch, ScheduledRange, Stage, Work
from policies.core.seam.events import Completion
from policies.core.seam.request import Request, Status
from results.identity import RunIdentity, policy_label
from results.latency import Latencies
from results.metrics import (
    LATENCIES,
    STATISTICS,
    Peaks,
    RequestTotals,
    counted_distribution,
    distribution,
    summarize,
)

CONTRACT_KEYS = (
    "policy", "model", "device", "num_requests", "num_finished", "num_cancelled", "num_refused", "duration_s",
    "request_throughput", "prompt_token_throughput", "output_token_throughput", "ttft_ms", "itl_ms",
    "tpot_ms", "e2e_ms", "num_batches", "recurrent_invocations", "rows_per_recurrent_invocation",
    "gpu_busy_fraction", "limit_fraction", "peak_kv_blocks", "peak_hidden_rows", "select_us",
)  # fmt: skip


def summary_of(
    records: Mapping[int, RequestRecord], log: RunLog | None = None, **options: object
) -> dict[str, object]:
    totals = (log or RunLog()).totals
    return summarize(records.values(), totals, Peaks(7, 8, 9), identity_of(), **options)  # type: ignore[arg-type]


def latencies_of(*records: RequestRecord) -> Latencies:
    return RequestTotals.of(records).samples.latencies()


def test_tpot_divides_by_the_number_of_gaps() -> None:
    latencies = latencies_of(*records_with_tokens({0: (5_000_000, 6_000_000, 9_000_000)}).values())
    assert latencies.ttft_ns.tolist() == [5_000_000]
    assert latencies.itl_ns.tolist() == [1_000_000, 3_000_000]
    assert latencies.tpot_ns.tolist() == [2_000_000.0]
    assert latencies.e2e_ns.tolist() == [9_000_000]


def test_a_single_token_has_no_itl_and_no_tpot_and_the_summary_says_none() -> None:
    summary = summary_of(records_with_tokens({0: (5_000_000,)}))
    assert summary["itl_ms"] == summary["tpot_ms"] == dict.fromkeys(STATISTICS)
    assert summary["ttft_ms"] == summary["e2e_ms"] == dict.fromkeys(STATISTICS, 5.0)


def test_e2e_is_ttft_plus_every_gap_for_every_request_exactly() -> None:
    rng = np.random.default_rng(7)
    records = records_with_tokens(
        {at: tuple(np.cumsum(rng.integers(1, 10**9, 1 + at % 5)).tolist()) for at in range(40)},
        {at: -int(rng.integers(10**12)) for at in range(40)},
    )
    for record in records.values():
        one = latencies_of(record)
        assert one.e2e_ns.tolist() == [int(one.ttft_ns.sum() + one.itl_ns.sum())]
        assert len(one.itl_ns) == record.output_tokens - 1


def test_tokens_of_an_unfinished_request_count_for_ttft_and_itl_only() -> None:
    records = records_with_tokens({0: (1, 3), 1: (10, 30)})
    records[1].status = Status.CANCELLED
    latencies = latencies_of(*records.values())
    assert latencies.ttft_ns.tolist() == [1, 10] and latencies.itl_ns.tolist() == [2, 20]
    assert latencies.tpot_ns.tolist() == [2.0] and latencies.e2e_ns.tolist() == [3]


def test_percentiles_interpolate_linearly_between_ranks() -> None:
    assert distribution(np.array([4, 1, 3, 2]), 1.0) == pytest.approx(
        {"mean": 2.5, "p50": 2.5, "p90": 3.7, "p95": 3.85, "p99": 3.97, "max": 4.0}
    )


@pytest.mark.parametrize("num_samples", [1, 2, 100, 101, 5_000])
def test_counted_samples_have_the_figures_of_the_samples_themselves(num_samples: int) -> None:
    samples = [random.Random(num_samples + at).randrange(40) for at in range(num_samples)]
    counted, plain = counted_distribution(Counter(samples), 1e3), distribution(np.array(samples), 1e3)
    assert counted == pytest.approx({name: plain[name] for name in counted})
    assert counted_distribution({}, 1e3) == {"mean": None, "p99": None}


def test_batch_figures_by_hand() -> None:
    log = RunLog()
    records = records_with_tokens(
        {0: (1_000_000_000,), 1: (2_000_000_000,)}, {0: 500_000_000, 1: 600_000_000}
    )
    complete_batch(log, 0, 4, 16, 1_000_000_000, 1_400_000_000, limit_ns=100_000_000, select_ns=1_000)
    complete_batch(log, 1, 1, 64, 1_600_000_000, 2_500_000_000, limit_ns=290_000_000, select_ns=3_000)
    summary = summary_of(records, log)
    assert summary["recurrent_invocations"] == 5
    assert summary["rows_per_recurrent_invocation"] == (4 * 16 + 64) / 5
    assert summary["duration_s"] == 2.0
    assert summary["request_throughput"] == 1.0
    assert summary["prompt_token_throughput"] == 10.0 and summary["output_token_throughput"] == 1.0
    assert summary["gpu_busy_fraction"] == pytest.approx(1.3 / 1.5)
    assert summary["limit_fraction"] == pytest.approx(0.39 / 1.3)
    assert summary["select_us"] == pytest.approx({"mean": 2.0, "p99": 2.98})
    assert (summary["peak_kv_blocks"], summary["peak_hidden_rows"], summary["surplus_rows"]) == (7, 8, 9)


def test_every_key_of_the_contract_is_there_and_no_number_is_nan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for summary in (
        summary_of({}),
        summary_of(records_with_tokens({0: ()})),
        write_run(tmp_path / "run").summary,
    ):
        assert set(CONTRACT_KEYS) <= set(summary)
        json.dumps(summary, allow_nan=False)
        for name in LATENCIES:
            assert tuple(summary[name]) == STATISTICS  # type: ignore[arg-type]
            assert not any(value is not None and math.isnan(value) for value in summary[name].values())  # type: ignore[attr-defined]


def test_zero_finished_requests_is_a_failure() -> None:
    refused = RequestRecord(
        Request(0, 0, 10, 1), 0, Status.REFUSED, reason="it needs 9 KV blocks, the pool has 4"
    )
    summary = summary_of({0: refused})
    assert summary["status"] == "failed"
    assert summary["notes"] == ["no request finished, of 1"]
    assert summary["num_refused"] == 1
    assert summary["refusal_reasons"] == {"it needs 9 KV blocks, the pool has 4": 1}


def test_requests_are_all_accounted_for_by_status() -> None:
    records = records_with_tokens({0: (1,), 1: (), 2: (5, 6), 3: (7,)})
    records[3].status = Status.CANCELLED
    summary = summary_of(records, status="interrupted", skipped_rows=3, notes=("n",))
    counts = [summary[f"num_{name}"] for name in ("finished", "cancelled", "refused", "unfinished")]
    assert counts == [2, 1, 0, 1] and summary["num_requests"] == 4
    assert (summary["status"], summary["skipped_rows"], summary["notes"]) == ("interrupted", 3, ["n"])


def test_extra_keys_are_added_and_cannot_replace_one() -> None:
    records = records_with_tokens({0: (1,)})
    assert summary_of(records, extra={"output_token_sha256": "ab"})["output_token_sha256"] == "ab"
    with pytest.raises(ValueError, match="'num_requests' is already"):
        summary_of(records, extra={"num_requests": 3})


def test_identity_names_a_directory_after_what_was_run() -> None:
    config = config_of("wcpb", 16) | {
        "workload": {"kind": "trace", "path": "data/Azure conv.csv"},
        "model": "hf/ouro/config.json",
    }
    identity = RunIdentity.from_config(config, "sim", 4)
    assert identity.directory_name.rsplit("-", 1)[0] == "ouro-h200-wcpb-azure-conv-c16"
    reordered = dict(reversed(config.items()))
    assert RunIdentity.from_config(reordered, "sim", 4).directory_name == identity.directory_name
    assert RunIdentity.from_config(config | {"seed": 1}, "sim", 4).directory_name != identity.directory_name


def test_a_policy_is_labelled_by_what_differs_from_its_defaults(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plain = write_run(tmp_path / "a", options={"mix_decode": True, "fuse_prelude": True})
    changed = write_run(tmp_path / "b", options={"mix_decode": False, "fuse_prelude": True})
    assert [policy_label(run.summary) for run in (plain, changed)] == ["wcpb", "wcpb mix_decode=false"]


def test_idle_time_is_split_by_what_the_device_waited_for() -> None:
    """The first batch ends at 100. The second is thought of at 130, launched at 130 + 20 + 30 and starts at
    190."""
    log = RunLog()
    for seq, formed, started, finished, select, host in (
        (0, 0, 10, 100, 4, 6),
        (1, 130, 190, 300, 20, 30),
        (2, 150, 305, 400, 9, 9),
    ):
        work = Work.of(Stage.CODA, 0, [ScheduledRange(0, Stage.CODA, 0, 5 + seq, 1)])
        batch = ExecutionBatch(seq, work, formed, seq - 1)
        log.completed(batch, Completion(seq, finished, started, finished, frozenset(), select, host))
    totals = log.totals
    assert (totals.idle_ns, totals.idle_host_ns, totals.idle_launch_ns) == (95, 50, 15)
