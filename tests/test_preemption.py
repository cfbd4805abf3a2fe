"""A pool that is too small: blocks come step by step, the last in order is preempted, and no token is lost or
computed for nothing."""

import csv
from pathlib import Path

import pytest
from toy_backend import Run, run
from worlds import VARIANTS, spelled

from policies.atomic import Atomic
from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B, OURO_TINY
from policies.core.progress.frontier import PromptProgress
from policies.core.seam.exits import ExitSettings
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.costs.limit import DeviceFacts
from policies.costs.models import load_device
from policies.registry import POLICIES
from sim.replay import replay
from sim.run import simulate

PLANES = OURO_TINY.num_loops
LIMITS = SchedulerSettings(max_num_seqs=4, prefill_chunk_size=16, max_num_batched_tokens=64)


def pool(
    num_groups: int, preemption: str = "recompute", allocation: str = "incremental", **more: object
) -> CacheSettings:
    return CacheSettings(
        block_size=8,
        num_blocks=num_groups * PLANES,
        allocation=allocation,
        preemption=preemption,
        watermark=0.0,
        **more,
    )  # type: ignore[arg-type]


def moved(result: Run) -> list[tuple[str, int, int]]:
    """(what, request, groups or 0) of everything that changed hands, in order."""
    found = []
    for batch in result.batches:
        found += [("out", item.request_id, len(item.block_groups)) for item in batch.transfers.preemptions]
        found += [("in", item.request_id, len(item.block_groups)) for item in batch.transfers.allocations]
        found += [("grow", item.request_id, len(item.block_groups)) for item in batch.transfers.growths]
    return found


@pytest.mark.parametrize(
    ("admit", "groups"), [("first_chunk", [2, 2, 1, 1, 1]), ("whole_context", [5, 1, 1])]
)
def test_blocks_come_with_the_prompt_or_each_chunk_of_it_and_each_block_of_tokens(
    admit: str, groups: list[int]
) -> None:
    """Prompt 40 in chunks of 16 and 10 tokens more, blocks of 8: positions 0..48."""
    result = run(Atomic(), [Request(0, 0, 40, 10)], LIMITS, cache=pool(7, admit=admit))
    assert moved(result) == [("in", 0, groups[0]), *(("grow", 0, count) for count in groups[1:])]
    assert result.engine.scheduler.blocks.peak_used_blocks == 7 * PLANES


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_later_of_two_gives_way_and_both_get_all_their_tokens(name: str, preemption: str) -> None:
    requests = [Request(0, 0, 16, 30), Request(1, 5, 16, 30)]
    result = run(VARIANTS[name], requests, LIMITS, cache=pool(7, preemption))
    records = result.records
    assert [record.output_tokens for record in records.values()] == [30, 30]
    assert records[0].preemptions == 0 and records[1].preemptions > 0
    result.engine.scheduler.check_drained()


def test_recompute_runs_the_kept_tokens_as_the_end_of_the_prompt_and_makes_the_next_one() -> None:
    result = run(Atomic(), [Request(0, 0, 16, 30), Request(1, 5, 16, 30)], LIMITS, cache=pool(7))
    gave_way = next(batch for batch in result.batches if batch.transfers.preemptions)
    kept = sum(
        batch.stage == "CODA" and any(item.request_id == 1 for item in batch.ranges)
        for batch in result.batches[: gave_way.seq]
    )
    resumed = next(
        item for batch in result.batches for item in batch.transfers.allocations if item.is_resumed
    )
    assert resumed.num_kept_tokens == kept > 0
    again = [
        item for batch in result.batches[gave_way.seq :] for item in batch.ranges if item.request_id == 1
    ]
    prompt = [item for item in again if item.stage == "PREFILL"]
    assert sum(item.token_count for item in prompt) >= 16 + kept
    first_coda = next(item for item in again if item.stage == "CODA")
    assert first_coda.token_start == 16 + kept - 1
    codas = [
        item.token_start
        for batch in result.batches
        for item in batch.ranges
        if item.request_id == 1 and item.stage == "CODA"
    ]
    assert codas == list(range(15, 45))


