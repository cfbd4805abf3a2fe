"""`executor profile` on a CPU: the real path end to end, resumed after an interruption, and deterministic in
what it measures."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor.cli import main  # noqa: E402
from executor.lab.bench import AIMS, STANDARD_CASES  # noqa: E402
from executor.lab.profiling.cases import Scale, component_cases  # noqa: E402
from executor.lab.profiling.command import row_buckets  # noqa: E402
from executor.lab.profiling.measure import Measurement  # noqa: E402
from executor.lab.profiling.serving import all_mixes, sampled_cases  # noqa: E402
from executor.lab.whole import Whole  # noqa: E402
from executor.session import check_alike, plan_runs  # noqa: E402
from executor.source import kernel_sha256  # noqa: E402
from policies.core.models.shape import OURO_1_4B  # noqa: E402
from policies.core.seam.batch import BATCH_STAGES  # noqa: E402
from results.profile import KINDS, read_part, read_profile  # noqa: E402

torch.set_num_threads(1)
SCALE = Scale(max_rows=2048, max_context=16384, max_requests=32, chunks=(16, 128), pool_tokens=100_000)


def profile(path: Path, *arguments: str) -> int:
    return main(
        ["profile", "--device", "cpu", "--model", "ouro-tiny", "--quick", "--out", str(path), *arguments]
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("profile") / "p.csv"
    assert profile(path) == 0
    return path


def test_a_profile_holds_every_kind_with_its_figures(finished: Path) -> None:
    found = read_profile(finished)
    assert {row.kind for row in found.rows} == set(KINDS)
    for row in found.rows:
        if row.kind == "host":
            assert row.select_ns is not None and row.prepare_ns is not None and row.launch_ns is not None
        else:
            assert (
                row.device_p10_ns is not None and row.device_ns is not None and row.device_p90_ns is not None
            )
            assert row.device_p10_ns <= row.device_ns <= row.device_p90_ns
        if row.kind not in ("host", "gap", "copies", "served", "swap"):
            assert row.prepare_ns is not None and row.launch_ns is not None and row.idle_device_ns is not None
        assert row.n is not None and row.n > 0


def test_the_header_says_what_was_measured(finished: Path) -> None:
    header = read_profile(finished).header
    assert (header["gpu"], header["model"], header["dtype"], header["mode"]) == (
        "cpu",
        "ouro-tiny",
        "float32",
        "quick",
    )
    assert header["kernel_sha256"] == kernel_sha256()
    assert header["torch"] == torch.__version__
    assert header["row_buckets"] == "1 2 4 8 16 24 32 48 64"


def test_an_interrupted_profile_goes_on_where_it_was(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.csv"
    time, calls = Measurement.time, []

    def stop_at_third(self: Measurement, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return time(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "time", stop_at_third)
        assert profile(path) == 130
    before = read_part(path)
    assert before.lines and not before.is_complete
    assert (
        f"{len(before.lines)} lines are in {path}; the same command goes on from there"
        in capsys.readouterr().err
    )
    with open(path, "a") as file:
        file.write("batch,cut in the mid")
    assert profile(path) == 0
    whole = read_profile(path)
    assert whole.lines[: len(before.lines)] == before.lines
    of_runs = ("host", "gap", "served")
    measured = [row.key for row in whole.lines if row.kind not in of_runs]
    assert sorted(measured) == sorted(
        row.key for row in read_profile(finished).lines if row.kind not in of_runs
    )


def test_a_finished_profile_is_not_measured_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = finished.read_bytes()
    assert profile(finished) == 0
    assert "is complete" in capsys.readouterr().err
    assert finished.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "ouro-huge"], "ouro-huge"),
        (["--device", "tpu"], "expected one of cuda, cpu"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert profile(tmp_path / "p.csv", *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and sentence in error
    assert not (tmp_path / "p.csv").exists()


def test_something_else_under_the_name_is_left_alone(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.csv"
    for text in ("request_id,arrival_ns\n", finished.read_text().replace("# gpu: cpu", "# gpu: NVIDIA H200")):
        path.write_text(text)
        assert profile(path) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert path.read_text() == text


def test_components_fit_the_scale_and_differ() -> None:
    cases = component_cases(SCALE, row_buckets(SCALE.max_rows), 4)
    assert all(SCALE.admits(case) for case in cases)
    assert len({case.row().key for case in cases}) == len(cases)
    linear = {case.rows for case in cases if case.kind == "linear" and case.loop_count == 1}
    buckets = row_buckets(SCALE.max_rows)
    assert set(buckets) <= linear and {size + 1 for size in buckets[:-1]} <= linear


def test_sampled_batches_are_the_same_for_the_same_seed_and_cover_stages_and_policies() -> None:
    named = [item for item in all_mixes("ouro-1.4b", 0, SCALE) if "chat" not in item[0]]
    runs = [
        (name, run.with_blocks(25_000))
        for (name, _), run in zip(named, plan_runs([config for _, config in named], OURO_1_4B), strict=True)
    ]
    cases = sampled_cases(runs, OURO_1_4B, row_buckets(2048), 100, seed=3)
    assert cases == sampled_cases(runs, OURO_1_4B, row_buckets(2048), 100, seed=3)
    assert 80 <= len(cases) <= 100
    assert {case.stage for case in cases} == set(BATCH_STAGES)
    assert {case.name.split(",")[0] for case in cases} == {
        "atomic",
        "split",
        "mixed",
        "wcpb",
        "wcpb staging apart",
    }
    for case in cases:
        assert set(case.spans()) == set(range(len(case.spans())))


def test_the_batches_of_bench_fit_its_config_and_have_the_names_that_aims_go_by(tmp_path: Path) -> None:
    configs = Whole(tmp_path, "cuda", []).configs()
    (bench,) = configs["batches"]
    assert bench.cache.num_blocks is not None
    scheduler, tokens = (
        bench.scheduler,
        bench.cache.num_blocks // OURO_1_4B.num_loops * bench.cache.block_size,
    )
    scale = Scale(scheduler.max_num_batched_tokens, 9216, scheduler.max_num_seqs - 1, (), tokens)
    assert [case.name for case in STANDARD_CASES if not scale.admits(case)] == []
    assert set(AIMS) <= {case.name for case in STANDARD_CASES}
    every = [config for part in configs.values() for config in part]
    check_alike(every)
    assert {(config.attention, config.cache.num_blocks) for config in every} == {("cuda", 27648)}
