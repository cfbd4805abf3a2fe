"""A card that nobody has profiled: a known device scaled by datasheets, called a transfer where it shows."""

import io
import warnings
from pathlib import Path

import pytest
import yaml

from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from policies.core.models.shape import OURO_1_4B
from policies.costs.devices import datasheet_of, device_facts
from policies.costs.models import device_sha256, load_device
from policies.costs.transfer import TransferModel, known_errors, standard_batches
from results.cli import main as results_main
from results.table import print_table
from sim.cli import main
from sim.run import simulate

MEMORY_BOUND, *_, COMPUTE_BOUND = list(standard_batches())[:7]
TINY = {
    "device": {"like": "h200", "card": "h100"},
    "policy": "wcpb",
    "cache": {"num_blocks": 2000},
    "workload": {"kind": "synthetic", "num_requests": 2, "prompt_tokens": 40, "output_tokens": 3},
}


def test_components_scale_with_bandwidth_or_peak_and_the_host_stays() -> None:
    known, moved = load_device("h200", OURO_1_4B), load_device("transfer:h200:h20", OURO_1_4B)
    for work, factor in ((MEMORY_BOUND, 4.8 / 4.0), (COMPUTE_BOUND, 989 / 148)):
        before, after = known.predict(work), moved.predict(work)
        assert after.components_ns[1] == pytest.approx(factor * before.components_ns[1], rel=1e-6)
        assert after.components_ns[-1] == before.components_ns[-1]
        assert after[2:] == before[2:]
        assert after.limit_ns <= after.device_ns
    assert moved.loop == known.loop
    assert moved.facts.bandwidth_bytes_per_s == pytest.approx(4.0e12 * 4.22 / 4.8)
    assert moved.facts.memory_bytes == 96 * 10**9


def test_a_transfer_to_its_own_card_changes_no_prediction() -> None:
    for name, card in (("h200", "h200"), ("h200-analytic", "h200-sxm"), ("a100-seed", "a100-80gb")):
        known, moved = load_device(name, OURO_1_4B), load_device(f"transfer:{name}:{card}", OURO_1_4B)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for work in standard_batches():
                assert moved.predict(work).components_ns == known.predict(work).components_ns


def test_every_card_of_the_catalogue_says_where_its_figures_are_from() -> None:
    for card in ("h100", "a100-80gb", "h20", "b200", "l40s", "mi300x"):
        assert "https://" in datasheet_of(card).source
        assert isinstance(load_device(f"transfer:h200:{card}", OURO_1_4B), TransferModel)
    assert device_facts("h100").source == device_facts("h100-sxm").source


def test_the_known_errors_are_printed_and_said_with_every_transfer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    errors = known_errors(load_device)
    assert [item.is_same_card for item in errors] == [False, False, True]
    assert abs(errors[2].median) < 0.05 < abs(errors[0].median)
    assert main(["transfer"]) == 0
    printed = capsys.readouterr().out
    provenance = load_device("transfer:h200:b200", OURO_1_4B).provenance
    for item in errors:
        assert f"{item.median:+.1%}" in printed and f"{item.total:+.1%}" in printed
        assert item.is_same_card or f"{item.median:+.0%} off {item.truth}" in provenance


def test_a_run_is_called_a_transfer_in_name_summary_table_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, summary = simulate(parse_config(TINY, tmp_path, "x.yaml"), None, plots=False)
    assert (
        path.name.startswith("ouro-1.4b-transfer-h200-h100-wcpb")
        and summary["device"] == "transfer:h200:h100"
    )
    assert any(
        "is a transfer, not a measurement" in note and "% off a100-seed" in note for note in summary["notes"]
    )
    table = io.StringIO()
    print_table([summary], table)
    assert "on transfer:h200:h100" in table.getvalue()
    assert results_main(["report", str(path), "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "on transfer:h200:h100" in page and "is a transfer, not a measurement" in page


def test_a_transfer_follows_from_the_device_and_the_catalogue() -> None:
    names = ("transfer:h200:h100", "transfer:h200-analytic:h100", "h200", "roofline:h100")
    assert len({device_sha256(name) for name in names}) == 4


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ({"like": "h200"}, "device.card"),
        ({"like": "h200", "card": "h100", "to": 1}, "unknown key 'device.to'"),
        ({"like": 1, "card": "h100"}, "device.like"),
        ("transfer:h200", "expected transfer:DEVICE:CARD"),
        ("transfer:roofline:h200:h100", "expected transfer:DEVICE:CARD with a device that was measured"),
        ({"like": "h200", "card": "h1000"}, "unknown card 'h1000'"),
        ({"like": "h2000", "card": "h100"}, "unknown device 'h2000'"),
    ],
)
def test_a_wrong_transfer_is_one_sentence(device: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as found:
        config = parse_config({**TINY, "device": device}, tmp_path, "x.yaml")
        load_device(config.device, OURO_1_4B)
    assert sentence in str(found.value) and len(str(found.value)) < 400


def test_the_path_of_a_model_file_is_that_of_the_config(tmp_path: Path) -> None:
    for device in ({"like": "m.json", "card": "h100"}, "transfer:m.json:h100"):
        config = parse_config({**TINY, "device": device}, tmp_path, "x.yaml")
        assert config.device == config.resolved["device"] == f"transfer:{tmp_path / 'm.json'}:h100"


def test_a_table_and_a_capacity_say_that_the_error_of_a_transfer_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({**TINY, "slo": {"ttft_ms": 1e6}}))
    common = ["--jobs", "1", "--seeds", "1", "--out", str(tmp_path / "out")]
    words = "transfer:h200:h100 is scaled by datasheets, not measured"
    assert (
        main(["capacity", str(path), "--set", "workload.arrival={process: constant, rate: 9}", *common]) == 0
    )
    assert words in capsys.readouterr().err
    assert words in (tmp_path / "out" / "best.yaml").read_text()
    assert words in (tmp_path / "out" / "capacity.json").read_text()
    assert main(["run", str(path), "--no-plots", "--out", str(tmp_path / "run")]) == 0
    assert words in capsys.readouterr().out
