"""The simulator's command line: mistakes are one line and status 2, equal seeds equal bytes, Ctrl-C an
interrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from policies.registry import POLICIES
from sim.cli import main

ROOT = Path(__file__).parent.parent
GOOD = """\
model: ouro-tiny
device: h200
policy: {name: wcpb}
scheduler: {max_num_seqs: 4, max_num_batched_tokens: 64, prefill_chunk_size: 16}
workload:
  {kind: synthetic, num_requests: 6, arrival: {process: poisson, rate: 900}, prompt_tokens: [37, 5, 60],
   output_tokens: 3}
seed: 7
"""
SUMMARY_KEYS = (
    "policy", "model", "device", "num_requests", "num_finished", "num_cancelled", "num_refused", "duration_s",
    "request_throughput", "prompt_token_throughput", "output_token_throughput", "ttft_ms", "itl_ms",
    "tpot_ms", "e2e_ms", "num_batches", "recurrent_invocations", "rows_per_recurrent_invocation",
    "gpu_busy_fraction", "limit_fraction", "peak_kv_blocks", "peak_hidden_rows", "select_us",
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def status_of(*arguments: object) -> int:
    """The exit status of `python -m sim` with these arguments."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


def environment(**changes: str) -> Mapping[str, str]:
    return {**os.environ, **changes}


MISTAKES = [
    (
        "policy.name=wcbp",
        f"policy.name: unknown policy 'wcbp', expected one of {', '.join(POLICIES)}; did you mean 'wcpb'?",
    ),
    (
        "policy.mix_decoed=true",
        "unknown key 'policy.mix_decoed', expected one of mix_decode, fuse_prelude; did you mean "
        "'mix_decode'?",
    ),
    ("policy=7", "policy: 7, expected a name or a mapping"),
    ("scheduler.prefill_chunk=8", "unknown key 'scheduler.prefill_chunk', "),
    ("sheduler={}", "unknown key 'sheduler', "),
    (
        "scheduler.prefill_chunk_size=65",
        "scheduler.prefill_chunk_size: 65 is larger than the batch budget max_num_batched_tokens, 64",
    ),
    ("scheduler.prefill_chunk_size=0", "scheduler.prefill_chunk_size: 0, expected at least 1"),
    ("scheduler.max_num_seqs=-1", "scheduler.max_num_seqs: -1, expected at least 1"),
    ("scheduler.max_num_seqs=2.5", "scheduler.max_num_seqs: 2.5, "),
    ("scheduler.max_num_batched_tokens=lots", "scheduler.max_num_batched_tokens: 'lots', "),
    ("scheduler.inflight=0", "scheduler.inflight: 0, expected at least 1"),
    ("scheduler.inflight=9", "scheduler.inflight: 9, expected at most 8"),
    ("scheduler.inflight=2.5", "scheduler.inflight: 2.5, "),
    ("scheduler.decode=refil", "scheduler.decode: 'refil', "),
    ("cache.block_size=0", "cache.block_size: 0, expected at least 1"),
    ("cache.num_blocks=3", "cache.num_blocks: 3 is less than one block in each of the 4 depth planes"),
    ("cache.layout=shared", "policy wcpb cannot run with cache.layout shared: "),
    (
        "cache.allocation=incremental",
        "cache.allocation: incremental needs cache.preemption recompute or swap",
    ),
    (
        "exit={mode: gate, threshold: 0.5}",
        "exit.loop_weights: None, expected 4 weights >= 0 of leaving after loop 1 to 4, ",
    ),
    (
        "exit={mode: gate, threshold: 0.5, loop_weights: [1, 0, 2]}",
        "exit.loop_weights: [1.0, 0.0, 2.0], expected 4 weights >= 0",
    ),
    ("exit={mode: gate, threshold: 1.5}", "exit.threshold: 1.5, expected at most 1"),
    (
        "exit={mode: trace, min_loops: 3, max_loops: 2}",
        "exit: min_loops 3 and max_loops 2, expected 1 <= min_loops <= max_loops <= 4",
    ),
    (
        "exit={mode: trace, max_loops: 5}",
        "exit: min_loops 1 and max_loops 5, expected 1 <= min_loops <= max_loops <= 4",
    ),
    (
        "exit.mode=trace",
        "exit.mode: trace needs the loops of every token, expected a workload with exit_loops",
    ),
    (
        "exit.max_loops=2",
        "exit.mode: fixed runs every token through all loops, expected no other key under exit",
    ),
    ("exit.mode=early", "exit.mode: 'early', "),
    ("workload.prompt_tokens=-4", "workload.prompt_tokens: -4, expected at least 1"),
    ("workload.output_tokens=0", "workload.output_tokens: 0, expected at least 1"),
    (
        "workload.prompt_tokens=[16, 0]",
        "workload.prompt_tokens.1: 0, expected at least 1",
    ),
    ("workload.num_requests=0", "workload.num_requests: 0, expected at least 1"),
    ("workload.arrival={process: poisson, rate: .nan}", "workload.arrival.rate: nan, expected"),
    (
        "workload.arrival={process: poisson, rate: -2}",
        "workload.arrival.rate: -2, expected above 0",
    ),
    ("workload.arrival={process: poison, rate: 2}", "workload.arrival"),
    ("workload={kind: preset, name: seed-4x8046}", "workload.name: unknown preset 'seed-4x8046', "),
    (
        "workload={kind: tracee}",
        "workload.kind: 'tracee', expected trace, synthetic, preset, prompts ",
    ),
    ("workload={kind: trace, path: nowhere.csv}", "nowhere.csv"),
    ("workload=null", "workload: expected a mapping with kind: trace, synthetic, preset, prompts or live"),
    ("model=ouro-1.5b", "model: unknown model 'ouro-1.5b', "),
    (
        "device=h20",
        "device: unknown device 'h20', expected one of h200, h200-2026-11-30, h200-analytic, a100-seed, "
        "roofline:<card>, transfer:<device>:<card>, MODEL.json; did you mean 'h200'?",
    ),
    ("device=roofline:h21", "device: unknown card 'h21', "),
    ("seed=-1", "seed: -1, expected at least 0"),
    ("seed=[", "--set seed=[: not valid YAML"),
    ("seed", "--set seed: expected KEY=VALUE, like scheduler.prefill_chunk_size=32"),
    ("=3", "--set =3: expected KEY=VALUE"),
]


