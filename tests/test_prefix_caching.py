"""Prompts that begin alike: what is computed once is reused, what is reused is counted once, and nothing half
done is shared."""

import csv
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from toy_backend import run
from worlds import VARIANTS, spelled

from executor.prompts import prompt_ids
from policies.atomic import Atomic
from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from policies.core.memory.kv import BlockLedger
from policies.core.memory.prefixes import block_keys
from policies.core.models.shape import OURO_TINY
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from sim.replay import replay
from sim.run import simulate
from workloads.spec import parse_workload
from workloads.workload import load_workload

PLANES = OURO_TINY.num_loops
SERIAL = SchedulerSettings(max_num_seqs=1, prefill_chunk_size=16, max_num_batched_tokens=64)
TRACE = Path(__file__).parent.parent.parent / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason="the recorded traces are not here")


def sharing(num_groups: int, **more: object) -> CacheSettings:
    return CacheSettings(block_size=8, num_blocks=num_groups * PLANES, prefix_caching=True, **more)  # type: ignore[arg-type]


def asking(
    request_id: int, prompt_tokens: int, ids: tuple[int, ...], tokens: int = 32, arrival_ns: int = 0
) -> Request:
    return Request(request_id, arrival_ns, prompt_tokens, 2, 0, ids, tokens)


