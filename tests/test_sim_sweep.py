"""Sweeps: every point of the grid once, finished cells never again, and mistakes before anything runs."""

import csv
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from policies.config.grid import load_grid
from policies.core.errors import InputError
from results.sweep import workload_labels
from sim.cli import main
from sim.run import Logs
from sim.sweeping import Cell, load_cells, run_sweep

ROOT = Path(__file__).parents[1]
SWEEP = """\
base:
  model: ouro-tiny
  scheduler: {max_num_seqs: 2, max_num_batched_tokens: 32, prefill_chunk_size: 8}
  workload: {kind: synthetic, num_requests: 3, prompt_tokens: [20, 9], output_tokens: 2}
grid:
  policy.name: [atomic, wcpb]
  scheduler.prefill_chunk_size: [8, 16]
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(SWEEP)
    return path


def run(sweep: Path, *overrides: str, log: Logs = "batches") -> list[Cell]:
    """Run the sweep's cells in this process, in their order, into `out` beside its file."""
    cells = load_cells(sweep, overrides, sweep.parent / "out")
    done = list(run_sweep(cells, 1, log))
    assert sorted(cell.directory for cell, _ in done) == sorted(cell.directory for cell in cells)
    assert all(summary["status"] == "complete" for _, summary in done)
    return cells


def stamps(sweep: Path) -> dict[str, int]:
    """When each cell's summary was written."""
    return {
        path.parent.name: path.stat().st_mtime_ns for path in (sweep.parent / "out").rglob("summary.json")
    }


def test_every_combination_runs_once_in_a_directory_of_its_own(sweep: Path) -> None:
    cells = run(sweep)
    assert [tuple(cell.axes.values()) for cell in cells] == [
        ("atomic", 8),
        ("atomic", 16),
        ("wcpb", 8),
        ("wcpb", 16),
    ]
    assert len({cell.directory for cell in cells}) == 4
    for cell in cells:
        summary = json.loads((cell.directory / "summary.json").read_text())
        assert (summary["policy"], summary["prefill_chunk_size"]) == tuple(cell.axes.values())


def test_a_workload_is_named_by_what_tells_it_apart() -> None:
    synthetic = {"workload": {"kind": "synthetic"}}
    caches = [{"num_blocks": 640, "preemption": how} for how in ("recompute", "swap")]
    cells = [({"cache": cache, "seed": 1, "policy.name": "wcpb"}, synthetic) for cache in caches]
    assert workload_labels(cells) == [
        "synthetic preemption=recompute seed=1",
        "synthetic preemption=swap seed=1",
    ]


def test_a_finished_cell_is_not_run_again(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(sweep)
    before = stamps(sweep)
    run(sweep)
    assert stamps(sweep) == before
    assert "4 of 4 cells are finished already" in capsys.readouterr().err


def test_a_cell_without_a_complete_summary_is_run_again_and_only_that_one(sweep: Path) -> None:
    unfinished, interrupted, *_ = run(sweep)
    before = stamps(sweep)
    (unfinished.directory / "summary.json").unlink()
    path = interrupted.directory / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "interrupted"}))
    os.utime(path, ns=(1, 1))
    run(sweep)
    changed = {name for name, stamp in stamps(sweep).items() if stamp != before[name]}
    assert changed == {unfinished.directory.name, interrupted.directory.name}
    assert json.loads(path.read_text())["status"] == "complete"


def test_a_changed_config_is_a_new_cell_and_the_old_one_stays(sweep: Path) -> None:
    first = {cell.directory for cell in run(sweep)}
    second = {cell.directory for cell in run(sweep, "scheduler.inflight=1")}
    assert not first & second
    assert len(stamps(sweep)) == 8


def test_a_grid_that_grows_runs_only_what_is_new(sweep: Path) -> None:
    run(sweep)
    before = stamps(sweep)
    sweep.write_text(SWEEP.replace("[8, 16]", "[4, 8, 16]"))
    run(sweep)
    after = stamps(sweep)
    assert len(after) == 6 and {name: after[name] for name in before} == before


