"""Prompts here, the rest there: random worlds, links and faults. Every request is told the same number of
tokens as by one engine, nothing is left on either side, and each engine's log is decided again alike."""

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from log_checker import Broken
from run_rules import check_run, exact_times

from policies.config.overrides import apply_overrides
from policies.config.runconfig import RunConfig, parse_config
from policies.core.engine.runlog import RequestRecord
from policies.core.seam.request import Status
from policies.registry import POLICIES
from results.batchlog import read_batches
from results.find import replicas_of
from results.load import load_run
from results.requestlog import read_requests
from sim.cli import main
from sim.fleet import FleetSimulation
from sim.replay import replay
from sim.run import simulate

BASE: dict[str, Any] = {
    "model": "ouro-tiny",
    "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 64, "prefill_chunk_size": 16},
    "workload": {
        "kind": "synthetic", "num_requests": 24, "arrival": {"process": "poisson", "rate": 900},
        "prompt_tokens": [70, 5, 200, 33], "output_tokens": [4, 30, 12],
    },
    "fleet": {"prefill": 1, "decode": 1},
}  # fmt: skip
SLO = "policy={name: slo, ttft_ms: 20, itl_ms: 0.55, model: h200}"
ARRIVALS = ["{process: poisson, rate: 900}", "{process: closed, concurrency: 7}", "{process: burst}"]
ENDS = {Status.FINISHED, Status.CANCELLED, Status.REFUSED}


def config_of(*overrides: str) -> RunConfig:
    return parse_config(apply_overrides(BASE, overrides), Path("."), "test")