@pytest.mark.parametrize(
    ("prompt_tokens", "ids", "reused"),
    [
        (64, (1, 2), 7),
        (65, (1, 2), 8),
        (40, (1, 2), 4),
        (64, (1, 3), 4),
        (64, (3, 2), 0),
        (64, (), 0),
        (8, (1,), 0),
        (9, (1,), 1),
    ],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_common_beginning_is_reused_in_whole_blocks_but_for_the_last_token(
    name: str, prompt_tokens: int, ids: tuple[int, ...], reused: int
) -> None:
    """The first prompt has 64 tokens, ids 1 and 2 for 32 each; blocks of 8."""
    result = run(
        VARIANTS[name],
        [asking(0, 64, (1, 2)), asking(1, prompt_tokens, ids, arrival_ns=1)],
        SERIAL,
        cache=sharing(40),
    )
    allocation = next(
        item for batch in result.batches for item in batch.transfers.allocations if item.request_id == 1
    )
    assert allocation.num_reused_groups == reused
    prompt = [
        item
        for batch in result.batches
        for item in batch.ranges
        if item.request_id == 1 and item.stage.startswith("PREFILL")
    ]
    assert min(item.token_start for item in prompt) == 8 * reused
    result.engine.scheduler.check_drained()


def test_a_prefix_is_shared_chunk_by_chunk_as_batches_are_collected_never_before() -> None:
    """Chunks of 16, blocks of 8: whoever comes while the third chunk runs reuses the four blocks of the first
    two."""
    limits = SchedulerSettings(max_num_seqs=2, prefill_chunk_size=16, max_num_batched_tokens=16, inflight=1)
    requests = [asking(0, 64, (1, 2)), asking(1, 64, (1, 2), arrival_ns=2500)]
    result = run(Atomic(), requests, limits, cache=sharing(40))
    allocation = next(
        item for batch in result.batches for item in batch.transfers.allocations if item.request_id == 1
    )
    assert allocation.num_reused_groups == 6
    early = run(
        Atomic(), [asking(0, 64, (1, 2)), asking(1, 64, (1, 2), arrival_ns=2)], limits, cache=sharing(40)
    )
    assert (
        next(
            item for batch in early.batches for item in batch.transfers.allocations if item.request_id == 1
        ).num_reused_groups
        == 2
    )


def test_what_somebody_else_holds_is_not_needed_twice_and_what_nobody_holds_is_not_free_as_well() -> None:
    """Nine groups of 8 tokens; 64 tokens take 8 of them, and 7 of these can be shared: so two requests fit at
    once, just."""
    ledger = BlockLedger(9, 8, 1)
    keys = [bytes([at]) for at in range(7)]
    groups = ledger.allocate(0, 64)
    for group, key in zip(groups, keys, strict=False):
        ledger.publish(group, key)
    reused = ledger.published(keys)
    assert len(reused) == 7 and ledger.free_groups == 1
    ledger.allocate(1, 64, reused)
    assert (ledger.free_groups, ledger.num_references) == (0, 16)
    ledger.release(0)
    ledger.release(1)
    ledger.check_integrity()
    assert ledger.free_groups == 9
    taken = run(
        Atomic(), [asking(0, 64, (1, 2)), asking(1, 64, (1, 2), arrival_ns=1)], SERIAL, cache=sharing(9)
    )
    assert taken.engine.scheduler.residents.prefixes.totals.reused_groups == 7


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    ledger = BlockLedger(6, 8, 1)
    for request_id, names in enumerate((b"abc", b"xyz")):
        for group, name in zip(ledger.allocate(request_id, 24), names, strict=True):
            ledger.publish(group, bytes([name]))
        ledger.release(request_id)
    ledger.allocate(9, 8)
    assert [len(ledger.published([bytes([name]) for name in names])) for names in (b"abc", b"xyz")] == [2, 3]
    ledger.allocate(7, 16, ledger.published([b"a", b"b"]))
    ledger.release(7)
    ledger.allocate(8, 24)
    assert [len(ledger.published([bytes([name]) for name in names])) for names in (b"abc", b"xyz")] == [2, 0]


def test_equal_keys_are_equal_tokens_and_the_other_way_round() -> None:
    """Hashing the tokens that the executor draws groups blocks exactly as the keys from content ids do."""
    requests = [
        Request(0, 0, 70, 1, 0, (1, 2, 3), 24), Request(1, 0, 70, 1, 0, (1, 2, 4), 24),
        Request(2, 0, 50, 1, 0, (1, 2, 3), 24), Request(3, 0, 70, 1, 0, (2, 1, 3), 24), Request(4, 0, 70, 1),
    ]  # fmt: skip
    by_key: dict[bytes, bytes] = {}
    by_tokens: dict[bytes, bytes] = {}
    for request in requests:
        ids = prompt_ids(7, request, 49152)
        assert len(ids) == request.prompt_tokens
        for index, key in enumerate(block_keys(request, 10)):
            tokens = ids[: 10 * (index + 1)].tobytes()
            assert by_key.setdefault(key, tokens) == tokens
            assert by_tokens.setdefault(tokens, key) == key
    assert [len(block_keys(request, 10)) for request in requests] == [7, 7, 5, 7, 0]
    assert len(by_key) == 7 + 3 + 0 + 7


def test_prompts_without_content_are_drawn_as_ever() -> None:
    expected = np.random.default_rng(np.random.SeedSequence([3, 5])).integers(0, 512, 40, dtype=np.int32)
    assert np.array_equal(prompt_ids(3, Request(5, 0, 40, 1), 512), expected)


def test_synthetic_prompts_share_one_of_some_texts() -> None:
    keys = {"kind": "synthetic", "num_requests": 60, "prompt_tokens": 50, "output_tokens": 1}
    plain, alike = (
        load_workload(parse_workload(item, "test"), 0)
        for item in (keys, {**keys, "shared_prefix": {"groups": 3, "tokens": 32}})
    )
    assert {request.content_ids for request in alike.requests} == {(0,), (1,), (2,)}
    assert {request.content_tokens for request in alike.requests} == {32}
    assert [request.prompt_tokens for request in plain.requests] == [
        request.prompt_tokens for request in alike.requests
    ]
    with pytest.raises(
        InputError,
        match=r"unknown key 'workload.shared_prefix.group', expected one of groups, tokens; did you",
    ):
        parse_workload({**keys, "shared_prefix": {"groups": 3, "tokens": 32, "group": 1}}, "test")


def test_shared_kv_refuses_prefix_caching_in_one_sentence() -> None:
    cache = CacheSettings(num_blocks=40, layout="shared", prefix_caching=True)
    with pytest.raises(InputError, match=r"cache.prefix_caching: true cannot run with cache.layout shared"):
        Atomic().check(OURO_TINY, SERIAL, cache)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_with_hits_evictions_preemption_and_hang_ups_is_replayed(
    tmp_path: Path, policy: str, preemption: str
) -> None:
    raw = {
        "model": "ouro-1.4b", "policy": spelled(policy), "scheduler": {"max_num_seqs": 5,
        "max_num_batched_tokens": 64},
        "cache": {"num_blocks": 170, "allocation": "incremental", "preemption": preemption,
        "prefix_caching": True},
        "workload": {
            "kind": "synthetic", "num_requests": 50, "prompt_tokens": [137, 200, 64, 400],
            "output_tokens": [60, 1, 90],
            "arrival": {"process": "poisson", "rate": 60}, "patience_ms": [9000, 300, 8000, 900, 5000],
            "shared_prefix": {"groups": 4, "tokens": 120},
        },
    }  # fmt: skip
    path, summary = simulate(parse_config(raw, tmp_path, "test"), tmp_path / "run", plots=False)
    assert (
        min(summary[key] for key in ("preemptions", "prefix_hit_blocks", "evicted_blocks", "num_cancelled"))
        > 5
    )
    assert summary["prefix_hit_tokens"] * PLANES == 16 * summary["prefix_hit_blocks"]
    outcome = replay(path)
    assert outcome.difference is None, str(outcome)


def mooncake(
    folder: Path, num_groups: int, cache: dict[str, object], **workload: object
) -> dict[str, object]:
    """The summary of the first 2,000 requests of the trace under atomic, blocks of 512 tokens, `num_groups`
    in each plane."""
    raw = {
        "policy": "atomic", "device": "a100-seed",
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 8192, "prefill_chunk_size": 4096},
        "cache": {"num_blocks": PLANES * num_groups, "block_size": 512, "prefix_caching": True, **cache},
        "workload": {"kind": "trace", "path": str(TRACE), "limit": 2000, **workload},
    }  # fmt: skip
    return simulate(parse_config(raw, folder, "test"), folder / "run", plots=False)[1]


