"""A disk that takes no more: one sentence, status 1, what was written whole stays and is marked, and nothing is there by half."""

import csv
import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from log_checker import parse_batches
from matplotlib.figure import Figure

from policies.config import parse_config
from policies.core.errors import WriteError
from results.files import GrowingFile
from results.load import find_runs, finished_summary, load_run
from sim.cli import main
from sim.run import simulate

ROOT = Path(__file__).parents[1]
WORKLOAD = {"kind": "synthetic", "num_requests": 60, "prompt_tokens": 90, "output_tokens": 30}
CONFIG = {"model": "ouro-tiny", "policy": "wcpb", "workload": WORKLOAD}
LIMIT = 150_000
FULL = OSError(errno.ENOSPC, "No space left on device")


def fill(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the disk be full when files of these names are to take their places."""
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name in names:
            raise FULL
        real(source, target)

    monkeypatch.setattr("results.rundir.os.replace", replace)


def run(out: Path) -> Path:
    return simulate(parse_config(CONFIG, Path(), "test"), out)[0]


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


@pytest.mark.parametrize(
    ("full", "left"),
    [
        ("requests.csv", ["batches.csv", "config.yaml", "requests.csv", "summary.json"]),
        ("trace.json.gz", ["batches.csv", "config.yaml", "plots", "requests.csv", "summary.json"]),
    ],
)
def test_a_file_that_finds_no_room_fails_the_run_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, left: list[str]
) -> None:
    fill(monkeypatch, full)
    with pytest.raises(WriteError, match=rf"run/{full}: No space left on device; what could be written is in .*, marked failed$"):
        run(tmp_path / "run")
    assert names(tmp_path / "run") == left
    summary = load_run(tmp_path / "run").summary
    assert (summary["status"], summary["num_requests"]) == ("failed", 60)
    assert len(load_run(tmp_path / "run").requests()) == 60
    assert summary["error"] == f"{tmp_path}/run/{full}: No space left on device"
    assert finished_summary(tmp_path / "run", summary["input_sha256"]) is None


def test_requests_that_find_no_room_in_mid_run_end_it_and_those_that_did_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file takes its header and 20 requests and no more."""
    real, calls = GrowingFile.write, iter(range(1000))

    def write(self: GrowingFile, text: str) -> None:
        if self._path.name == "requests.csv" and next(calls) > 20:
            raise WriteError(f"{self._path}: No space left on device")
        real(self, text)

    monkeypatch.setattr(GrowingFile, "write", write)
    with pytest.raises(
        WriteError, match=r"run/requests.csv: No space left on device; what could be written is in .*, marked failed$"
    ):
        run(tmp_path / "run")
    assert names(tmp_path / "run") == ["batches.csv", "config.yaml", "requests.csv", "summary.json"]
    summary = load_run(tmp_path / "run").summary
    assert summary["status"] == "failed"
    assert summary["num_requests"] == summary["num_finished"] == 20
    assert (tmp_path / "run" / "requests.csv").read_text().endswith("\n")
    assert set(load_run(tmp_path / "run").requests()["status"]) == {"finished"}


def test_pictures_that_find_no_room_are_all_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def savefig(self: Figure, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"\x89PNG")
        raise FULL

    monkeypatch.setattr(Figure, "savefig", savefig)
    with pytest.raises(WriteError, match=r"run/plots: No space left on device; what could be written is in .*, marked failed$"):
        run(tmp_path / "run")
    assert names(tmp_path / "run") == ["batches.csv", "config.yaml", "requests.csv", "summary.json", "trace.json.gz"]
    assert load_run(tmp_path / "run").summary["status"] == "failed"


def test_without_room_for_a_summary_nothing_takes_it_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch, "requests.csv", "summary.json")
    with pytest.raises(WriteError, match=r"/requests.csv: No space .*; .*/run has no summary.json, so nothing takes it for a run$"):
        run(tmp_path / "runs" / "run")
    assert names(tmp_path / "runs" / "run") == ["batches.csv", "config.yaml", "requests.csv"]
    monkeypatch.undo()
    run(tmp_path / "runs" / "other")
    runs, unfinished = find_runs([tmp_path / "runs"])
    assert ([item.path.name for item in runs], [item.name for item in unfinished]) == (["other"], ["run"])


def test_a_log_that_finds_no_room_is_cut_to_whole_lines(tmp_path: Path) -> None:
    """A real limit: no file of the process may grow beyond LIMIT bytes."""
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(CONFIG | {"workload": WORKLOAD | {"num_requests": 300}}))
    command = [sys.executable, "-m", "sim", "run", str(config), "--no-plots", "--out", str(tmp_path / "run")]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 1, done.stderr
    place = tmp_path / "run"
    assert done.stderr == f"sim: {place}/batches.csv: File too large; what could be written is in {place}, marked failed\n"
    summary = load_run(place).summary
    assert summary["status"] == "failed"
    text = (place / "batches.csv").read_text()
    assert text.endswith("\n") and LIMIT - 10_000 < len(text) <= LIMIT
    assert [batch.seq for batch in parse_batches(text)] == list(range(text.count("\n") - 1))
    with open(place / "requests.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == summary["num_requests"]


@pytest.mark.parametrize("tail", ["", "x" * 70_000, "x" * 70_000 + "\n" + "y" * 3])
def test_a_log_is_cut_after_its_last_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str) -> None:
    path = tmp_path / "log.csv"
    log = GrowingFile(path)
    log.write("a,b\n1,2\n" + tail)
    real = log._file

    class Broken:
        closed = False

        def close(self) -> None:
            real.close()
            raise FULL

    monkeypatch.setattr(log, "_file", Broken())
    with pytest.raises(WriteError, match=r"log.csv: No space left on device"):
        log.close()
    assert path.read_text() == "a,b\n1,2\n" + tail[: tail.rfind("\n") + 1]


def test_the_command_ends_with_status_1_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(monkeypatch, "requests.csv")
    config, place = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(json.dumps(CONFIG))
    assert main(["run", str(config), "--out", str(place)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"sim: {place}/requests.csv: No space left on device; what could be written is in {place}, marked failed"
