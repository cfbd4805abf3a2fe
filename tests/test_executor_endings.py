"""Runs that do not complete: what stops them, how they say so, and that what had finished is on disk and
true."""

import csv
import io
import signal
from collections import Counter
from pathlib import Path

import pytest
import yaml
from full_disk import full_after, full_for
from log_checker import parse_batches

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import BASE, config_of, delivered, run_on, session_of  # noqa: E402

from executor.cli import main  # noqa: E402
from executor.errors import RunError  # noqa: E402
from executor.kernels.meta import HostMeta  # noqa: E402
from executor.packing import BatchPacker  # noqa: E402
from executor.programs import EAGER_USES, ProgramKey, Programs  # noqa: E402
from executor.runner import Launched  # noqa: E402
from executor.session import Session  # noqa: E402
from policies.core.errors import WriteError  # noqa: E402
from policies.core.seam.batch import ExecutionBatch, Work  # noqa: E402
from results.load import load_run  # noqa: E402


@pytest.fixture(scope="module")
def session() -> Session:
    return session_of()


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the `number`th batch raise as a kernel would."""
    real, calls = Programs.run, iter(range(10_000))

    def run(self: Programs, *arguments: object) -> None:
        if next(calls) == number:
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
                "reported later"
            )
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Programs, "run", run)


def test_an_error_in_mid_run_leaves_what_had_finished_marked_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of()
    expected = run_on(session, tmp_path / "whole")
    with monkeypatch.context() as broken:
        fail_at(broken, 20)
        waits = []
        broken.setattr(session, "synchronize", lambda: waits.append(1))
        with pytest.raises(
            RunError,
            match=(
                r"after \d+ batches; what had finished is in "
                r".*/run, marked failed: RuntimeError: CUDA error"
            ),
        ):
            run_on(session, tmp_path / "run")
        assert waits
    summary = load_run(tmp_path / "run").summary
    assert summary["status"] == "failed"
    assert summary["error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "test_executor_endings.py" in "".join(summary["traceback"])
    batches = parse_batches((tmp_path / "run" / "batches.csv").read_text())
    assert 18 <= len(batches) == summary["num_batches"] <= 20
    tokens = csv.DictReader(io.StringIO((tmp_path / "run" / "tokens.csv").read_text()))
    found = {int(line["request_id"]): list(map(int, line["token_ids"].split())) for line in tokens}
    assert found
    assert all(expected.tokens[key][: len(ids)] == ids for key, ids in found.items())
    assert run_on(session, tmp_path / "again").against(expected).is_identical


def test_an_error_that_only_the_device_reports_at_the_end_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of()

    def broken() -> None:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(session, "synchronize", broken)
    with pytest.raises(RunError, match="RuntimeError: device-side assert triggered"):
        run_on(session, tmp_path / "run")
    assert load_run(tmp_path / "run").summary["status"] == "failed"


def test_a_program_without_memory_for_its_graph_runs_eagerly_and_the_summary_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of()
    expected = run_on(session, tmp_path / "eager")
    tried = []

    def short(self: Programs, key: object, bucket: object) -> None:
        tried.append(key)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(Programs, "_capture", short)
    monkeypatch.setattr(session.programs, "use_graphs", True)
    done = run_on(session, tmp_path / "run")
    assert done.against(expected).is_identical
    assert done.summary["status"] == "complete"
    assert done.summary["eager_batches"] == done.summary["num_batches"]
    assert len(tried) == len(set(tried)) == len(session.programs.uncaptured) > 3
    assert f"{len(tried)} programs run eagerly, there was no memory to capture their CUDA graphs" in " ".join(
        done.summary["notes"]
    )
    assert not any("eagerly" in note for note in expected.summary["notes"])


def test_a_program_that_was_not_warmed_up_runs_eagerly_until_its_graph_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of()
    expected = run_on(session, tmp_path / "eager")
    programs = session.programs

    class Graph:
        def __init__(self, key: ProgramKey) -> None:
            self.key = key

        def replay(self) -> None:
            replayed[self.key] += 1
            programs._body(self.key, programs.bucket_for(self.key.bucket))

    def capture(self: Programs, key: ProgramKey, bucket: object) -> Graph:
        self._graphs[key] = graph = Graph(key)  # type: ignore[assignment]
        return graph

    replayed: Counter[ProgramKey] = Counter()
    monkeypatch.setattr(Programs, "_capture", capture)
    monkeypatch.setattr(programs, "use_graphs", True)
    done = run_on(session, tmp_path / "run")
    assert done.against(expected).is_identical
    uses = programs._times_run
    assert uses and max(uses.values()) <= EAGER_USES + 1
    assert done.summary["eager_batches"] == sum(min(count, EAGER_USES) for count in uses.values())
    assert done.summary["eager_batches"] + replayed.total() == done.summary["num_batches"]


def test_the_audit_stops_a_run_at_an_injected_wrong_slot(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BatchPacker.pack

    num_packed = 0

    def pack(self: BatchPacker, host: HostMeta, work: Work, *others: object) -> object:
        nonlocal num_packed
        num_packed += 1
        packed = real(self, host, work, *others)  # type: ignore[arg-type]
        if work.loop_count and num_packed > 6:
            host.slots[0] += 1
        return packed

    monkeypatch.setattr(BatchPacker, "pack", pack)
    with pytest.raises(
        RunError,
        match=(
            r"AuditError: batch \d+, request \d+, position \d+, depth "
            r"\d: slots is \d+, first principles say"
        ),
    ):
        run_on(session, tmp_path / "run")
    assert run_on(session, tmp_path / "blind", audit=False).summary["status"] == "complete"


class Press:
    """An observer that presses Ctrl-C when batch `seq` is launched."""

    def __init__(self, seq: int, times: int = 1) -> None:
        self.seq, self.times = seq, times
        self.seen: list[int] = []

    def launching(self, batch: ExecutionBatch) -> None:
        self.seen.append(batch.seq)
        if batch.seq == self.seq:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)

    def collected(self, batch: ExecutionBatch, launched: Launched, stops: frozenset[int]) -> None:
        pass


def test_ctrl_c_ends_a_run_between_two_steps_and_keeps_what_had_finished(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run_on(session, tmp_path / "whole")
    handler = signal.getsignal(signal.SIGINT)
    press = Press(20)
    done = run_on(session, tmp_path / "run", observers=(press,))
    assert signal.getsignal(signal.SIGINT) is handler
    assert press.seen[-1] == 20
    assert done.summary["status"] == "interrupted"
    assert "interrupted: writing what was run until now" in capsys.readouterr().err
    batches = parse_batches(done.text("batches.csv"))
    assert 18 <= len(batches) == done.summary["num_batches"] <= 20
    assert delivered(done) == {key: len(tokens) for key, tokens in done.tokens.items()}
    assert all(expected.tokens[key][: len(ids)] == ids for key, ids in done.tokens.items())
    assert run_on(session, tmp_path / "again").against(expected).is_identical


def test_a_second_ctrl_c_does_not_wait_for_the_step_to_end(session: Session, tmp_path: Path) -> None:
    press = Press(20, times=2)
    done = run_on(session, tmp_path / "run", observers=(press,))
    assert (done.summary["status"], press.seen[-1]) == ("interrupted", 20)


def test_ctrl_c_does_not_wait_for_the_next_arrival(tmp_path: Path) -> None:
    session = session_of(
        config_of("workload.arrival={process: constant, rate: 0.01}", "workload.prompt_tokens=5")
    )
    done = run_on(session, tmp_path / "run", observers=(Press(0),))
    assert (done.summary["status"], done.summary["num_finished"]) == ("interrupted", 0)


def test_a_finished_run_before_it_leaves_no_tokens_in_a_directory_taken_over(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(session, tmp_path / "run")

    def broken(*settings: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(session, "warm_up", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        run_on(session, tmp_path / "run")
    assert not (tmp_path / "run" / "tokens.csv").exists()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("full", ["tokens.csv", "requests.csv"])
def test_a_full_disk_at_the_end_fails_the_run_and_keeps_the_rest(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    full_for(monkeypatch, full)
    with pytest.raises(
        WriteError,
        match=rf"run/{full}: No space left on device; what could be written is in .*, marked failed",
    ):
        run_on(session, tmp_path / "run")
    assert load_run(tmp_path / "run").summary["status"] == "failed"
    expected = {"batches.csv", "config.yaml", "requests.csv", "summary.json", "tokens.csv"} - (
        {full} - {"requests.csv"}
    )
    assert {item.name for item in (tmp_path / "run").iterdir()} == expected


def test_a_full_disk_in_mid_run_ends_it_with_one_line_and_keeps_what_had_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_after(monkeypatch, "batches.csv", 20)
    config, place = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(BASE))
    assert main(["run", str(config), "--device", "cpu", "--no-plots", "--out", str(place)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"executor: {place}/batches.csv: No space left on device; what could be written is in {place}, "
        "marked failed"
    )
    assert load_run(place).summary["status"] == "failed"
    assert len(parse_batches((place / "batches.csv").read_text())) == 20
    assert (place / "tokens.csv").exists() and (place / "requests.csv").exists()
