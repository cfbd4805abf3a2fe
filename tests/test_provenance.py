"""A cell is finished only for what it follows from: code anywhere in our rooms, a trace, a model's files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from policies.config.provenance import ROOT, result_sha256, source_sha256
from policies.config.runconfig import RunConfig, parse_config
from policies.registry import POLICIES
from policies.split import Split

ROOMS = ("policies", "workloads", "results", "sim")
SWEEP = """\
base:
  model: ouro-tiny
  scheduler: {max_num_seqs: 2, max_num_batched_tokens: 32, prefill_chunk_size: 8}
  workload: {kind: synthetic, num_requests: 3, prompt_tokens: [20, 9], output_tokens: 2}
grid: {policy.name: [atomic, split]}
"""
FINISHED = "2 of 2 cells are finished already"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Our source in a place where it may be edited."""
    for room in ROOMS:
        shutil.copytree(
            ROOT / room,
            tmp_path / room,
            ignore=shutil.ignore_patterns("__pycache__", "runs", "reference", "*.pyc"),
        )
    return tmp_path


def sweep(copy: Path) -> str:
    """What the copy's own `sim sweep` says."""
    (copy / "sweep.yaml").write_text(SWEEP)
    found = subprocess.run(
        [sys.executable, "-m", "sim", "sweep", "sweep.yaml", "--jobs", "1", "--out", "out"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stderr


def test_a_sweep_runs_its_cells_again_after_an_edit_beside_the_policy_class(copy: Path) -> None:
    assert FINISHED not in sweep(copy)
    assert FINISHED in sweep(copy)
    with open(copy / "policies" / "split.py", "a") as file:
        file.write("\nPATIENCE = 4\n")
    assert "finished already" not in sweep(copy)
    assert FINISHED in sweep(copy)


@pytest.mark.parametrize(
    "place",
    [
        "policies/core/engine/scheduler.py",
        "policies/building_blocks.py",
        "policies/costs/devices.yaml",
        "workloads/synthetic.py",
        "workloads/presets/chat.yaml",
        "results/metrics.py",
        "sim/backend.py",
    ],
)
def test_every_source_file_counts(copy: Path, place: str) -> None:
    before = source_sha256.__wrapped__(copy, ROOMS)
    assert before == source_sha256(ROOT, ROOMS)
    with open(copy / place, "a") as file:
        file.write("# edited\n")
    assert source_sha256.__wrapped__(copy, ROOMS) != before


@pytest.mark.parametrize("place", ["sim/configs/sweep.yaml", "results/plots/style.py"])
def test_what_no_result_follows_from_does_not_count(copy: Path, place: str) -> None:
    with open(copy / place, "a") as file:
        file.write("# edited\n")
    assert source_sha256.__wrapped__(copy, ROOMS) == source_sha256(ROOT, ROOMS)


def test_the_world_its_facts_and_the_models_files_count(tmp_path: Path) -> None:
    config = {"policy": "atomic", "workload": {"kind": "synthetic", "num_requests": 1}, "model": "checkpoint"}
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    def parsed() -> RunConfig:
        return parse_config(config, tmp_path, "test.yaml")

    shape = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "total_ut_steps": 4,
        "max_position_embeddings": 4096, "model_type": "ouro",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    found = [
        result_sha256(parsed(), world, *facts)
        for world, facts in (("sim", ()), ("executor", ()), ("sim", (1,)))
    ]
    (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 3}))
    found.append(result_sha256(parsed(), "sim"))
    (folder / "model.safetensors").write_bytes(b"weights")
    found.append(result_sha256(parsed(), "sim"))
    assert len({*found}) == 5


def test_a_policy_that_is_written_elsewhere_counts_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere(Split):
        name = "elsewhere"

    monkeypatch.setitem(POLICIES, "elsewhere", Elsewhere)
    path = tmp_path / "elsewhere.py"
    monkeypatch.setattr("inspect.getfile", lambda kind: str(path))
    config = parse_config({"policy": "elsewhere", "workload": {"kind": "synthetic"}}, tmp_path, "test.yaml")
    found = set()
    for text in ("LIMIT = 1", "LIMIT = 2"):
        path.write_text(text)
        found.add(result_sha256(config, "sim"))
    assert len(found) == 2
