"""The run directory of the whole, from those of its two engines: requests as their clients saw them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from policies.config.ignored import ignored_apart
from policies.config.runconfig import RunConfig
from policies.core.seam.request import Request, Status
from results.batchlog import read_batches
from results.finish import changed_options
from results.fleet import merged
from results.identity import RunIdentity
from results.limits import Offered, limits_of
from results.load import load_run
from results.metrics import Peaks, RunStatus, distribution, summarize
from results.requestlog import read_requests
from results.rundir import BATCHES, REQUESTS, RunDirectory
from results.window import WHOLE, Span, totals_within

SUMS = ("surplus_rows", "swapped_bytes", "prefix_hit_blocks", "prefix_hit_tokens", "prefix_resumed_blocks")


def write_whole(
    directory: RunDirectory,
    config: RunConfig,
    identity: RunIdentity,
    replicas: Sequence[Path],
    requests: Mapping[int, Request],
    extra: Mapping[str, Any],
    status: RunStatus,
) -> dict[str, Any]:
    """Finish `directory` from the run directories `replicas`, the one that computed prompts first; return its
    summary. `requests` are those that arrived, in that order."""
    first, second = (load_run(path).summary for path in replicas)
    began = {item.record.request.request_id: item.record for item in read_requests(replicas[0] / REQUESTS)}
    numbers = {request_id: number for number, request_id in enumerate(requests)}
    for item in read_requests(replicas[1] / REQUESTS):
        record, request_id = item.record, item.record.request.request_id
        before = began.get(request_id)
        first_ns = before.first_scheduled_ns if before is not None else None
        directory.requests.write(
            replace(
                record,
                request=requests[request_id],
                number=numbers[request_id],
                first_scheduled_ns=record.first_scheduled_ns if first_ns is None else first_ns,
            )
        )
    directory.batches.close()
    (directory.path / BATCHES).unlink()
    directory.requests.finish(())
    totals = merged([totals_within(read_batches(path / BATCHES), WHOLE) for path in replicas])
    offered, span = Offered(), Span.of(directory.requests.records(), config.measure)
    summary = summarize(
        offered.of(directory.requests.records(), span),
        totals,
        _peaks(first, second),
        replace(identity, policy_options=changed_options(config.policy)),
        status=status,
        objectives=config.slo,
        span=span,
        num_devices=2,
        notes=list(dict.fromkeys([*first["notes"], *second["notes"], *ignored_apart(config)])),
    )
    sent_ns = {key: item.finished_ns for key, item in began.items() if item.status is Status.SENT}
    token_ns = {item.request.request_id: item.first_token_ns for item in directory.requests.records()}
    handed = [at - sent_ns[key] for key, at in token_ns.items() if at is not None and key in sent_ns]
    fleet = {"sent_to_first_token_ms": distribution(np.array(handed, dtype=np.int64), 1e6)}
    summary |= {
        **limits_of(summary, offered, totals, 2),
        **extra,
        "fleet": {**extra.get("fleet", {}), **fleet},
    }
    summary["output_token_sha256"] = second["output_token_sha256"]
    directory.write_summary(summary)
    return summary


def _peaks(first: Mapping[str, Any], second: Mapping[str, Any]) -> Peaks:
    """Sums over both sides; tokens are made on the second."""
    loops = {int(key): count for key, count in second["tokens_by_loops"].items()}
    sums = {key: first[key] + second[key] for key in SUMS}
    return Peaks(
        first["peak_kv_blocks"] + second["peak_kv_blocks"],
        first["peak_hidden_rows"] + second["peak_hidden_rows"],
        sums["surplus_rows"],
        tuple([loops.get(at, 0) for at in range(second["num_loops"] + 1)]),
        sums["swapped_bytes"],
        sums["prefix_hit_blocks"],
        sums["prefix_hit_tokens"],
        first["prefix_hit_rate"],
        sums["prefix_resumed_blocks"],
        first["evicted_blocks"] + second["evicted_blocks"],
    )
