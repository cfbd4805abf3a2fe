"""Every recorded run that the project ships is decided again, batch for batch."""

from pathlib import Path

import pytest

from results.find import find_runs
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
