"""How commands end when others end them: signals, readers that leave, full devices, odd names, missing
packages."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKLOAD = "workload: {kind: synthetic, num_requests: %d, prompt_tokens: 60, output_tokens: 9}"
RUN = f"model: ouro-tiny\n{WORKLOAD}\n"
SWEEP = f"base:\n  model: ouro-tiny\n  {WORKLOAD}\n"
MANY, FEW = 100_000, 2
GRID = "grid: {policy.name: [atomic, split, mixed, wcpb]}\n"


def started(*arguments: object, prelude: str = "", **options: Any) -> subprocess.Popen[str]:
    """`python -m` with these arguments, in a session of its own, as a terminal would start it."""
    command = [sys.executable, "-m", *map(str, arguments)]
    if prelude:
        go = f"from policies.process.start import start; sys.exit(start({arguments[0]!r}))"
        code = f"import sys; {prelude}; {go}"
        command = [sys.executable, "-c", code, *map(str, arguments[1:])]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        start_new_session=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),
    )


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert (process is None or process.poll() is None) and time.monotonic() < deadline
        time.sleep(0.02)


def session(leader: int) -> list[str]:
    """The processes of `leader`'s session, by what they run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_job_leaves_a_run_marked_interrupted_and_status_130(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "run.yaml").write_text(RUN % MANY)
    out = tmp_path / "out"
    process = started("sim", "run", tmp_path / "run.yaml", "--no-plots", "--out", out)
    batches = out / "batches.csv"
    wait_until(lambda: batches.is_file() and batches.stat().st_size > 0, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP % MANY + GRID)
    out = tmp_path / "out"
    process = started("sim", "sweep", tmp_path / "sweep.yaml", "--jobs", "2", "--out", out)
    wait_until(lambda: len(list(out.glob("cells/*/batches.csv"))) == 2, process)
    assert len(session(process.pid)) > 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    wait_until(lambda: not session(process.pid))
    assert not list(out.glob("cells/*/summary.json"))


def test_a_reader_that_leaves_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP % FEW + GRID)
    out = tmp_path / "out"
    reader, writer = os.pipe()
    os.close(reader)
    process = started("sim", "sweep", tmp_path / "sweep.yaml", "--jobs", "1", "--out", out, stdout=writer)
    os.close(writer)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert (out / "sweep.csv").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_named_and_the_run_stays(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN % FEW)
    with open("/dev/full", "w") as full:
        process = started(
            "sim", "run", tmp_path / "run.yaml", "--no-plots", "--out", tmp_path / "out", stdout=full
        )
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "sim: standard output: No space left on device\n" in errors
    assert "Traceback" not in errors and "Exception ignored" not in errors
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "complete"


def test_an_ascii_terminal_and_a_folder_whose_name_is_no_text_are_no_trouble(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    (folder / "sweep.yaml").write_text(SWEEP % FEW + GRID.replace("split, mixed, ", ""))
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for arguments in (
        ("sim", "sweep", folder / "sweep.yaml", "--jobs", "1", "--out", folder / "out"),
        ("results", "report", folder / "out", "--out", folder / "report.html"),
    ):
        process = started(*arguments, env=environ)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    assert (folder / "out" / "sweep.csv").is_file() and (folder / "report.html").is_file()


@pytest.mark.parametrize("package", ["yaml", "rich"])
def test_a_package_that_is_not_installed_is_one_sentence(tmp_path: Path, package: str) -> None:
    (tmp_path / "run.yaml").write_text(RUN % FEW)
    process = started(
        "sim", "run", tmp_path / "run.yaml", "--no-plots", "--out", tmp_path / "out",
        prelude=f"sys.modules[{package!r}] = None",
    )  # fmt: skip
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith(f"sim: the Python package {package} is not installed for ")
    assert "run `make setup`" in errors and errors.count("\n") == 1


SLOW = """
class Slow:
    def find_spec(self, name, *rest):
        if name == "sim.cli":
            print("loading", flush=True)
            __import__("time").sleep(60)
sys.meta_path.insert(0, Slow())
"""


def test_ctrl_c_while_packages_are_loaded_is_one_line() -> None:
    process = started("sim", "--help", prelude=f"exec({SLOW!r})")
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "sim: interrupted\n")


def test_a_warning_is_one_line_without_our_source() -> None:
    code = (
        "import warnings; from policies.process.command import exit_status; "
        "exit_status('sim', lambda: warnings.warn('far out', stacklevel=1) or 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.stderr == "sim: warning: far out\n"
