"""Both worlds held against each other on a CPU: repeats of real runs, their replay, their prediction, their
pack."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the executor needs torch")

from executor_runs import config_of

from executor.cli import main as executor
from executor.sweep import run_grid
from policies.config.grid import load_grid
from results.cli import main as results
from sim.cli import main as sim

ROOT = Path(__file__).parent.parent
ANY = ("--p50", "1e9", "--p99", "1e9", "--throughput", "1e9", "--rank-gap", "1e9", "--no-plots")


def test_repeats_are_whole_runs_of_the_grid_one_after_another_and_are_resumed(tmp_path: Path) -> None:
    grid = [({"policy": policy}, config_of(f"policy={policy}")) for policy in ("atomic", "wcpb")]
    cells = run_grid(grid, "cpu", tmp_path, repeats=3)
    assert [summary["policy"] for _, _, summary in cells] == ["atomic", "wcpb"] * 3
    names = [place.name for _, place, _ in cells]
    assert names[2:] == [f"{names[0]}-r2", f"{names[1]}-r2", f"{names[0]}-r3", f"{names[1]}-r3"]
    assert len({summary["config_sha256"] for _, _, summary in cells}) == 2
    assert len({summary["output_token_sha256"] for _, _, summary in cells}) == 1
    times = [(place / "summary.json").stat().st_mtime_ns for _, place, _ in cells]
    (cells[3][1] / "summary.json").unlink()
    again = run_grid(grid, "cpu", tmp_path, repeats=3)
    assert [
        (place / "summary.json").stat().st_mtime_ns == time
        for (_, place, _), time in zip(again, times, strict=True)
    ] == [
        True, True, True, False, True, True,
    ]  # fmt: skip


def test_measured_runs_are_predicted_compared_and_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = (
        "base: {model: ouro-tiny, scheduler: {max_num_seqs: 3, max_num_batched_tokens: 64, "
        "prefill_chunk_size: 16},\n"
        "  cache: {num_blocks: 200}, workload: {kind: synthetic,\n"
        "  num_requests: 5, prompt_tokens: [37, 5, 60], output_tokens: [4, 1, 3]}}\n"
    )
    (tmp_path / "a.yaml").write_text(f"{base}grid: {{policy.name: [atomic, wcpb]}}\n")
    (tmp_path / "b.yaml").write_text(
        f"{base}grid: {{policy.name: [split], scheduler.prefill_chunk_size: [8]}}\n"
    )
    gpu, simulated, out = tmp_path / "gpu", tmp_path / "sim", tmp_path / "out"
    sweeps = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    assert (
        executor(["sweep", *sweeps, "--device", "cpu", "--repeats", "3", "--no-plots", "--out", str(gpu)])
        == 0
    )
    assert executor(["sweep", *sweeps, "--device", "cpu", "--repeats", "0", "--out", str(gpu)]) == 2
    assert sim(["predict", str(gpu), "--out", str(simulated), "--jobs", "1"]) == 0
    capsys.readouterr()
    assert results(["compare", str(simulated), str(gpu), "--out", str(out), "--p50", "0.001"]) == 1
    assert capsys.readouterr().out.count(" equal\n") == 3
    assert results(["compare", str(simulated), str(gpu), "--out", str(out), *ANY]) == 0
    data = json.loads((out / "compare.json").read_text())
    assert [(cell["policy"], cell["num_repeats"], len(cell["decisions"])) for cell in data["cells"]] == [
        ("atomic", 3, 3), ("wcpb", 3, 3), ("split", 3, 3),
    ]  # fmt: skip
    assert all(figure["spread"] > 0 for cell in data["cells"] for figure in cell["figures"].values())
    assert results(["compare", str(gpu), str(simulated), "--out", str(out)]) == 2
    assert "expected the simulated side first" in capsys.readouterr().err

    assert results(["pack", str(gpu), "--out", str(tmp_path / "kept" / "gpu.tar.xz")]) == 0
    assert (
        results(["compare", str(simulated), str(tmp_path / "kept"), "--out", str(tmp_path / "again"), *ANY])
        == 0
    )
    again = json.loads((tmp_path / "again" / "compare.json").read_text())
    assert [cell["figures"] for cell in again["cells"]] == [cell["figures"] for cell in data["cells"]]
    assert again["batches"] == data["batches"]


def test_the_cells_of_a_shipped_comparison_have_one_pool_and_are_as_many_as_its_axes_make() -> None:
    files = {
        name: ROOT / "executor" / "configs" / f"compare-{name}.yaml"
        for name in ("serving", "prefill", "azure")
    }
    cells = {name: [config for _, config in load_grid(path)] for name, path in files.items()}
    assert {name: len(found) for name, found in cells.items()} == {
        "serving": 2 * 2 * 4,
        "prefill": 2 * 2,
        "azure": 2 * 4,
    }
    assert {name: {config.cache.num_blocks for config in found} for name, found in cells.items()} == {
        "serving": {8192},
        "prefill": {8192},
        "azure": {16384},
    }