def test_comments_and_the_order_of_keys_make_no_new_cell(sweep: Path) -> None:
    first = [cell.directory for cell in load_cells(sweep, (), Path("out"))]
    reordered = SWEEP.replace(
        "max_num_seqs: 2, max_num_batched_tokens: 32", "max_num_batched_tokens: 32, max_num_seqs: 2"
    )
    assert reordered != SWEEP
    sweep.write_text("# the same\n" + reordered)
    assert [cell.directory for cell in load_cells(sweep, (), Path("out"))] == first


def test_setting_a_key_of_the_grid_replaces_that_axis_by_one_value(sweep: Path) -> None:
    cells = load_cells(sweep, ["policy.name=mixed"], Path("out"))
    assert [(dict(cell.axes), cell.config.policy.name) for cell in cells] == [
        ({"policy.name": "mixed", "scheduler.prefill_chunk_size": 8}, "mixed"),
        ({"policy.name": "mixed", "scheduler.prefill_chunk_size": 16}, "mixed"),
    ]


def test_setting_a_key_of_the_base_applies_to_every_cell(sweep: Path) -> None:
    assert {cell.config.seed for cell in load_cells(sweep, ["seed=5"], Path("out"))} == {5}


@pytest.mark.parametrize("measure", ["null", "{skip_requests: 1}"])
def test_figures_are_the_same_whichever_logs_are_kept(sweep: Path, measure: str) -> None:
    def figures(log: Logs) -> list[tuple[str, list[str]]]:
        cells = run(sweep, f"measure={measure}", log=log)
        found = [
            (
                (cell.directory / "summary.json").read_text(),
                [name for name in ("batches.csv", "requests.csv") if (cell.directory / name).exists()],
            )
            for cell in cells
        ]
        shutil.rmtree(sweep.parent / "out")
        return found

    whole, requests, none = figures("batches"), figures("requests"), figures("none")
    assert [text for text, _ in whole] == [text for text, _ in requests] == [text for text, _ in none]
    assert {tuple(files) for _, files in whole} == {("batches.csv", "requests.csv")}
    assert {tuple(files) for _, files in requests} == {("requests.csv",)}
    assert {tuple(files) for _, files in none} == {()}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base: {}\n", "expected `base`, a mapping, and `grid`, a mapping of config keys to lists"),
        ("grid: {}\n", "expected `base`, a mapping, and `grid`, a mapping of config keys to lists"),
        ("gird: {seed: [1]}\n", "unknown key 'gird', expected one of base, grid; did you mean 'grid'?"),
        (SWEEP.replace("[8, 16]", "8"), "grid.scheduler.prefill_chunk_size: 8, expected a list of values"),
        (SWEEP.replace("[8, 16]", "[]"), "grid.scheduler.prefill_chunk_size: [], expected a list of values"),
        (SWEEP.replace("[atomic, wcpb]", "[atomic, wcbp]"), "unknown policy 'wcbp'"),
        (
            SWEEP.replace("[8, 16]", "[8, 64]"),
            "prefill_chunk_size: 64 is larger than the batch budget max_num_batched_tokens, 32",
        ),
        (SWEEP.replace("prefill_chunk_size: [", "prefil_chunk: ["), "unknown key 'scheduler.prefil_chunk'"),
        (SWEEP.replace("[8, 16]", "[8, 8]"), "are the same run, expected it once"),
    ],
)
def test_a_wrong_grid_is_one_sentence(sweep: Path, text: str, sentence: str) -> None:
    sweep.write_text(text)
    with pytest.raises(InputError) as caught:
        load_cells(sweep, (), Path("out"))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_setting_a_part_of_an_axis_is_refused(sweep: Path) -> None:
    sweep.write_text(
        SWEEP.replace("policy.name: [atomic, wcpb]", "policy: [{name: wcpb, mix_decode: false}, atomic]")
    )
    with pytest.raises(
        InputError, match=r"--set policy.name=split: policy is an axis of .*; set policy itself"
    ):
        load_cells(sweep, ["policy.name=split"], Path("out"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["cache.layout=shared", "policy.name=[wcpb, atomic]"],
            "policy wcpb cannot run with cache.layout shared",
        ),
        (["cache.num_blocks=3"], "cache.num_blocks: 3 is less than one block in each of the 4 depth planes"),
        (["device=h20"], "device: unknown device 'h20'"),
        (["workload={kind: trace, path: nowhere.csv}"], "nowhere.csv"),
        (["workload.prompt_tokens=0"], "workload.prompt_tokens: 0, expected"),
    ],
)
def test_a_wrong_cell_is_found_before_the_first_one_runs(
    sweep: Path, overrides: list[str], sentence: str
) -> None:
    cells = load_cells(sweep, overrides, sweep.parent / "out")
    with pytest.raises(InputError) as caught:
        list(run_sweep(cells, 1, True))
    assert sentence in str(caught.value)
    assert not (sweep.parent / "out").exists()