@pytest.mark.parametrize(("override", "sentence"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_mistake_is_one_line_on_stderr_status_2_and_no_directory(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, sentence: str
) -> None:
    assert status_of("run", config, "--set", override, "--out", tmp_path / "run") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:5]) == ("", 1, "sim: ")
    assert sentence in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "t.csv"),
        ("", "t.csv"),
        (
            "arrival_s,prompt_tokens,output_tokens\n",
            "t.csv: has column names and no rows, expected at least one request",
        ),
        ("arrival_s,prompt_tokens,output_tokens\n0,8,2\n1,-8,2\n", "line 3"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,8,2\n", "line 2"),
        ("arrival_s,prompt_tokens,output_tokens\n0,8,two\n", "'two'"),
        ("a,b\n1,2\n", "unknown columns"),
    ],
    ids=["missing", "empty", "no-rows", "negative", "nan-arrival", "word", "columns"],
)
def test_a_trace_that_cannot_be_used_is_one_line_status_2_and_no_directory(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_text(content)
    assert (
        status_of("run", config, "--set", "workload={kind: trace, path: t.csv}", "--out", tmp_path / "run")
        == 2
    )
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("no.yaml", None, "no.yaml: no such file, expected a YAML configuration"),
        ("list.yaml", "- 1\n", "list.yaml: expected a mapping with keys like model, "),
        ("bad.yaml", "model: [\n", "bad.yaml: not valid YAML: "),
        ("empty.yaml", "", "empty.yaml: expected a mapping"),
        ("binary.yaml", "\x00\x01", "binary.yaml: "),
    ],
)
def test_a_config_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert status_of("run", tmp_path / name, "--out", tmp_path / "run") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and sentence in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("walk",),
        ("run",),
        ("run", "c.yaml", "--fast"),
        ("sweep", "c.yaml", "--jobs", "many"),
        ("replay",),
    ],
    ids=lambda arguments: "-".join(arguments) or "nothing",
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert status_of(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_an_output_directory_with_other_things_in_it_is_left_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    assert status_of("run", config, "--out", tmp_path / "mine") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_mistake_leaves_the_run_that_is_there_already_as_it_is(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert status_of("run", config, "--no-plots", "--out", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert status_of("run", config, "--no-plots", "--set", "cache.num_blocks=3", "--out", out) == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_run_leaves_the_files_and_the_summary_keys_of_the_contract(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert status_of("run", config, "--out", out) == 0
    assert {path.name for path in out.iterdir()} == {
        "config.yaml", "requests.csv", "batches.csv", "summary.json", "trace.json.gz", "plots",
    }  # fmt: skip
    assert list((out / "plots").glob("*.png"))
    summary = json.loads((out / "summary.json").read_text())
    assert [key for key in SUMMARY_KEYS if key not in summary] == []
    assert (summary["status"], summary["num_requests"], summary["num_finished"]) == ("complete", 6, 6)
    for key in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert list(summary[key]) == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert set(summary["select_us"]) == {"mean", "p99"}


def test_a_runs_own_config_runs_the_same_again(config: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert status_of("run", config, "--no-plots", "--out", first) == 0
    assert status_of("run", first / "config.yaml", "--no-plots", "--out", second) == 0
    for name in ("config.yaml", "batches.csv", "requests.csv"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_same_seed_gives_the_same_bytes_in_two_processes_whatever_the_hash_seed(
    config: Path, tmp_path: Path
) -> None:
    logs = []
    for hash_seed in ("0", "4242"):
        out = tmp_path / hash_seed
        command = [sys.executable, "-m", "sim", "run", str(config), "--no-plots", "--out", str(out)]
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment(PYTHONHASHSEED=hash_seed),
            check=True,
            capture_output=True,
            timeout=60,
        )
        logs.append([(out / name).read_bytes() for name in ("batches.csv", "requests.csv", "summary.json")])
    assert logs[0] == logs[1]


def test_another_seed_gives_other_arrivals(config: Path, tmp_path: Path) -> None:
    for seed in ("7", "8"):
        assert status_of("run", config, "--no-plots", "--set", f"seed={seed}", "--out", tmp_path / seed) == 0
    assert (tmp_path / "7" / "requests.csv").read_bytes() != (tmp_path / "8" / "requests.csv").read_bytes()


def test_ctrl_c_leaves_a_run_marked_interrupted_and_status_130(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "sim",
        "run",
        str(config),
        "--set",
        "workload.num_requests=1000000",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    batches = out / "batches.csv"
    deadline = time.monotonic() + 60
    while not (batches.is_file() and batches.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["num_requests"] < 1_000_000
    assert status_of("replay", out) == 0


def test_the_package_runs_as_a_program_and_prints_its_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sim", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("run", "sweep", "replay", "bench"))


def test_a_run_says_how_far_it_is(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sim.progress.INTERVAL_S", 0.0)
    assert status_of("run", config, "--no-plots", "--out", tmp_path / "run") == 0
    number = json.loads((tmp_path / "run" / "summary.json").read_text())["num_requests"]
    assert f"{number} of {number} requests after " in capsys.readouterr().err


def test_a_blank_at_the_end_of_a_batch_is_no_range() -> None:
    assert status_of("explain", "h200", "--batch", "0:RECURRENT:0:100:1 ") == 0