def test_swap_computes_no_token_of_a_decoding_request_twice() -> None:
    result = run(Atomic(), [Request(0, 0, 16, 30), Request(1, 5, 16, 30)], LIMITS, cache=pool(7, "swap"))
    seen: set[tuple[int, int, int]] = set()
    for batch in result.batches:
        for item in batch.ranges if batch.loop_count else ():
            for depth in range(item.depth, item.depth + batch.loop_count):
                for token in range(item.token_start, item.token_end):
                    assert (item.request_id, token, depth) not in seen
                    seen.add((item.request_id, token, depth))
    out = [item for batch in result.batches for item in batch.transfers.preemptions]
    back = [item for batch in result.batches for item in batch.transfers.allocations if item.is_resumed]
    assert [len(item.block_groups) for item in out] == [item.num_swapped_groups for item in back]
    bytes_per_group = PLANES * 8 * OURO_TINY.kv_bytes_per_token_and_depth
    rows = (len(out) + len(back)) * (OURO_TINY.hidden_bytes_per_row + 4)
    assert (
        result.engine.scheduler.residents.swapped_bytes
        == 2 * sum(len(item.block_groups) for item in out) * bytes_per_group + rows
    )


def test_a_victim_without_room_in_host_memory_is_computed_again() -> None:
    requests = [Request(0, 0, 16, 30), Request(1, 5, 16, 30)]
    result = run(Atomic(), requests, LIMITS, cache=pool(7, "swap", swap_blocks=PLANES))
    out = [item for batch in result.batches for item in batch.transfers.preemptions]
    assert out and not any(item.is_swapped for item in out)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("inflight", [1, 2])
def test_a_request_of_higher_priority_is_let_in_at_once_although_places_and_pool_are_full(
    name: str, inflight: int
) -> None:
    limits = SchedulerSettings(max_num_seqs=2, prefill_chunk_size=16, admission="priority", inflight=inflight)
    requests = [
        Request(0, 0, 16, 40, priority=1),
        Request(1, 0, 16, 40, priority=2),
        Request(2, 30_000, 16, 5, priority=1),
    ]
    result = run(VARIANTS[name], requests, limits, cache=pool(14, "swap", allocation="full"))
    records = result.records
    assert [record.preemptions for record in records.values()] == [0, 1, 0]
    assert records[2].first_scheduled_ns is not None and records[2].first_scheduled_ns < 30_000 + 4_000
    assert all(record.output_tokens == record.request.max_tokens for record in records.values())


def test_equal_priority_lets_nobody_give_way() -> None:
    limits = SchedulerSettings(max_num_seqs=1, prefill_chunk_size=16, admission="priority")
    result = run(
        Atomic(),
        [Request(0, 0, 16, 9, 1), Request(1, 10, 16, 9, 1)],
        limits,
        cache=pool(9, "recompute", "full"),
    )
    assert not any(batch.transfers.preemptions for batch in result.batches)


def test_the_watermark_keeps_blocks_free_for_those_who_run() -> None:
    def admitted_at_once(watermark: float) -> int:
        cache = CacheSettings(
            8, 10 * PLANES, allocation="incremental", preemption="recompute", watermark=watermark
        )
        return len(
            run(Atomic(), [Request(i, 0, 16, 2) for i in range(4)], LIMITS, cache=cache)
            .batches[0]
            .transfers.allocations
        )

    assert (admitted_at_once(0.0), admitted_at_once(0.4), admitted_at_once(0.99)) == (4, 3, 1)


