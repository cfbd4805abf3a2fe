"""The fitted model at work: monotone, explained, honest about its range, refused where it does not apply; and
a run on it."""

import dataclasses
import json
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_profile import BUCKETS, TRUTH, decodes, prompts, write_profile

from policies.config.runconfig import parse_config
from policies.core.engine.batchlines import ranges_text
from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B, OURO_2_6B, OURO_TINY
from policies.core.seam.batch import Stage, Work
from policies.core.seam.events import COMPONENTS
from policies.costs.fitted import FittedModel
from policies.costs.modelfile import FIT_VERSION, Table
from policies.costs.models import load_device
from sim.cli import main
from sim.explain import explain
from sim.fit import fit_file
from sim.run import inputs_sha256
from sim.sweeping import load_cells


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    fit_file(write_profile(place / "profile.csv"), place / "card.json")
    return place / "card.json"


@pytest.fixture(scope="module")
def model(path: Path) -> FittedModel:
    latency = load_device(str(path), OURO_1_4B)
    assert isinstance(latency, FittedModel)
    return latency


def edited(path: Path, out: Path, *keys: str, value: object) -> Path:
    """A copy of the model file at `path` with one value changed."""
    data = json.loads(path.read_text())
    node = data
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    out.write_text(json.dumps(data))
    return out


def test_more_rows_never_take_less_time(model: FittedModel) -> None:
    times = [
        model.predict(Work.of(Stage.PREFILLING_RECURRENT, 1, prompts([(0, 16)] * rows))).device_ns
        for rows in range(1, 120)
    ]
    assert times == sorted(times)
    assert all(
        low.components_ns[1] <= high.components_ns[1] for low, high in pairwise(_predictions(model, BUCKETS))
    )


def _predictions(model: FittedModel, rows: tuple[int, ...]) -> list:  # type: ignore[type-arg]
    return [model.predict(Work.of(Stage.PREFILLING_RECURRENT, 1, prompts([(0, count)]))) for count in rows]


@pytest.mark.parametrize("count", [1, 4, 8])
def test_more_context_never_takes_less_time(model: FittedModel, count: int) -> None:
    times = [
        model.predict(
            Work.of(Stage.RECURRENT, 1, tuple(item._replace(token_start=at) for item in decodes(count, 1)))
        ).device_ns
        for at in range(0, 9000, 64)
    ]
    assert times == sorted(times)


def test_a_table_is_linear_between_its_entries_and_goes_on_at_the_slope_of_its_last_doubling() -> None:
    table = Table((2, 4, 6, 8), (10.0, 20.0, 60.0, 70.0))
    assert [table.at(rows) for rows in (1, 2, 3, 4, 5, 8, 10)] == [10.0, 10.0, 15.0, 20.0, 40.0, 70.0, 95.0]


def test_more_loops_take_more_time_and_only_the_launch_once(model: FittedModel) -> None:
    one, four = (model.predict(Work.of(Stage.PREFILL, loops, prompts([(64, 64)]))) for loops in (1, 4))
    launch = round(model.file.device.launch_ns)
    assert abs((four.device_ns - launch) - 4 * (one.device_ns - launch)) <= 8