def drawn(seed: int) -> RunConfig:
    """A fleet of one to three engines on either side, a link that may fail, a pool that may be too small."""
    chance = Random(seed)
    prefill, decode = chance.randint(1, 3), chance.randint(1, 3)
    per = chance.choice(["sender", "pair", "fleet"])
    most = {"sender": prefill, "pair": prefill * decode, "fleet": 1}[per]
    faults = []
    for _ in range(chance.choice([0, 0, 1, 3, 8])):
        begin = chance.uniform(0, 0.03)
        length, speed, link = chance.uniform(1e-6, 0.01), chance.choice([0, 0, 0.3]), chance.randrange(most)
        faults.append({"from_s": begin, "until_s": begin + length, "speed": speed, "link": link})
    link = {
        "gb_per_s": chance.choice([0.05, 1, 50, 1e5]), "latency_us": chance.choice([0, 0, 20, 900]),
        "per": per, "faults": faults,
    }  # fmt: skip
    router = chance.choice(["round_robin", "least_loaded", "least_kv", "prefix_affinity", "random"])
    policy = chance.choice([*(f"policy={name}" for name in POLICIES if name != "slo"), SLO])
    shared = chance.random() < 0.1
    cache = {"num_blocks": chance.choice([60, 90, 400]) // (4 if shared else 1)}
    if shared:
        policy, cache["layout"] = "policy=atomic", "shared"
    elif chance.random() < 0.5:
        cache |= {"allocation": "incremental", "preemption": "recompute"}
        cache["num_blocks"] = chance.choice([60, 72, 400])
    if not shared and chance.random() < 0.3:
        cache["prefix_caching"] = True
    overrides = [
        f"seed={seed}",
        policy,
        f"fleet={json.dumps({'prefill': prefill, 'decode': decode, 'link': link, 'router': router})}",
        f"cache={json.dumps(cache)}",
        f"scheduler.inflight={chance.randint(1, 4)}",
        f"scheduler.prefill_chunk_size={1 if shared else chance.choice([5, 16, 64])}",
        f"scheduler.admission={chance.choice(['fcfs', 'priority'])}",
        f"workload.arrival={chance.choice(ARRIVALS)}",
    ]
    if chance.random() < 0.5:
        overrides.append(
            f"workload.patience_ms={{distribution: uniform, min: 1, max: {chance.choice([3, 40])}}}"
        )
    if cache.get("prefix_caching"):
        overrides.append("workload.shared_prefix={groups: 2, tokens: 33}")
    return config_of(*overrides)


NUM_WORLDS = int(os.environ.get("RANDOM_FLEETS", "24"))


@pytest.mark.parametrize("block", range(4))
def test_a_random_fleet_loses_nothing_leaves_nothing_and_is_decided_again_alike(
    tmp_path: Path, block: int
) -> None:
    for seed in range(block, NUM_WORLDS, 4):
        config = drawn(seed)
        path, summary = simulate(config, tmp_path / str(seed), plots=False)
        records = [item.record for item in read_requests(path / "requests.csv")]
        assert sorted(item.request.request_id for item in records) == [*range(24)], seed
        assert {item.status for item in records} <= ENDS
        oracle = FleetSimulation.prepare(config).workload.oracle
        for item in records:
            if item.status is Status.FINISHED:
                assert item.output_tokens == oracle.output_tokens(item.request.request_id)
                assert item.token_ns[0] > item.first_scheduled_ns >= item.request.arrival_ns
        rules = exact_times(config.parts()[0])
        for replica in replicas_of(path):
            outcome = replay(replica)
            assert outcome.difference is None, (seed, outcome.difference)
            check_run(replica, **rules)
        has_faults = bool(config.resolved["fleet"]["link"]["faults"])
        assert has_faults or not any(link["num_lost"] for link in summary["fleet"]["links"])


@pytest.mark.parametrize(
    ("at", "number", "old", "new"),
    [
        (0, 7, ",sent,0,", ",sent,1,"),
        (0, 7, ",sent,0,", ",received,0,"),
        (1, 2, ",received,0,64", ",received,0,71"),
        (1, 2, ",received,0,70", ",received,0,64"),
        (1, 7, ",received,0,70", ",sent,0,"),
        (1, 2, ",received,0,70", ",lost,0,"),
        (1, 2, ",received,1,5", ",received,1,4"),
    ],
)
def test_false_news_of_a_transfer_is_found_by_the_checker_that_knows_no_code_of_ours(
    tmp_path: Path, at: int, number: int, old: str, new: str
) -> None:
    config = config_of("workload.num_requests=3")
    replica = replicas_of(simulate(config, tmp_path / "fleet", plots=False)[0])[at]
    rules = exact_times(config.parts()[at])
    assert check_run(replica, **rules).num_imported == (3 if at else 0)
    text = (replica / "handovers.csv").read_text()
    assert old in text
    with pytest.raises(Broken) as caught:
        check_run(replica, text.replace(old, new), **rules)
    assert caught.value.number == number


def drained(config: RunConfig) -> tuple[FleetSimulation, list[list[RequestRecord]]]:
    """A fleet that has run to its end with nothing left on any side, and who ended where."""
    fleet = FleetSimulation.prepare(config)
    ended: list[list[RequestRecord]] = [[] for _ in fleet.parts]
    engines = fleet.engines([io.StringIO() for _ in fleet.parts], [item.append for item in ended])
    fleet.run(engines)
    for engine in engines:
        engine.scheduler.check_drained()
    return fleet, ended


def statuses(records: Sequence[RequestRecord]) -> list[Status]:
    return [record.status for record in sorted(records, key=lambda record: record.request.request_id)]


@pytest.mark.parametrize("policy", [*(f"policy={name}" for name in POLICIES if name != "slo"), SLO])
def test_one_side_computes_prompts_and_the_other_no_prompt_at_all(tmp_path: Path, policy: str) -> None:
    """Also `mixed` and `slo`, which have no prompts to place where tokens are decoded: they decode."""
    path, _ = simulate(config_of(policy), tmp_path / "fleet", plots=False)
    first, second = (load_run(replica).summary for replica in replicas_of(path))
    assert first["num_sent"] == second["num_finished"] == 24
    assert set(first["stages"]) <= {"PREFILL", "PREFILLING_PRELUDE", "PREFILLING_RECURRENT"}
    assert set(second["stages"]) == {"PRELUDE", "RECURRENT", "CODA"}


def test_a_prompt_whose_link_breaks_is_computed_where_it_is_decoded_from_what_has_come(
    tmp_path: Path,
) -> None:
    fault = "{from_s: 0.0015, until_s: 100, link: 0}"
    config = config_of(
        "workload.num_requests=1", "workload.prompt_tokens=200",
        f"fleet.link={{gb_per_s: 0.5, latency_us: 1, faults: [{fault}]}}",
    )  # fmt: skip
    path, summary = simulate(config, tmp_path / "fleet", plots=False)
    (link,) = summary["fleet"]["links"]
    assert (summary["num_finished"], link["num_lost"], summary["fleet"]["num_transferred"]) == (1, 1, 0)
    sender, receiver = replicas_of(path)
    news = (receiver / "handovers.csv").read_text().split()[1:]
    assert len(news) == link["num_chunks"] + 1 > 2 and ",lost," in news[-1]
    imported = max(int(line.split(",")[3]) for line in news[:-1])
    prompts = [
        tuple(map(int, item.split(":")[3:5]))
        for batch in read_batches(receiver / "batches.csv")
        for item in batch.fields["ranges"].split()
        if ":PREFILLING_RECURRENT:0:" in item
    ]
    assert 0 < imported < 200 and min(start for start, _ in prompts) == imported
    assert max(start + count for start, count in prompts) == 200
    assert load_run(sender).summary["num_cancelled"] == 1


def test_where_the_pool_that_decodes_is_full_prompts_wait_and_the_summary_says_how_long(
    tmp_path: Path,
) -> None:
    config = config_of(
        "workload.arrival={process: burst}", "workload.prompt_tokens=100", "workload.output_tokens=60",
        "cache.num_blocks=88",
    )  # fmt: skip
    summary = simulate(config, tmp_path / "fleet", plots=False)[1]
    waited = summary["fleet"]["waited_for_room_ms"]
    assert summary["num_finished"] == 24 and waited["p50"] > 10 and waited["max"] > waited["p50"]
    assert summary["fleet"]["by_replica"][0]["peak_kv_blocks"] <= 2 * 28


def test_a_sweep_over_links_has_a_picture_of_what_they_were_worth(tmp_path: Path) -> None:
    path, grid = (
        tmp_path / "sweep.yaml",
        {"policy.name": ["atomic", "wcpb"], "fleet.link.gb_per_s": [0.2, 20]},
    )
    path.write_text(json.dumps({"base": BASE, "grid": grid}))
    arguments = ["sweep", str(path), "--jobs", "1", "--log", "none", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert (tmp_path / "out" / "plots" / "transfer.png").stat().st_size > 10_000
    header = (tmp_path / "out" / "sweep.csv").read_text().split("\n")[0]
    assert "fleet.hidden_share" in header and "fleet.links" not in header


def test_a_slow_link_is_felt_and_a_fast_one_hides_behind_the_prompt(tmp_path: Path) -> None:
    found = {}
    for gb_per_s in (0.2, 200):
        config = config_of(
            "workload.arrival={process: constant, rate: 20}", f"fleet.link.gb_per_s={gb_per_s}",
            "workload.prompt_tokens=200",
        )  # fmt: skip
        found[gb_per_s] = simulate(config, tmp_path / str(gb_per_s), plots=False)[1]
    assert found[0.2]["fleet"]["exposed_ms"]["p50"] > 20 * found[200]["fleet"]["exposed_ms"]["p50"]
    assert found[0.2]["ttft_ms"]["p50"] > 2 * found[200]["ttft_ms"]["p50"]


def test_the_time_on_a_link_is_bytes_over_bandwidth_and_a_latency() -> None:
    config = config_of(
        "workload.num_requests=1", "workload.prompt_tokens=16", "fleet.link={gb_per_s: 2, latency_us: 7}"
    )
    fleet, (first, second) = drained(config)
    assert fleet.transfers is not None
    model = fleet.parts[0].model
    num_bytes = 16 * model.num_loops * model.kv_bytes_per_token_and_depth + model.hidden_bytes_per_row
    (journey,) = fleet.transfers.journeys.values()
    assert journey.wire_ns == round(num_bytes / 2) + 7000
    assert journey.arrived_ns - journey.ready_ns == journey.wire_ns + 1
    assert statuses(first) == [Status.SENT] and statuses(second) == [Status.FINISHED]


@pytest.mark.parametrize("patience_ms", [1, 2, 4, 9])
def test_a_client_that_hangs_up_in_any_phase_frees_both_sides(patience_ms: int) -> None:
    _, (first, second) = drained(
        config_of(
            f"workload.patience_ms={patience_ms}", "fleet.link={gb_per_s: 0.3, latency_us: 500}",
            "workload.output_tokens=40",
        )
    )  # fmt: skip
    assert Status.CANCELLED in statuses(second) and len(second) == 24
    assert set(statuses(first)) <= {Status.CANCELLED, Status.SENT}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("fleet={prefill: 1}", "prefill 1, expected replicas, or prefill and decode"),
        ("fleet={prefill: 1, decode: 1, replicas: 2}", "expected replicas, or prefill and decode"),
        ("fleet={prefill: 1, decode: 0}", "fleet.decode: 0, expected at least 1"),
        ("fleet={replicas: 2, link: {gb_per_s: 3}}", "fleet.link: has no effect without"),
        ("fleet.link.gb_per_s=0", "fleet.link.gb_per_s: 0"),
        ("fleet.link.per=hop", "expected 'sender', 'pair' or 'fleet'"),
        ("fleet.link.faults=[{from_s: 1, until_s: 2, link: 1}]", "there are 1 links"),
        ("fleet.link.faults=[{from_s: 2, until_s: 1}]", "expected above from_s"),
        ("cache={allocation: incremental, preemption: swap}", "swap cannot run with fleet.decode"),
        (
            "cache={allocation: incremental, preemption: recompute, admit: first_chunk}",
            "first_chunk cannot run",
        ),
        ("fleet.devices=[h200]", "1 of them for 2 replicas"),
        ("speculation={mode: loops}", "speculation: cannot run with fleet.decode"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(BASE))
    assert main(["run", str(path), "--set", override, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and len(error) < 400


def test_one_side_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = simulate(config_of("workload.num_requests=2"), tmp_path / "fleet", plots=False)
    assert main(["run", str(replicas_of(path)[1] / "config.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "role: decode is one side of a fleet" in capsys.readouterr().err