def test_rewinding_forgets_chunks_that_have_not_finished() -> None:
    prompt = PromptProgress(20, 4, 4, 4)
    for _ in range(3):
        prompt.advance(0, 4, 1, embeds=True)
    for depth, tokens in ((1, 8), (2, 6), (3, 5)):
        prompt.advance(depth, tokens, 1, embeds=False)
    assert (prompt.num_preluded_tokens, prompt.prefill_depth_ranges) == (12, [12, 8, 6, 5])
    prompt.rewind()
    assert (prompt.num_preluded_tokens, prompt.prefill_depth_ranges, prompt.ready(0)) == (
        4,
        [4, 4, 4, 4],
        (4, 8),
    )


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        (
            {"allocation": "incremental"},
            "cache.allocation: incremental needs cache.preemption recompute or swap",
        ),
        ({"watermark": 1.0}, "cache.watermark: 1.0, expected below 1"),
        ({"swap_blocks": -1}, "cache.swap_blocks: -1, expected at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(cache: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        config = parse_config(
            {"cache": cache, "workload": {"kind": "preset", "name": "chat"}}, Path(), "test"
        )
        config.policy.check(OURO_TINY, config.scheduler, config.cache)


@pytest.mark.parametrize(("preemption", "swap_blocks"), [("recompute", None), ("swap", 40)])
def test_tokens_that_left_the_loop_early_are_never_computed_again(
    preemption: str, swap_blocks: int | None
) -> None:
    with pytest.raises(InputError, match="may compute generated tokens again at full depth"):
        cache = pool(7, preemption, swap_blocks=swap_blocks)
        run(Atomic(), [Request(0, 0, 16, 30)], LIMITS, cache=cache, exits=ExitSettings("trace", 2, 3))
    run(Atomic(), [Request(0, 0, 16, 30)], LIMITS, cache=pool(7, "swap"), exits=ExitSettings("trace", 2, 3))


def test_transfers_take_the_host_bandwidth_of_the_device() -> None:
    facts = DeviceFacts("d", 1e12, 1e12, 1, "test", host_bandwidth_bytes_per_s=25e9)
    assert facts.transfer_ns(768 * 1024) == 31_457


def config_of(policy: str, preemption: str, **changes: object) -> dict[str, object]:
    return {
        "model": "ouro-1.4b",
        "policy": spelled(policy),
        "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 64, "admission": "priority"},
        "cache": {"num_blocks": 124, "allocation": "incremental", "preemption": preemption},
        "workload": {
            "kind": "synthetic", "num_requests": 40, "prompt_tokens": [37, 200, 5, 400], "output_tokens": [60,
            1, 90],
            "arrival": {"process": "poisson", "rate": 60}, "patience_ms": [9000, 300, 8000, 900, 5000],
        },
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_under_pressure_is_replayed_exactly_and_charges_its_transfers(
    tmp_path: Path, policy: str, preemption: str
) -> None:
    path, summary = simulate(
        parse_config(config_of(policy, preemption), tmp_path, "test"), tmp_path / "run", plots=False
    )
    assert summary["preemptions"] > 2 and summary["num_finished"] + summary["num_cancelled"] == 40
    assert summary["num_finished"] > 15
    copies_s = sum(stage["components_s"].get("copies", 0.0) for stage in summary["stages"].values())
    device = load_device("h200", OURO_1_4B)
    each_ns, more_ns = device.transfer_ns(1), device.transfer_ns(10**12 + 1)
    with open(path / "batches.csv", newline="") as file:
        times = sum(int(row["copies_ns"]) > 0 for row in csv.DictReader(file))
    expected_ns = times * each_ns + summary["swapped_bytes"] / 10**12 * (more_ns - each_ns)
    assert copies_s == pytest.approx(expected_ns / 1e9, rel=1e-4)
    assert (copies_s > 0) == (preemption == "swap")
    outcome = replay(path)
    assert outcome.difference is None, str(outcome)


def test_a_log_from_before_there_was_pressure_is_replayed(tmp_path: Path) -> None:
    raw = {
        "model": "ouro-tiny",
        "policy": "wcpb",
        "workload": {"kind": "synthetic", "num_requests": 3, "prompt_tokens": 20, "output_tokens": 3},
    }
    path, _ = simulate(parse_config(raw, tmp_path, "test"), tmp_path / "run", plots=False)
    for name, last in (("batches.csv", "allocated"), ("requests.csv", "token_ns")):
        lines = [line.split(",") for line in (path / name).read_text().splitlines()]
        end = lines[0].index(last) + 1
        (path / name).write_text("".join(",".join(line[:end]) + "\n" for line in lines))
    assert replay(path).difference is None
