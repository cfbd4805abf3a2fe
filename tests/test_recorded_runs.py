"""Every recorded run that the project ships is decided again, batch for batch."""

from pathlib import Path

import pytest
import yaml

from policies.costs.models import DEVICES, beyond_compared
from results.find import find_runs
from sim.predict import loop_weights
from sim.replay import replay

PACKS = sorted((Path(__file__).parent.parent / "results" / "reference").glob("*/recorded/*.tar.xz"))


def test_recorded_runs_are_shipped() -> None:
    assert PACKS


@pytest.mark.parametrize("path", PACKS, ids=lambda path: f"{path.parts[-3]}-{path.name}")
def test_every_batch_of_a_recorded_run_is_decided_again(path: Path) -> None:
    """Of repeats, one has kept its log; a pack without any has summaries alone."""
    runs, unfinished = find_runs([path])
    assert not unfinished
    for run in runs:
        if run.has_logs:
            outcome = replay(run.path)
            assert outcome.difference is None, str(outcome)
            assert outcome.num_batches == run.summary["num_batches"] > 0


def test_what_is_shipped_names_no_folder_of_a_machine() -> None:
    for run in find_runs(PACKS)[0]:
        text = (run.path / "config.yaml").read_text() + (run.path / "summary.json").read_text()
        assert not [word for word in ("/home", "/root", "/tmp", "/work") if word in text], run.path.name


def test_a_shipped_model_claims_to_be_compared_as_far_as_recorded_runs_go() -> None:
    known = yaml.safe_load((DEVICES / "compared.yaml").read_text())
    for card, said in known.items():
        runs = find_runs([path for path in PACKS if path.parts[-3] == card])[0]
        assert said == {"max_num_seqs": max(run.config["scheduler"]["max_num_seqs"] for run in runs)}
        assert beyond_compared(card, said["max_num_seqs"]) is None
        assert "max_num_seqs 64, this run has 65" in str(beyond_compared(card, 65))


def test_a_gate_that_was_measured_gives_a_simulation_its_weights() -> None:
    """Four policies, one gate: the tokens, and so the exits, are the same."""
    gates = [run for run in find_runs(PACKS)[0] if run.config["exit"]["mode"] == "gate"]
    assert len(gates) == 4
    assert len({loop_weights([run]) for run in gates}) == 1
    assert loop_weights(gates) == tuple(4 * count for count in loop_weights(gates[:1]))
