"""The run directory of the whole, from those of its engines: requests as their clients saw them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from executor.run import TOKENS, read_tokens
from executor.session import tokens_sha256
from policies.config.ignored import ignored_apart
from policies.config.runconfig import RunConfig
from policies.core.seam.request import Request, Status
from results.batchlog import read_batches
from results.finish import changed_options
from results.fleet import fleet_account, merged
from results.identity import RunIdentity
from results.limits import Offered, limits_of
from results.load import load_run
from results.metrics import Peaks, RunStatus, distribution, summarize
from results.requestlog import read_requests
from results.rundir import BATCHES, REQUESTS, RunDirectory
from results.window import WHOLE, Span, totals_within

SUMS = (
    "peak_kv_blocks", "peak_hidden_rows", "surplus_rows", "swapped_bytes", "prefix_hit_blocks",
    "prefix_hit_tokens", "prefix_resumed_blocks", "evicted_blocks",
)  # fmt: skip


def write_whole(
    directory: RunDirectory,
    config: RunConfig,
    identity: RunIdentity,
    replicas: Sequence[Path],
    requests: Mapping[int, Request],
    places: Sequence[tuple[int, ...]],
    facts: Mapping[str, Any],
    processes: int,
    status: RunStatus,
) -> dict[str, Any]:
    """Finish `directory` from the run directories `replicas`, those that computed prompts first; return its
    summary. `requests` are those that arrived, in that order, and `places` the engines that each went to."""
    assert config.fleet is not None
    split, own = config.fleet.prefill, [load_run(path).summary for path in replicas]
    began = {
        item.record.request.request_id: item.record
        for path in replicas[:split]
        for item in read_requests(path / REQUESTS)
    }
    numbers = {request_id: number for number, request_id in enumerate(requests)}
    for record in (item.record for path in replicas[split:] for item in read_requests(path / REQUESTS)):
        request_id = record.request.request_id
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
    logs = [totals_within(read_batches(path / BATCHES), WHOLE) for path in replicas]
    totals = merged(logs)
    notes = [note for item in own for note in item["notes"]]
    offered, span = Offered(), Span.of(directory.requests.records(), config.measure)
    summary = summarize(
        offered.of(directory.requests.records(), span),
        totals,
        _peaks(own, split),
        replace(identity, policy_options=changed_options(config.policy)),
        status=status,
        objectives=config.slo,
        span=span,
        num_devices=len(replicas),
        notes=list(dict.fromkeys([*notes, *ignored_apart(config, "executor")])),
    )
    sent_ns = {key: item.finished_ns for key, item in began.items() if item.status is Status.SENT}
    token_ns = {item.request.request_id: item.first_token_ns for item in directory.requests.records()}
    handed = [at - sent_ns[key] for key, at in token_ns.items() if at is not None and key in sent_ns]
    fleet = {
        **fleet_account(config.resolved["fleet"], config.fleet.roles, own, logs, places),
        "processes": processes,
        "copied_gb": sum([item["copied_bytes"] for item in own[:split]]) / 1e9,
        "sent_to_first_token_ms": distribution(np.array(handed, dtype=np.int64), 1e6),
    }
    summary |= {**limits_of(summary, offered, totals, len(replicas)), **facts, "fleet": fleet}
    tokens = {key: ids for path in replicas[split:] for key, ids in read_tokens(path / TOKENS).items()}
    summary["output_token_sha256"] = tokens_sha256(tokens)
    directory.write_summary(summary)
    return summary


def _peaks(own: Sequence[Mapping[str, Any]], split: int) -> Peaks:
    """Sums over all engines; tokens are made by those from `split` on."""
    sums = {key: sum([item[key] for item in own]) for key in SUMS}
    by_loops = [
        sum([item["tokens_by_loops"].get(str(at), 0) for item in own[split:]])
        for at in range(own[0]["num_loops"] + 1)
    ]
    return Peaks(
        sums["peak_kv_blocks"],
        sums["peak_hidden_rows"],
        sums["surplus_rows"],
        tuple(by_loops),
        sums["swapped_bytes"],
        sums["prefix_hit_blocks"],
        sums["prefix_hit_tokens"],
        own[0]["prefix_hit_rate"] if split == 1 else None,
        sums["prefix_resumed_blocks"],
        sums["evicted_blocks"],
    )
