"""From a profile to a model file: known coefficients come back, and a stale or wrong file is refused in one
sentence."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_profile import HEADER, TRUTH, batches, host_ns, true_ns, write_profile

from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B
from policies.core.seam.batch import BATCH_STAGES, Stage
from policies.costs.latency import HostLoop
from policies.costs.modelfile import FIT_VERSION, ModelFile, read_model
from results.profile import read_profile
from sim.cli import main
from sim.fit import FEW_ROWS, cutting_of, fit_file, fold_of, held_out
from sim.solve import Case, fit_device


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile") / "profile.csv")


@pytest.fixture(scope="module")
def model(profile: Path) -> ModelFile:
    return fit_file(profile, profile.with_name("model.json"))[0]


def near(found: float, expected: float) -> bool:
    return abs(found / expected - 1) < 1e-3


def test_the_coefficients_that_a_profile_was_made_from_come_back(model: ModelFile) -> None:
    device = model.device
    assert near(device.launch_ns, TRUTH.launch_ns)
    assert device.linear.rows == TRUTH.linear.rows
    assert all(near(*pair) for pair in zip(device.linear.ns, TRUTH.linear.ns, strict=True))
    assert device.attention.keys() == TRUTH.attention.keys()
    for rows, truth in TRUTH.attention.items():
        found = device.attention[rows]
        assert near(found.path_tile_ns, truth.path_tile_ns) and near(found.tile_ns, truth.tile_ns)
        assert near(found.wave_ns, truth.wave_ns)
    combine, few = device.combine, device.few
    assert near(combine.split_ns, TRUTH.combine.split_ns)
    assert near(combine.partial_ns, TRUTH.combine.partial_ns)
    assert few is not None and TRUTH.few is not None
    assert near(few.tile_ns, TRUTH.few.tile_ns) and near(few.split_ns, TRUTH.few.split_ns)
    copies = device.copies
    assert near(copies.any_ns, TRUTH.copies.any_ns) and near(copies.row_ns, TRUTH.copies.row_ns)
    assert near(copies.plane_ns, TRUTH.copies.plane_ns)


def test_every_batch_of_the_profile_is_predicted_as_it_was_measured(model: ModelFile) -> None:
    for _, stage, loops, ranges in batches():
        if loops:
            features = model.cutting.features(model.cutting.key(ranges))
            assert near(sum(model.device.recurrent_ns(features, loops)), true_ns(stage, loops, ranges))


def test_host_times_and_the_loop_around_them_come_back(model: ModelFile) -> None:
    for stage, loops, ranges in (
        (Stage.RECURRENT, 4, 8),
        (Stage.PREFILLING_RECURRENT, 1, 5),
        (Stage.PRELUDE, 0, 3),
    ):
        host = model.host[stage]
        found = [time.of(ranges, ranges, loops) for time in (host.select, host.prepare, host.launch)]
        assert all(near(*pair) for pair in zip(found, host_ns(stage, ranges, loops), strict=True))
        assert near(host.idle_share, 0.5)
    assert model.loop == HostLoop(1_300, 2_000, 15_000, 9_000, 4_000, 160_000, 500_000, host_spread=0.3)


def test_what_was_served_counts_before_what_was_timed_alone(profile: Path) -> None:
    """CODA of 8 rows ran 5 us longer in real runs: so do 1 and 32 rows, which those did not have."""
    read = read_profile(profile)
    cutting = cutting_of(read, OURO_1_4B)
    cases = [
        Case.of(row, cutting) for row in read.rows if row.device_ns and row.stage and row.kind != "copies"
    ]
    eight = next(case for case in cases if case.stage is Stage.CODA and case.row.rows == 8)
    served = dataclasses.replace(eight.row, kind="served", device_ns=round(eight.device_ns) + 5_000)
    coda = fit_device([*cases, Case.of(served, cutting)], TRUTH.copies).coda
    assert [coda.at(rows) - TRUTH.coda.at(rows) for rows in (1, 8, 32)] == pytest.approx([5_000] * 3, abs=1)


def test_swapping_comes_back_from_the_profile(model: ModelFile) -> None:
    assert model.device.swap is not None and TRUTH.swap is not None
    assert near(model.device.swap.any_ns, TRUTH.swap.any_ns)
    assert near(model.device.swap.byte_ns, TRUTH.swap.byte_ns)


def test_a_model_file_says_what_it_was_fitted_on_and_how_far_off_it_is(model: ModelFile) -> None:
    assert model.profile == HEADER
    assert model.model == OURO_1_4B
    assert set(model.errors_by_stage) == set(BATCH_STAGES)
    assert set(model.errors_by_component) == {"linear", "attention", "batch", "prelude", "coda", "staging"}
    for errors in (*model.errors_by_stage.values(), *model.errors_by_component.values()):
        assert 0 <= errors.median <= errors.p95 <= errors.worst < 0.04
    assert model.profiled["bucket"] == (1, 2048)


def test_errors_are_of_compositions_that_the_solver_did_not_see(profile: Path) -> None:
    read = read_profile(profile)
    cutting = cutting_of(read, OURO_1_4B)
    cases = [
        Case.of(row, cutting) for row in read.rows if row.device_ns and row.stage and row.kind != "copies"
    ]
    odd = max(cases, key=lambda case: case.features.tiles if case.loops else 0)
    spoilt = dataclasses.replace(odd.row, device_ns=3 * (odd.row.device_ns or 0))
    cases = [dataclasses.replace(case, row=spoilt) if case is odd else case for case in cases]
    errors = {case.row.case: error for case, error in held_out(cases, 5)}
    assert errors[odd.row.case] == pytest.approx(1 / 3 - 1, abs=0.02)
    assert len({fold_of(case.composition, 5) for case in cases}) == 5


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ({}, 0),
        ({"few_rows": "0"}, 0),
        ({"few_rows": "6"}, 6),
        ({"kernel_sha256": next(iter(FEW_ROWS))}, 4),
        ({"kernel_sha256": next(iter(FEW_ROWS)), "few_rows": "6"}, 6),
    ],
)
def test_few_rows_are_those_of_the_header_or_of_kernels_known_to_have_them(
    profile: Path, header: dict[str, str], rows: int
) -> None:
    read = read_profile(profile)
    without = {key: value for key, value in read.header.items() if key != "few_rows"}
    assert cutting_of(dataclasses.replace(read, header=without | header), OURO_1_4B).few_rows == rows


def test_without_kernels_for_few_rows_their_times_go_into_those_of_the_others(profile: Path) -> None:
    read = read_profile(profile)
    cutting = dataclasses.replace(cutting_of(read, OURO_1_4B), few_rows=0)
    cases = [
        Case.of(row, cutting) for row in read.rows if row.device_ns and row.stage and row.kind != "copies"
    ]
    assert fit_device(cases, TRUTH.copies).few is None


def test_half_of_a_profile_predicts_the_other_half(profile: Path) -> None:
    read = read_profile(profile)
    cutting = cutting_of(read, OURO_1_4B)
    cases = [
        Case.of(row, cutting) for row in read.rows if row.device_ns and row.stage and row.kind != "copies"
    ]
    times = fit_device(
        [case for case in cases if fold_of(case.composition, 2) == 0 or not case.loops], TRUTH.copies
    )
    errors = [
        abs(case.predicted_ns(times) / case.device_ns - 1)
        for case in cases
        if fold_of(case.composition, 2) and case.loops
    ]
    assert len(errors) > 50 and sorted(errors)[len(errors) // 2] < 1e-3 and max(errors) < 0.05


def test_the_same_profile_gives_the_same_bytes(profile: Path, tmp_path: Path) -> None:
    outs = [tmp_path / "a" / "model.json", tmp_path / "b" / "model.json"]
    assert [fit_file(profile, out)[1] for out in outs] == [False, False]
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_a_model_file_reads_back_as_it_was_written(profile: Path, tmp_path: Path) -> None:
    model, _ = fit_file(profile, tmp_path / "model.json")
    assert read_model(tmp_path / "model.json") == model


def test_a_fit_is_made_again_exactly_when_the_profile_or_the_fit_has_changed(
    profile: Path, tmp_path: Path
) -> None:
    out, copy = tmp_path / "model.json", tmp_path / "profile.csv"
    copy.write_bytes(profile.read_bytes())
    assert [fit_file(copy, out)[1], fit_file(copy, out)[1]] == [False, True]
    copy.write_text(copy.read_text().replace("# date: 2026-01-01", "# date: 2026-01-02"))
    assert fit_file(copy, out)[1] is False
    assert read_model(out).profile["date"] == "2026-01-02"
    out.write_text(json.dumps(json.loads(out.read_text()) | {"fit_version": FIT_VERSION - 1}))
    assert fit_file(copy, out)[1] is False


def test_the_command_fits_prints_the_errors_and_says_when_nothing_was_to_be_done(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("fitted", "up to date"):
        assert main(["fit", str(profile), "--out", str(tmp_path / "model.json")]) == 0
        printed = capsys.readouterr()
        assert "RECURRENT" in printed.out and word in printed.err


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"schema": "0"}, "profile schema 0, expected 1"),
        ({"model": "ouro-9b"}, "model: 'ouro-9b', expected one of ouro-1.4b, ouro-2.6b, ouro-tiny"),
        ({"dtype": "int8"}, "dtype: 'int8', expected one of bfloat16"),
        ({"tile_rows": "64 16"}, "tile_rows: '64 16', expected ascending whole numbers"),
        ({"attention_slots": ""}, "attention_slots: '', expected ascending whole numbers"),
    ],
)
def test_a_profile_that_cannot_be_fitted_is_refused_in_one_sentence(
    tmp_path: Path, profile: Path, header: dict[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = profile.read_text()
    for key, value in header.items():
        text = text.replace(f"# {key}: {HEADER[key]}\n", f"# {key}: {value}\n")
    (tmp_path / "wrong.csv").write_text(text)
    assert main(["fit", str(tmp_path / "wrong.csv"), "--out", str(tmp_path / "model.json")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "model.json").exists()


def test_a_fit_never_writes_over_its_profile(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "profile.csv"
    copy.write_bytes(profile.read_bytes())
    assert main(["fit", str(copy), "--out", str(copy)]) == 2
    assert capsys.readouterr().err == f"sim: --out {copy}: is the profile, expected a file for the model\n"
    assert copy.read_bytes() == profile.read_bytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda data: data["device"].update(launch_ns=-1.0),
            "device.launch_ns: -1.0, expected a number from 0 to",
        ),
        (
            lambda data: data["device"].update(launch_ns=math.nan),
            "NaN is no number of JSON",
        ),
        (lambda data: data["device"]["linear"]["ns"].pop(), "times, expected as many, by ascending rows"),
        (lambda data: data["device"].update(attention={}), "device.attention: is empty"),
        (lambda data: data["host"].pop("CODA"), "host.CODA: is missing"),
        (lambda data: data["profiled"].pop("tiles"), "profiled.tiles: is missing"),
        (lambda data: data["profile"].pop("date"), "profile.date: is missing"),
        (lambda data: data["model"].update(num_layers=0), "model.model.num_layers: 0, expected at least 1"),
        (
            lambda data: data["cutting"].update(row_buckets=[]),
            "cutting.row_buckets: (), expected ascending numbers from 1 on",
        ),
    ],
)
def test_a_model_file_that_no_fit_has_written_is_refused(
    model: ModelFile, tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    data = json.loads(model.to_json())
    change(data)
    (tmp_path / "model.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=re.escape(sentence)):
        read_model(tmp_path / "model.json")


def test_a_profile_without_a_stage_is_refused(tmp_path: Path, profile: Path) -> None:
    lines = profile.read_text().splitlines()
    kept = [line for line in lines if ",CODA," not in line]
    kept[-1] = f"# complete: {len([line for line in kept if not line.startswith('#')]) - 1} lines"
    (tmp_path / "wrong.csv").write_text("\n".join(kept) + "\n")
    with pytest.raises(InputError, match="no device time of a CODA batch"):
        fit_file(tmp_path / "wrong.csv", tmp_path / "model.json")
