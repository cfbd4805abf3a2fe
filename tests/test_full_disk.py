"""A disk that takes no more: one sentence, status 1, what was written whole stays and is marked, and nothing
is there by half."""

import csv
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from full_disk import FULL, full_after, full_for
from log_checker import parse_batches
from matplotlib.figure import Figure

from policies.config.runconfig import parse_config
from policies.core.errors import WriteError
from results.files import GrowingFile
from results.find import find_runs
from results.load import finished_summary, load_run
from sim.cli import main
from sim.run import simulate

ROOT = Path(__file__).parents[1]
WORKLOAD = {"kind": "synthetic", "num_requests": 60, "prompt_tokens": 90, "output_tokens": 30}
CONFIG = {"model": "ouro-tiny", "policy": "wcpb", "workload": WORKLOAD}
LIMIT = 150_000


def run(out: Path) -> Path:
    return simulate(parse_config(CONFIG, Path(), "test"), out)[0]


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


@pytest.mark.parametrize(
    ("full", "left"),
    [
        ("requests.csv", ["batches.csv", "config.yaml", "requests.csv", "summary.json"]),
    ],
)
def test_a_file_that_finds_no_room_fails_the_run_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, left: list[str]
) -> None:
    full_for(monkeypatch, full)
    with pytest.raises(
        WriteError,
        match=rf"run/{full}: No space left on device; what could be written is in .*, marked failed$",
    ):
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
    full_after(monkeypatch, "requests.csv", 20)
    with pytest.raises(
        WriteError,
        match=r"run/requests.csv: No space left on device; what could be written is in .*, marked failed$",
    ):
        run(tmp_path / "run")
    assert names(tmp_path / "run") == ["batches.csv", "config.yaml", "requests.csv", "summary.json"]
    summary = load_run(tmp_path / "run").summary
    assert summary["status"] == "failed"
    assert summary["num_requests"] == summary["num_finished"] == 20
    assert (tmp_path / "run" / "requests.csv").read_text().endswith("\n")
    assert set(load_run(tmp_path / "run").requests()["status"]) == {"finished"}


def test_a_trace_and_pictures_that_find_no_room_are_notes_of_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def savefig(self: Figure, path: Path, **options: object) -> None:
        Path(path).write_bytes(b"\x89PNG")
        raise FULL

    monkeypatch.setattr(Figure, "savefig", savefig)
    full_for(monkeypatch, "trace.json.gz")
    run(tmp_path / "run")
    assert names(tmp_path / "run") == ["batches.csv", "config.yaml", "plots", "requests.csv", "summary.json"]
    assert names(tmp_path / "run" / "plots") == []
    summary = load_run(tmp_path / "run").summary
    assert summary["status"] == "complete" and "error" not in summary
    assert summary["notes"][-5:] == [
        "trace.json.gz could not be written: trace.json.gz: No space left on device",
        *(
            f"{name}.png could not be drawn: {name}.png: cannot be written: No space left on device"
            for name in ("latency", "rows", "wavefront", "time")
        ),
    ]


def test_without_room_for_a_summary_nothing_takes_it_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_for(monkeypatch, "requests.csv", "summary.json")
    with pytest.raises(
        WriteError,
        match=r"/requests.csv: No space .*; .*/run has no summary.json, so nothing takes it for a run$",
    ):
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
    assert (
        done.stderr
        == f"sim: {place}/batches.csv: File too large; what could be written is in {place}, marked failed\n"
    )
    summary = load_run(place).summary
    assert summary["status"] == "failed"
    text = (place / "batches.csv").read_text()
    assert text.endswith("\n") and LIMIT - 10_000 < len(text) <= LIMIT
    assert [batch.seq for batch in parse_batches(text)] == list(range(text.count("\n") - 1))
    with open(place / "requests.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == summary["num_requests"]


class Disk:
    """A disk with `room` bytes left for files that grow: raw files that write to it take what fits and then
    no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        disk = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                taken = min(disk.room, len(data))
                if not taken:
                    raise FULL
                disk.room -= taken
                return super().write(memoryview(data)[:taken])

        monkeypatch.setattr("results.files.io.FileIO", File)


@pytest.mark.parametrize("tail", ["", "x" * 70_000, "x" * 70_000 + "\n" + "y" * 3])
def test_a_log_is_cut_after_its_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    path, text = tmp_path / "log.csv", "a,b\n1,2\n" + tail
    Disk(monkeypatch, len(text))
    log = GrowingFile(path)
    log.write(text + "no room")
    with pytest.raises(WriteError, match=r"log.csv: No space left on device"):
        log.close()
    assert path.read_text() == "a,b\n1,2\n" + tail[: tail.rfind("\n") + 1]


@pytest.mark.parametrize("room", [0, 1, 5_000, 1 << 20, (1 << 20) + 7, 2_900_000])
def test_a_log_is_the_beginning_of_what_was_written_also_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / "log.csv"
    disk = Disk(monkeypatch, room)
    log, written, faults = GrowingFile(path), "", []
    for at in range(400):
        line = f"{at} {'x' * (37 * at)}\n"
        written += line
        try:
            log.write(line)
        except WriteError as error:
            faults.append(error)
            disk.room = 1 << 30
    assert disk.room == 1 << 30 or not faults
    if not faults:
        with pytest.raises(WriteError):
            log.close()
    assert len(set(map(id, faults))) <= 1
    log.close()
    text = path.read_text()
    assert written.startswith(text) and text == written[: written[:room].rfind("\n") + 1]
    with pytest.raises(WriteError, match=r"log.csv: No space left on device"):
        log.write("more\n")
    assert path.read_text() == text


@pytest.mark.parametrize("room", [400, 2_000, 20_000, 100_000])
def test_a_disk_that_fills_before_any_request_was_written_fails_the_run_for_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Both logs share what is left, and requests wait in a buffer while batches take it all."""
    Disk(monkeypatch, room)
    with pytest.raises(
        WriteError, match=r"run/batches.csv: No space .*; what could be written is in .*, marked failed$"
    ):
        run(tmp_path / "run")
    read = load_run(tmp_path / "run")
    assert read.summary["status"] == "failed" and "batches.csv" in read.summary["error"]
    assert len(read.requests()) == read.summary["num_requests"]


def test_a_run_whose_disk_did_not_take_its_requests_is_not_said_to_decide_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Disk(monkeypatch, 20_000)
    with pytest.raises(WriteError):
        run(tmp_path / "run")
    assert main(["replay", str(tmp_path / "run")]) == 2
    data = capsys.readouterr().err.splitlines()[-1]
    assert data.startswith(f"sim: {tmp_path}/run/batches.csv line 2: allocated: 0:")
    assert data.endswith(", expected a request of requests.csv, which lacks some when the disk was full")


def test_the_command_ends_with_status_1_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_for(monkeypatch, "requests.csv")
    config, place = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(json.dumps(CONFIG))
    assert main(["run", str(config), "--out", str(place)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last == f"sim: {place}/requests.csv: No space left on device; what could be written is in {place}, "
        "marked failed"
    )