def test_the_command_writes_a_tidy_table_of_all_cells_and_prints_it(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = sweep.parent / "out"
    assert (
        main(
            ["sweep", str(sweep), "--jobs", "1", "--set", "scheduler.prefill_chunk_size=8", "--out", str(out)]
        )
        == 0
    )
    with open(out / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["axis.policy.name"], row["status"], row["num_finished"]) for row in rows] == [
        ("atomic", "complete", "3"),
        ("wcpb", "complete", "3"),
    ]
    printed = capsys.readouterr().out
    assert "atomic" in printed and "wcpb" in printed
    assert list((out / "plots").glob("*.png"))


def test_ctrl_c_in_one_cell_ends_the_sweep_and_not_only_that_cell(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def interrupted(config: object, out: Path, **options: object) -> tuple[Path, dict[str, str]]:
        started.append(out)
        return out, {"status": "interrupted"}

    monkeypatch.setattr("sim.sweeping.simulate", interrupted)
    assert main(["sweep", str(sweep), "--jobs", "1", "--out", str(sweep.parent / "out")]) == 130
    assert len(started) == 1


@pytest.mark.parametrize("jobs", ["0", "-2"])
def test_a_wrong_number_of_processes_is_one_line_and_status_2(
    sweep: Path, capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    assert main(["sweep", str(sweep), "--jobs", jobs, "--out", str(sweep.parent / "out")]) == 2
    assert capsys.readouterr().err == f"sim: --jobs: {jobs}, expected -1 or a number of processes\n"


def test_a_sweep_says_how_far_it_is_and_what_else_its_folder_holds(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sim.progress.INTERVAL_S", 0.0)
    out = str(sweep.parent / "out")
    assert main(["sweep", str(sweep), "--jobs", "1", "--out", out]) == 0
    errors = capsys.readouterr().err
    assert "4 of 4 cells after " in errors and "other sweeps" not in errors
    assert main(["sweep", str(sweep), "--jobs", "1", "--out", out, "--set", "seed=1"]) == 0
    assert f"note: {out} has 4 cells of other sweeps too" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_keeps_other_settings_in_another_folder() -> None:
    def folder(*settings: str) -> str:
        # A make that runs the tests would have this one say which folder it enters.
        quiet = ["make", "-n", "--no-print-directory", "-o", ".venv/.base"]
        command = [*quiet, "simulate", "TRACE=conv.csv", *settings]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        return found.stdout.rpartition("--out ")[2].strip().strip('"')

    assert folder() == "results/runs/trace-${name%.*}"
    setting = "SET=workload.limit=3 exit={mode:gate}"
    assert folder(setting) == "results/runs/trace-${name%.*}-workload.limit=3-exit=-mode-gate-"


def test_an_unquoted_off_of_an_axis_is_called_off(tmp_path: Path) -> None:
    path = tmp_path / "off.yaml"
    path.write_text(
        "base: {model: ouro-tiny, workload: {kind: preset, name: chat, num_requests: 2}}\n"
        "grid:\n  - speculation.mode: [off, loops]\n    speculation.acceptance: [0.5]\n"
        "  - cache: [{preemption: off}, {preemption: swap}]\n"
    )
    axes = [point for point, _ in load_grid(path)]
    assert [point.get("speculation.mode") for point in axes[:2]] == ["off", "loops"]
    assert [point["cache"]["preemption"] for point in axes[2:]] == ["off", "swap"]
