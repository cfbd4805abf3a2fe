"""What the log checker must know of a run, from its checked config."""

from pathlib import Path
from typing import Any

from log_checker import Replay, Rules, check_log

from policies.config.runconfig import RunConfig, load_config, model_shape
from policies.core.models.shape import ModelShape
from sim.run import Simulation


def rules_of_config(config: RunConfig, shape: ModelShape, **changes: Any) -> Rules:
    """Where the world takes time between an event and the next, times are not exact."""
    num_loops, cache, exits = shape.num_loops, config.cache, config.exit
    assert cache.num_blocks is not None
    planes, grows = cache.planes(num_loops), cache.allocation == "incremental"
    num_groups = cache.num_blocks // planes
    rules: dict[str, Any] = {
        "num_loops": num_loops,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "chunk_tokens": config.scheduler.chunk_tokens,
        "inflight": config.scheduler.inflight,
        "resident_chunks": config.policy.resident_chunks(num_loops),
        "num_groups": num_groups,
        "block_size": cache.block_size,
        "max_context_tokens": shape.max_context_tokens,
        "by_priority": config.scheduler.admission == "priority",
        "rank_ns_per_token": round(1e6 * getattr(config.policy, "ms_per_token", 0)),
        "scan_limit": config.scheduler.admission_scan_limit,
        "max_bypasses": config.scheduler.max_admission_bypasses,
        "min_loops": None if exits.mode == "fixed" else exits.min_loops,
        "max_loops": exits.max_loops,
        "grows": grows,
        "whole_context": cache.admit == "whole_context",
        "preemption": cache.preemption,
        "watermark_groups": int(cache.watermark * num_groups) if grows else 0,
        "swap_groups": None if cache.swap_blocks is None else cache.swap_blocks // planes,
        "shares_prefixes": cache.prefix_caching,
        "has_exact_times": False,
        "role": config.role,
    }
    return Rules(**(rules | changes))


def check_run(path: Path, news: str | None = None, **changes: Any) -> Replay:
    """Check the logs of a run directory of either world, an engine's with a role, too: `news` is what it
    heard, its `handovers.csv` where that is None."""
    config = load_config(path / "config.yaml")
    heard = path / "handovers.csv"
    if news is None:
        news = heard.read_text() if heard.is_file() else ""
    return check_log(
        (path / "batches.csv").read_text(),
        (path / "requests.csv").read_text(),
        rules_of_config(config, model_shape(config), **changes),
        news,
    )


def exact_times(config: RunConfig) -> dict[str, Any]:
    """The rules of a simulation, in which nothing but the host's own loop takes time between events."""
    host = Simulation.prepare(config).latency.loop
    return {
        "has_exact_times": True,
        "after_submit_ns": host.after_submit_ns,
        "after_collect_ns": host.after_collect_ns,
        "collect_ns": host.collect_ns,
        "wake_ns": host.wake_ns,
    }
