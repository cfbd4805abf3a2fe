"""SHARED K/V without a device: one plane, prompts one token at a time through all depths, batched across
requests."""

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from toy_backend import model_with, run
from worlds import draw_world

from policies.atomic import Atomic
from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from policies.core.seam.batch import Stage
from policies.core.seam.exits import ExitSettings
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from sim.replay import replay
from sim.run import Simulation, simulate

SCHEDULES = int(os.environ.get("RANDOM_SCHEDULES", "500"))
SHARED = CacheSettings(num_blocks=40, layout="shared")


def test_prompts_run_position_by_position_through_all_depths_batched_across_requests() -> None:
    limits = SchedulerSettings(max_num_seqs=3, max_num_batched_tokens=8, prefill_chunk_size=1)
    result = run(
        Atomic(), [Request(0, 0, 3, 1), Request(1, 0, 2, 1), Request(2, 0, 4, 1)], limits, cache=SHARED
    )
    prompts = [batch for batch in result.batches if batch.stage is Stage.PREFILL]
    assert [
        [(item.request_id, item.token_start, item.token_count) for item in batch.ranges]
        for batch in prompts[:3]
    ] == [
        [(0, 0, 1), (1, 0, 1), (2, 0, 1)],
        [(0, 1, 1), (1, 1, 1), (2, 1, 1)],
        [(0, 2, 1), (2, 2, 1)],
    ]
    assert {batch.loop_count for batch in prompts} == {4}
    assert result.engine.scheduler.blocks.peak_used_blocks == 3  # one block each, in the one plane


def test_random_schedules_with_one_plane_keep_all_invariants() -> None:
    for seed in range(SCHEDULES):
        world = draw_world(Random(seed))
        assert world.cache.num_blocks is not None
        blocks = max(1, world.cache.num_blocks // world.num_loops)
        cache = replace(world.cache, layout="shared", num_blocks=blocks, prefix_caching=False)
        try:
            replace(world, cache=cache, scheduler=replace(world.scheduler, prefill_chunk_size=1)).check(
                Atomic()
            )
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_shared_kv_needs_atomic_chunks_of_one_and_no_prefix_cache() -> None:
    one = SchedulerSettings(prefill_chunk_size=1)
    model = model_with()
    Atomic().check(model, one, SHARED)
    with pytest.raises(
        InputError,
        match=(
            r"cache.layout: shared runs a prompt token .*; "
            r"expected scheduler.prefill_chunk_size 1, found 16"
        ),
    ):
        Atomic().check(model, SchedulerSettings(), SHARED)
    with pytest.raises(InputError, match=r"cache.prefix_caching: true cannot run with cache.layout shared: "):
        Atomic().check(model, one, replace(SHARED, prefix_caching=True))


def raw(**changes: object) -> dict[str, object]:
    return {
        "policy": "atomic", "device": "h200", "scheduler": {"max_num_seqs": 4}, "cache": {"layout": "shared"},
        "workload": {"kind": "synthetic", "num_requests": 9, "prompt_tokens": [20, 7], "output_tokens": 5,
        "exit_loops": [1, 3, 4]},
        **changes,
    }  # fmt: skip


def test_a_config_with_one_plane_has_chunks_of_one_a_quarter_of_the_blocks_and_replays(
    tmp_path: Path,
) -> None:
    config = parse_config(raw(exit={"mode": "trace"}), tmp_path, "test")
    assert config.scheduler.prefill_chunk_size == 1
    planes = parse_config(raw(cache={}), tmp_path, "test")
    blocks = [Simulation.prepare(item).config.cache.num_blocks for item in (config, planes)]
    assert blocks[0] is not None and blocks[1] is not None and blocks[0] <= blocks[1]
    path, summary = simulate(config, tmp_path / "run", plots=False)
    assert summary["num_finished"] == 9 and len(summary["tokens_by_loops"]) == 3
    assert summary["stages"]["CODA"]["components_s"].get("copies", 0) == 0
    assert replay(path).difference is None


@pytest.mark.parametrize("policy", ["split", "mixed", "wcpb"])
def test_a_model_that_needs_atomic_prefill_is_refused_by_policies_that_split_prompts(
    policy: str, tmp_path: Path
) -> None:
    base = raw(model="huginn-like", device="roofline:h200", cache={}, policy=policy)
    with pytest.raises(
        InputError,
        match=f"policy {policy} cannot run model huginn-like, which needs atomic prefill; use atomic",
    ):
        Simulation.prepare(parse_config(base, tmp_path, "test"))


@pytest.mark.parametrize("layout", ["shared", "last_exited"])
def test_a_model_that_needs_atomic_prefill_runs_under_atomic(layout: str, tmp_path: Path) -> None:
    config = parse_config(
        raw(model="huginn-like", device="roofline:h200", cache={"layout": layout}), tmp_path, "test"
    )
    _, summary = simulate(config, tmp_path / "run", plots=False)
    assert (summary["num_finished"], summary["tokens_by_loops"]) == (9, {"32": 36})


def test_no_plane_is_copied_to_when_there_is_one() -> None:
    result = run(
        Atomic(),
        [Request(0, 0, 3, 9)],
        SchedulerSettings(prefill_chunk_size=1),
        cache=SHARED,
        exits=ExitSettings("trace", 1, 2),
    )
    left = [batch for batch in result.batches if batch.stage is Stage.CODA and batch.ranges[0].depth]
    assert left and all(batch.work.exit_depths == [] for batch in left)