@given(
    st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 200)), min_size=1, max_size=8),
    st.sampled_from(
        [
            (Stage.RECURRENT, 1),
            (Stage.PREFILL, 4),
            (Stage.PREFILLING_PRELUDE, 0),
            (Stage.CODA, 0),
            (Stage.PRELUDE, 0),
        ]
    ),
)
def test_a_prediction_is_never_negative_never_below_nothing_and_its_parts_add_up(
    model: FittedModel, spans: list[tuple[int, int]], kind: tuple[Stage, int]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prediction = model.predict(Work.of(*kind, prompts(spans)))
    breakdown = prediction.breakdown()
    assert all(value >= 0 for value in breakdown.values())
    assert sum(breakdown[name] for name in COMPONENTS) == prediction.device_ns > 0
    assert model.predict(Work.of(*kind, prompts(spans))) == prediction


def test_beyond_the_profile_it_warns_once_with_the_numbers(path: Path) -> None:
    latency = load_device(str(path), OURO_1_4B)
    with pytest.warns(
        UserWarning, match=r"card\.json: a batch has tiles 30558, profiled 1 to \d+; extrapolated"
    ):
        latency.predict(Work.of(Stage.RECURRENT, 1, decodes(32, 60_000)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        latency.predict(Work.of(Stage.RECURRENT, 1, decodes(32, 61_000)))


def test_within_the_profile_nothing_is_warned_of(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_device(str(path), OURO_1_4B).predict(Work.of(Stage.RECURRENT, 1, decodes(8, 4000)))


def test_a_model_with_twice_the_layers_takes_twice_as_long_in_them_and_says_so(
    path: Path, model: FittedModel
) -> None:
    larger = load_device(str(path), OURO_2_6B)
    one, two = (
        latency.predict(Work.of(Stage.RECURRENT, 1, decodes(8, 700))).breakdown()
        for latency in (model, larger)
    )
    assert abs(two["linear"] - 2 * one["linear"]) <= 1 and abs(two["attention"] - 2 * one["attention"]) <= 1
    assert two["launch"] == one["launch"]
    assert "scaled from the 24 layers of ouro-1.4b to 48" in larger.provenance


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("schema",), 0, "schema: 0, expected 1: fit the profile again"),
        (
            ("fit_version",),
            FIT_VERSION + 1,
            f"fit_version: {FIT_VERSION + 1}, expected {FIT_VERSION}: fit the profile again",
        ),
        (("device", "launch_ns"), "much", "model.device.launch_ns: 'much', expected a valid number"),
        (
            ("profile", "gpu"),
            "Toaster",
            "fitted on 'Toaster', which policies/costs/devices.yaml does not know",
        ),
        (("model", "head_dim"), 64, "fitted for ouro-1.4b with head_dim 64, ouro-1.4b has 128"),
    ],
)
def test_a_file_of_another_fit_card_or_shape_is_refused_in_one_sentence(
    path: Path, tmp_path: Path, keys: tuple[str, ...], value: object, sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_device(str(edited(path, tmp_path / "wrong.json", *keys, value=value)), OURO_1_4B)
    assert sentence in str(caught.value)


def test_another_model_a_missing_file_and_a_file_of_something_else_are_refused(
    path: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"was fitted for ouro-1\.4b with vocab_size 49152, ouro-tiny has 512"
    ):
        load_device(str(path), OURO_TINY)
    with pytest.raises(InputError, match="no such file, expected a model file"):
        load_device(str(tmp_path / "none.json"), OURO_1_4B)
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(InputError, match="not valid JSON"):
        load_device(str(tmp_path / "text.json"), OURO_1_4B)


def test_a_run_on_another_card_or_with_other_kernels_is_told_from_one_that_the_profile_speaks_of(
    model: FittedModel,
) -> None:
    kernels = model.file.profile["kernel_sha256"]
    assert model.difference({"card": "NVIDIA H200", "kernel_sha256": kernels}) is None
    assert model.difference({}) is None
    assert "fitted on card NVIDIA H200, the run had NVIDIA L4" in (
        model.difference({"card": "NVIDIA L4"}) or ""
    )
    assert f"fitted on kernel_sha256 {kernels[:16]}, the run had fedcba" in (
        model.difference({"kernel_sha256": "fedcba"}) or ""
    )


@pytest.mark.parametrize("name", ["PROFILED", "h200", "h200-2026-11-30"])
def test_an_explanation_adds_up_to_the_prediction(path: Path, name: str) -> None:
    device = str(path) if name == "PROFILED" else name
    model = load_device(device, OURO_1_4B)
    assert isinstance(model, FittedModel)
    ranges = (*decodes(3, 5000), prompts([(640, 128)])[0]._replace(request_id=9))
    found = explain(device, ranges_text(ranges), None, None)
    assert (found.work.stage, found.work.loop_count) == (Stage.RECURRENT, 1)
    assert found.prediction == model.predict(Work.of(Stage.RECURRENT, 1, ranges))
    by_component: dict[str, float] = {}
    for term in found.terms:
        by_component[term.component] = by_component.get(term.component, 0.0) + term.ns
    breakdown = found.prediction.breakdown()
    assert by_component["attention path"] > 0
    assert abs(breakdown["linear"] - by_component.pop("linear")) <= 1
    assert abs(breakdown["attention"] - sum(by_component.values())) <= 1
    assert found.beyond is None and found.errors == model.file.errors_by_stage[Stage.RECURRENT]


def test_few_rows_are_explained_by_their_history_tiles_and_by_the_splits_they_are_joined_from(
    path: Path, model: FittedModel
) -> None:
    """3 rows at 5000 to 5140 end in the history tiles 78, 79 and 80, each of 10 or 11 splits."""
    ranges = decodes(3, 5000)
    found = explain(str(path), ranges_text(ranges), None, None)
    terms = {term.component: (term.value, term.ns) for term in found.terms}
    assert model.file.device.few is not None
    tiles = sum((item.token_start // 64) + 1 for item in ranges)
    splits = max(item.token_start // 512 + 1 for item in ranges)
    assert terms["attention total"] == (tiles, tiles * model.file.device.few.tile_ns)
    assert terms["attention combine"] == (splits, splits * model.file.device.few.split_ns)
    assert terms.keys() == {"linear", "attention total", "attention combine"}


def test_the_explain_command_prints_components_limit_coefficients_error_and_range(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = " ".join(f"{request}:RECURRENT:2:511:1" for request in range(5))
    assert main(["explain", str(path), "--batch", batch]) == 0
    printed = capsys.readouterr().out
    for words in (
        "x its limit of",
        "linear",
        "attention path",
        "8 x 30.000",
        "held out of the fit: median",
        "inside the profiled range",
    ):
        assert words in printed
    assert main(["explain", str(path), "--batch", "0:PREFILL:0:0:60000"]) == 0
    assert "outside the profiled range: bucket 60000, profiled 1 to 2048" in capsys.readouterr().out


def test_the_explain_command_answers_in_json_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(path), "--batch", "0:CODA:0:1023:1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["stage"], data["loop_count"], data["device_ns"]) == ("CODA", 0, round(TRUTH.coda.at(1)))
    assert data["components_ns"]["lm_head"] == data["device_ns"] and data["beyond_profile"] is None
    assert main(["explain", "roofline:h200", "--batch", "0:PREFILL:1:0:64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["loop_count"], data["terms_of_one_invocation"], data["held_out_errors"]) == (3, [], None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--batch", "0:RECURRENT:0:5"], "not enough values to unpack"),
        (["--batch", "0:DECODE:0:5:1"], "'DECODE' is not a valid Stage"),
        (["--batch", "0:RECURRENT:4:5:1"], "a range of 1 tokens from 5 at depth 4"),
        (
            ["--batch", "0:RECURRENT:0:5:1", "--loops", "0"],
            "--loops 0: expected at least 1 for a RECURRENT batch",
        ),
        (["--batch", "0:RECURRENT:1:5:1", "--loops", "4"], "--loops 4: expected at most 3 from depth 1 of 4"),
        (["--batch", "0:RECURRENT:0:5:1 1:CODA:0:5:1"], "stages CODA, RECURRENT share no batch"),
        (["--batch", "0:CODA:0:5:1", "--loops", "2"], "--loops 2: expected 0 for a CODA batch"),
    ],
)
def test_a_batch_that_is_none_is_refused_in_one_sentence(
    path: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(path), *options]) == 2
    assert sentence in capsys.readouterr().err


CONFIG = """\
base:
  model: ouro-1.4b
  device: card.json
  scheduler: {max_num_seqs: 2, max_num_batched_tokens: 32, prefill_chunk_size: 8}
  workload: {kind: synthetic, num_requests: 3, prompt_tokens: [20, 9], output_tokens: 2}
grid:
  policy.name: [atomic, wcpb]
"""


def test_a_run_takes_a_model_file_beside_its_config_and_a_changed_one_makes_its_results_stale(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "card.json").write_bytes(path.read_bytes())
    (tmp_path / "grid.yaml").write_text(CONFIG)
    cell = load_cells(tmp_path / "grid.yaml", (), tmp_path / "out")[0]
    assert cell.config.device == str((tmp_path / "card.json").resolve())
    before = inputs_sha256(cell.config)
    edited(path, tmp_path / "card.json", "device", "launch_ns", value=1.0)
    assert inputs_sha256(cell.config) != before


def test_a_simulated_run_names_the_profile_behind_its_times(path: Path, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_bytes(path.read_bytes())
    (tmp_path / "run.yaml").write_text(
        "device: card.json\nworkload: {kind: synthetic, num_requests: 2, prompt_tokens: 20, "
        "output_tokens: 3}\n"
    )
    assert main(["run", str(tmp_path / "run.yaml"), "--no-plots", "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["device"] == "card"
    assert "fitted on one NVIDIA H200 (profile of 2026-01-01" in summary["notes"][0]


def test_devices_are_told_apart_by_config_and_by_content(path: Path, tmp_path: Path) -> None:
    raw = {
        "device": str(path),
        "workload": {"kind": "synthetic", "num_requests": 1, "prompt_tokens": 4, "output_tokens": 1},
    }
    config = parse_config(raw, tmp_path, "here")
    assert inputs_sha256(config) == inputs_sha256(dataclasses.replace(config, seed=5))
    assert inputs_sha256(config) != inputs_sha256(dataclasses.replace(config, device="h200"))