def rows_that_run(num_requests: int) -> list[tuple[int, list[int]]]:
    """(prompt tokens, hash ids) of the first rows that fit the model's context, straight from the file."""
    with open(TRACE) as file:
        rows = [json.loads(line) for line in islice(file, num_requests)]
    return [(row["input_length"], row["hash_ids"]) for row in rows if row["input_length"] + 1 <= 65536]


def test_what_a_request_finds_of_its_own_when_it_comes_back_is_no_hit() -> None:
    """Two prompts with nothing in common, one of which is computed again: 0 of 8 blocks, some found again."""
    limits = SchedulerSettings(max_num_seqs=2, prefill_chunk_size=16, max_num_batched_tokens=64)
    requests = [Request(at, at, 32, 40, 0, (at,), 32) for at in range(2)]
    cache = sharing(14, allocation="incremental", preemption="recompute", watermark=0.0)
    result = run(Atomic(), requests, limits, cache=cache)
    totals = result.engine.scheduler.residents.prefixes.totals
    assert result.records[1].preemptions > 0
    assert (totals.prompt_groups, totals.reused_groups, totals.reused_tokens) == (8, 0, 0)
    assert totals.resumed_groups == sum(
        item.num_reused_groups for batch in result.batches for item in batch.transfers.allocations
    )
    assert totals.resumed_groups > 0


@needs_trace
def test_the_hit_rate_of_a_recorded_trace_equals_a_count_over_its_hash_ids(tmp_path: Path) -> None:
    """One client, so that every prompt is complete before the next one comes; a pool that holds them all."""
    seen: set[tuple[int, ...]] = set()
    hits = blocks = 0
    for prompt_tokens, ids in rows_that_run(2000):
        whole = prompt_tokens // 512
        chains = [tuple(ids[: at + 1]) for at in range(whole)]
        reusable = chains[: (prompt_tokens - 1) // 512]
        hits += next((at for at, chain in enumerate(reusable) if chain not in seen), len(reusable))
        blocks += whole
        seen.update(chains)
    summary = mooncake(tmp_path, 100_000, {}, max_tokens=1, concurrency=1, arrival={"process": "burst"})
    assert (summary["num_finished"], summary["num_refused"]) == (1929, 71)
    assert (summary["prefix_hit_blocks"], summary["evicted_blocks"]) == (hits * PLANES, 0)
    assert summary["prefix_hit_rate"] == hits / blocks


@needs_trace
@pytest.mark.parametrize(
    ("part", "cache"),
    [
        (4, {}),
        (4, {"allocation": "incremental", "preemption": "recompute"}),
        (230, {"allocation": "incremental", "preemption": "recompute", "admit": "first_chunk"}),
        (230, {"allocation": "incremental", "preemption": "swap", "admit": "first_chunk"}),
    ],
)
def test_a_pool_of_a_part_of_the_working_set_loses_nothing(
    tmp_path: Path, part: int, cache: dict[str, object]
) -> None:
    """The prompts hold 30,178 blocks that differ; a quarter evicts; one in 230, 3 more than the longest,
    preempts some."""
    working_set = len({tuple(ids[: at + 1]) for _, ids in rows_that_run(2000) for at in range(len(ids))})
    assert working_set == 30_178
    summary = mooncake(tmp_path, working_set // part, cache, max_tokens=12)
    assert (summary["num_finished"], summary["num_refused"], summary["num_cancelled"]) == (1929, 71, 0)
    assert min(summary["evicted_blocks"], summary["prefix_hit_blocks"]) > 1000  # type: ignore[type-var]
    assert (summary["preemptions"] > 100) == (part == 230)  # type: ignore[operator]
    with open(TRACE) as file:
        asked = [json.loads(line)["output_length"] for line in islice(file, 2000)]
    with open(tmp_path / "run" / "requests.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "finished"]
    assert all(int(row["output_tokens"]) == min(12, asked[int(row["request_id"])]) for row in rows)
