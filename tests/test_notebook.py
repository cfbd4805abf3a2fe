"""A notebook's way in."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.core.errors import InputError
from sim import simulate, sweep

CONFIG: dict[str, Any] = {
    "model": "ouro-tiny", "policy": "wcpb", "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    "workload": {"kind": "synthetic", "num_requests": 3, "prompt_tokens": [70, 5], "output_tokens": [4, 2]},
}  # fmt: skip


def test_a_dict_and_a_file_are_the_same_simulation_and_its_tables_have_units(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    one, other = simulate(CONFIG), simulate(tmp_path / "run.yaml", out=tmp_path / "run")
    assert one.summary["num_finished"] == 3 and one.summary["ttft_ms"] == other.summary["ttft_ms"]
    requests, batches = one.requests(), one.batches()
    assert list(requests["prompt_tokens"]) == [70, 5, 70]
    assert (requests["first_token_ns"] > requests["arrival_ns"]).all()
    assert len(batches) == one.summary["num_batches"]
    assert (batches["finished_ns"] >= batches["started_ns"]).all()
    assert batches.equals(other.batches()) and other.path == tmp_path / "run"
    place = one.path
    assert place.is_dir()
    del one
    assert not place.exists(), "what nobody asked to keep is gone"
    assert simulate(CONFIG, set=["policy=atomic"]).summary["policy"] == "atomic"


def test_a_sweep_is_a_table_and_its_runs(tmp_path: Path) -> None:
    grid = {"base": CONFIG, "grid": {"policy.name": ["atomic", "split"]}}
    found = sweep(grid, jobs=1, out=tmp_path)
    table = found.summaries()
    assert list(table["axis.policy.name"]) == ["atomic", "split"] == [run.summary["policy"] for run in found]
    assert (table["ttft_ms.p99"] > 0).all() and len(found) == 2
    times = {run.path: (run.path / "summary.json").stat().st_mtime_ns for run in found}
    again = sweep(grid, jobs=1, out=tmp_path)
    assert {run.path: (run.path / "summary.json").stat().st_mtime_ns for run in again} == times


def test_batches_of_a_fleet_are_those_of_its_replicas() -> None:
    found = simulate(CONFIG, set=["fleet.replicas=2"])
    batches = found.batches()
    assert len(batches) == found.summary["num_batches"] and set(batches["replica"]) == {0, 1}
    assert list(found.requests()["request_id"]) == [0, 1, 2]


def test_a_wrong_config_is_an_error_of_one_sentence() -> None:
    for wrong in (5, None, ["policy=wcpb"]):
        with pytest.raises(InputError, match="expected a mapping or the path of a YAML file"):
            simulate(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="expected a mapping or the path of a YAML file"):
            sweep(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="config: unknown key 'polcy'"):
        simulate({**CONFIG, "polcy": "wcpb"})
    with pytest.raises(InputError, match="unknown policy 'x'"):
        sweep({"base": CONFIG, "grid": {"policy.name": ["x"]}})
