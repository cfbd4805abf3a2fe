"""Two engines of one run on a CPU: in two threads, in two processes. Tokens are those of one engine, bit for
bit, and both logs are decided again alike."""

import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from run_rules import check_run

from executor.apart import wire
from executor.apart.run import run_apart
from executor.apart.wire import Pipe
from executor.cli import main
from executor.errors import RunError
from executor.run import TOKENS, execute
from executor.session import Session
from policies.config.overrides import apply_overrides
from policies.config.runconfig import RunConfig, parse_config
from policies.core.seam.request import Status
from results.find import replicas_of
from results.load import load_run
from results.requestlog import read_requests
from sim.replay import replay

BASE: dict[str, Any] = {
    "model": "ouro-tiny",
    "policy": "wcpb",
    "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 32, "prefill_chunk_size": 16, "inflight": 2},
    "cache": {"num_blocks": 240},
    "fleet": {"prefill": 1, "decode": 1},
    "workload": {
        "kind": "synthetic", "num_requests": 6, "arrival": {"process": "poisson", "rate": 300},
        "prompt_tokens": [37, 5, 60], "output_tokens": [4, 7],
    },
}  # fmt: skip
WORLDS = {
    "wcpb": [],
    "atomic, incremental": [
        "policy=atomic", "cache={num_blocks: 32, allocation: incremental, preemption: recompute}",
    ],
    "mixed, prefixes": [
        "policy=mixed", "cache.prefix_caching=true", "workload.shared_prefix={groups: 1, tokens: 32}",
    ],
    "shared": [
        "policy=atomic", "cache={layout: shared, num_blocks: 60}", "scheduler.prefill_chunk_size=1",
        "workload.prompt_tokens=[12, 5]",
    ],
    "gate": ["policy=split", "exit={mode: gate, threshold: 0.4}", "scheduler.prefill_chunk_size=9"],
}  # fmt: skip


def config_of(*overrides: str) -> RunConfig:
    return parse_config(apply_overrides(BASE, overrides), Path("."), "test")


def csv_of(text: bytes) -> dict[int, list[str]]:
    """Token ids by request."""
    lines = (line.split(",") for line in text.decode().splitlines()[1:])
    return {int(request_id): ids.split() for request_id, ids in lines}


def alone(tmp_path: Path, *overrides: str) -> bytes:
    """The tokens of one engine."""
    session = Session([config_of(*overrides, "fleet=null")], "cpu")
    path, _, _ = execute(session, session.runs[0], tmp_path / "one", plots=False)
    return (path / TOKENS).read_bytes()


@pytest.mark.parametrize("world", WORLDS)
def test_two_pools_in_one_process_make_the_tokens_of_one_engine(tmp_path: Path, world: str) -> None:
    overrides = WORLDS[world]
    path, summary = run_apart(config_of(*overrides), "cpu", tmp_path / "two", processes=False)
    assert (path / "replicas" / "1" / TOKENS).read_bytes() == alone(tmp_path, *overrides)
    assert summary["num_finished"] == 6 and summary["status"] == "complete"
    first, second = replicas_of(path)
    assert load_run(first).summary["num_sent"] == load_run(second).summary["num_finished"] == 6
    for replica in (first, second):
        outcome = replay(replica)
        assert outcome.difference is None, str(outcome)
        check_run(replica)


