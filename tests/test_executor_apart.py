"""Two engines of one run on a CPU: in two threads, in two processes. Tokens are those of one engine, bit for
bit, and both logs are decided again alike."""

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from run_rules import check_run

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


def test_two_processes_make_the_tokens_of_one_engine(
    tmp_path: Path,
) -> None:
    path, summary = run_apart(config_of(), "cpu", tmp_path / "two")
    assert summary["fleet"]["processes"] == 2
    assert (path / "replicas" / "1" / TOKENS).read_bytes() == alone(tmp_path)
    for replica in replicas_of(path):
        assert replay(replica).difference is None
        check_run(replica)
    records = [item.record for item in read_requests(path / "requests.csv")]
    for record in records:
        assert record.first_scheduled_ns is not None and record.first_token_ns is not None
        assert record.request.arrival_ns < record.first_scheduled_ns < record.first_token_ns


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
        (
            "fleet={prefill: 2, decode: 1}",
            "an executor runs one engine, or one for prompts and one that decodes",
        ),
        ("fleet={replicas: 2}", "a simulation runs others"),
        ("fleet.link={faults: [{from_s: 0, until_s: 1}]}", "a simulation's links fail"),
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
