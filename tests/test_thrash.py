"""Incremental allocation does not thrash: a request that comes in has room for all that is known of it, work
done twice is bounded, and throughput under pressure stays near or above that of full reservation."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from log_checker import check_log
from log_reader import Broken
from toy_backend import Run
from worlds import VARIANTS, RandomWorld, draw_world

from policies.config.runconfig import parse_config
from policies.core.memory import pressure
from policies.core.memory.pressure import MOST_PREEMPTIONS
from sim.run import simulate

SCHEDULES = 1000
PARTS = 4
NEVER_BELOW = 0.97
"""Of full reservation's throughput, what incremental allocation keeps in every world below."""


def rows_of_prompts(result: Run) -> Counter[int]:
    """Prompt rows by request, at depth 0, kept tokens that are run again among them."""
    rows: Counter[int] = Counter()
    for batch in result.batches:
        for item in batch.ranges if batch.loop_count else ():
            if item.stage.startswith("PREFILL") and item.depth == 0:
                rows[item.request_id] += item.token_count
    return rows


def tight_world(seed: int) -> RandomWorld:
    """A random world whose pool holds the largest request and at most half as much again, step by step."""
    chance = Random(seed)
    world = draw_world(chance)
    largest = max(-(-request.num_kv_positions // world.cache.block_size) for request in world.requests)
    groups = largest + chance.randint(0, max(1, largest // 2))
    cache = replace(
        world.cache,
        allocation="incremental",
        preemption=chance.choice(["recompute", "swap"]) if world.exits.mode == "fixed" else "swap",
        admit=chance.choice(["whole_context", "first_chunk"]),
        num_blocks=groups * world.cache.planes(world.num_loops),
        watermark=0.0,
        swap_blocks=None,
    )
    return replace(world, cache=cache)


@pytest.mark.parametrize("most", [1, MOST_PREEMPTIONS])
@pytest.mark.parametrize("part", range(PARTS))
def test_nobody_is_preempted_for_ever_and_work_done_twice_is_bounded(
    monkeypatch: pytest.MonkeyPatch, part: int, most: int
) -> None:
    """With a bound of 1, guarded requests are everywhere. Without priorities each is preempted that often at
    most, and computes its whole context once more each time."""
    monkeypatch.setattr(pressure, "MOST_PREEMPTIONS", most)
    names, preemptions = list(VARIANTS), 0
    for seed in range(part, SCHEDULES, PARTS):
        world = tight_world(seed)
        name = names[seed // PARTS % len(names)]
        policy = VARIANTS[name if world.allows(VARIANTS[name]) else "atomic"]
        try:
            result = world.run(policy)
            result.engine.scheduler.check_drained()
            rules = replace(world.rules(policy), most_preemptions=most)
            replay = check_log(result.batches_csv, result.requests_csv, rules)
        except Exception as error:
            error.add_note(f"seed {seed}, policy {name}")
            raise
        rows = rows_of_prompts(result)
        for request in world.requests:
            times = replay.tracks[request.request_id].times_preempted
            assert times <= most or world.scheduler.admission == "priority", f"seed {seed}"
            assert rows[request.request_id] <= (1 + times) * (request.prompt_tokens + request.max_tokens)
            preemptions += times
    assert preemptions > 20


def test_the_checker_sees_a_guarded_request_that_is_preempted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler of endless patience, and a checker that allows two preemptions."""
    monkeypatch.setattr(pressure, "MOST_PREEMPTIONS", 1 << 30)
    found = 0
    for seed in range(300):
        world, policy = tight_world(seed), VARIANTS["atomic"]
        result = world.run(policy)
        try:
            rules = replace(world.rules(policy), most_preemptions=2)
            check_log(result.batches_csv, result.requests_csv, rules)
        except Broken as broken:
            assert broken.number in (4, 9), str(broken)
            found += 1
    assert found > 0


WORLDS: dict[str, dict[str, Any]] = {
    "long prompts": {"num_requests": 4, "prompt_tokens": 2000, "output_tokens": 75},
    "long answers": {"num_requests": 16, "prompt_tokens": [100, 300], "output_tokens": [200, 100]},
    "answers shorter than asked for": {
        "num_requests": 16, "prompt_tokens": [200, 600], "output_tokens": [100, 50, 30], "max_tokens": 600,
    },
    "one long among short": {
        "num_requests": 16, "prompt_tokens": [1200, 64, 64, 64], "output_tokens": [60, 150, 120],
    },
}  # fmt: skip
"""Bursts in a pool of 200 groups of 16 positions."""


def served(folder: Path, world: str, policy: str, **cache: object) -> dict[str, Any]:
    raw = {
        "model": "ouro-1.4b", "device": "h200", "policy": policy,
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 512, "prefill_chunk_size": 64},
        "cache": {"num_blocks": 800, **cache},
        "workload": {"kind": "synthetic", "arrival": {"process": "burst"}, **WORLDS[world]},
    }  # fmt: skip
    return simulate(parse_config(raw, folder, "test"), folder / "run", plots=False)[1]


@pytest.mark.parametrize("policy", ["atomic", "wcpb"])
@pytest.mark.parametrize("world", WORLDS)
def test_throughput_under_pressure_is_not_below_that_of_full_reservation(
    tmp_path: Path, world: str, policy: str
) -> None:
    key = "output_token_throughput"
    full = served(tmp_path / "full", world, policy)[key]
    for preemption in ("recompute", "swap"):
        grown = served(tmp_path / preemption, world, policy, allocation="incremental", preemption=preemption)
        assert grown[key] >= NEVER_BELOW * full, f"{preemption}: {grown[key]:.1f} of {full:.1f} tok/s"


@pytest.mark.parametrize(("num_requests", "admit", "most"), [(2, "whole_context", 0), (8, "first_chunk", 5)])
def test_the_prompts_that_were_computed_eleven_times_are_computed_once(
    tmp_path: Path, num_requests: int, admit: str, most: int
) -> None:
    """Prompts of 8,000 tokens in a pool for one and a half; letting them in by the chunk is bounded too."""
    raw = {
        "model": "ouro-1.4b", "device": "h200", "policy": "wcpb",
        "scheduler": {"max_num_seqs": 8, "prefill_chunk_size": 256},
        "cache": {"num_blocks": 3200, "allocation": "incremental", "preemption": "recompute", "admit": admit},
        "workload": {"kind": "synthetic", "num_requests": num_requests, "prompt_tokens": 8000,
        "output_tokens": 30, "arrival": {"process": "burst"}},
    }  # fmt: skip
    summary = simulate(parse_config(raw, tmp_path, "test"), tmp_path / "run", plots=False)[1]
    assert summary["num_finished"] == num_requests
    assert summary["preemptions"] <= most * num_requests