def test_engines_in_processes_make_the_tokens_of_one_and_a_lane_that_breaks_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that compute prompts and one that decodes. The third chunk that the first one sends is lost, and
    with it its lane."""
    chunks: list[int] = []
    send = wire.dist.send

    def sending(tensor: torch.Tensor, *rest: Any) -> None:
        if tensor.nbytes > 4096:
            chunks.append(tensor.nbytes)
            if len(chunks) == 3:
                raise RuntimeError("the cable is cut")
        send(tensor, *rest)

    monkeypatch.setattr(wire.dist, "send", sending)
    config = config_of("fleet.prefill=2", "workload.output_tokens=[3, 5]")
    path, summary = run_apart(config, "cpu", tmp_path / "all")
    assert summary["fleet"]["processes"] == 3 and summary["num_finished"] == 6
    tokens = (path / "replicas" / "2" / TOKENS).read_bytes()
    assert tokens == alone(tmp_path, "workload.output_tokens=[3, 5]")
    replicas = replicas_of(path)
    for replica in replicas:
        assert replay(replica).difference is None
        check_run(replica)
    first, second, third = (load_run(replica).summary for replica in replicas)
    assert len(chunks) == 3 and first.get("num_sent", 0) < 3 and second["num_sent"] == 3
    assert ",lost," in (replicas[2] / "handovers.csv").read_text() and third["num_finished"] == 6
    records = [item.record for item in read_requests(path / "requests.csv")]
    for record in records:
        assert record.first_scheduled_ns is not None and record.first_token_ns is not None
        assert record.request.arrival_ns < record.first_scheduled_ns < record.first_token_ns


NUM_WORLDS = int(os.environ.get("RANDOM_FLEETS_ON_CPU", "2"))


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_random_fleets_with_links_that_break_and_clients_that_leave(tmp_path: Path, seed: int) -> None:
    """Tokens of whoever stays are those of one engine, whatever was lost and computed again."""
    chance = Random(seed)
    prefill, decode = (2, 2) if seed == 0 else (chance.randint(1, 3), chance.randint(1, 3))
    per = chance.choice(["sender", "pair", "fleet"])
    most = {"sender": prefill, "pair": prefill * decode, "fleet": 1}[per]
    faults = []
    for _ in range(chance.randint(1, 4)):
        begin = chance.uniform(0, 0.2)
        end = begin + chance.choice([0.01, 0.1])
        faults.append({"from_s": begin, "until_s": end, "link": chance.randrange(most)})
    workload = [
        "workload.num_requests=8", "workload.output_tokens=[3, 6]",
        "workload.arrival={process: poisson, rate: 90}",
        f"policy={chance.choice(['wcpb', 'atomic', 'split', 'mixed'])}",
        f"scheduler.prefill_chunk_size={chance.choice([5, 16, 32])}",
        f"scheduler.inflight={chance.randint(1, 3)}",
        "cache={num_blocks: 60, allocation: incremental, preemption: recompute}"
        if chance.random() < 0.5 else "cache.num_blocks=160",
    ]  # fmt: skip
    tokens = csv_of(alone(tmp_path, *workload))
    leaves = ["workload.patience_ms={distribution: uniform, min: 1, max: 400}"] * (chance.random() < 0.5)
    link = {"per": per, "faults": faults, "gb_per_s": 10}
    fleet = {"prefill": prefill, "decode": decode, "router": chance.choice(["round_robin", "least_kv"])}
    config = config_of(*workload, *leaves, f"fleet={json.dumps(fleet | {'link': link})}")
    path, summary = run_apart(config, "cpu", tmp_path / "all", processes=False)
    assert summary["num_finished"] + summary["num_cancelled"] == 8 and (
        leaves or not summary["num_cancelled"]
    )
    assert any("fleet.link.gb_per_s has no effect" in note for note in summary["notes"])
    for replica in replicas_of(path):
        outcome = replay(replica)
        assert outcome.difference is None, str(outcome)
        check_run(replica)
        for request_id, ids in csv_of((replica / TOKENS).read_bytes()).items():
            assert tokens[request_id][: len(ids)] == ids
    by_id = {item.record.request.request_id: item.record for item in read_requests(path / "requests.csv")}
    for request_id, ids in tokens.items():
        if by_id[request_id].status is Status.FINISHED:
            assert by_id[request_id].output_tokens == len(ids)


def test_clients_hang_up_in_every_phase_and_both_logs_are_decided_again_alike(tmp_path: Path) -> None:
    overrides = (
        "workload.num_requests=14", "workload.patience_ms={distribution: uniform, min: 1, max: 260}",
        "workload.output_tokens=20",
    )  # fmt: skip
    path, summary = run_apart(config_of(*overrides), "cpu", tmp_path / "two", processes=False)
    assert summary["num_cancelled"] and summary["num_requests"] == 14
    for replica in replicas_of(path):
        outcome = replay(replica)
        assert outcome.difference is None, str(outcome)
        check_run(replica)
        statuses = {item.record.status for item in read_requests(replica / "requests.csv")}
        assert statuses <= {Status.CANCELLED, Status.SENT, Status.FINISHED}


def test_when_one_process_dies_the_other_ends_its_run_as_failed_within_seconds(tmp_path: Path) -> None:
    """The child is killed when both engines have begun, which takes them a while to get through."""
    killed: list[float] = []
    before = set(multiprocessing.active_children())

    def kill() -> None:
        log = tmp_path / "two" / "replicas" / "1" / "handovers.csv"
        while not log.is_file():
            time.sleep(0.05)
        time.sleep(0.5)
        (child,) = set(multiprocessing.active_children()) - before
        child.kill()
        killed.append(time.monotonic())

    config = config_of("workload.num_requests=60", "workload.output_tokens=200", "cache.num_blocks=400")
    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RunError, match="the other engine's process has ended"):
        run_apart(config, "cpu", tmp_path / "two")
    thread.join()
    assert time.monotonic() - killed[0] < 15
    assert load_run(tmp_path / "two" / "replicas" / "0").summary["status"] == "failed"
    assert not (tmp_path / "two" / "summary.json").exists()


def test_what_one_end_says_the_other_hears_in_order_and_failures_are_raised() -> None:
    here, there = Pipe.pair()
    here.send("a", 1)
    here.send("b")
    assert [words for words, _ in there.poll()] == [("a", 1), ("b",)]
    assert [*there.poll()] == []
    here.send("failed", "out of luck")
    with pytest.raises(RunError, match="the other engine failed: out of luck"):
        [*there.poll()]
    there.send("interrupted")
    with pytest.raises(KeyboardInterrupt):
        [*here.poll()]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("fleet={replicas: 2}", "a simulation runs others"),
        (
            "fleet.link={faults: [{from_s: 0, until_s: 1, speed: 0.5}]}",
            "fleet.link.faults.0.speed: 0.5, a device's link is as fast as it is",
        ),
        ("fleet={prefill: 1, decode: 1, router: rr}", "unknown router 'rr'"),
    ],
)
def test_what_an_executor_does_not_run_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    path = Path(__file__).parent.parent / "executor" / "configs" / "pd.yaml"
    arguments = ["run", str(path), "--device", "cpu", "--out", str(tmp_path / "out"), "--set", override]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and len(error) < 400
    assert not (tmp_path / "out").exists()
