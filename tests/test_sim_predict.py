"""What the simulator says of recorded runs: every batch that it simulated itself is predicted to the
nanosecond."""

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic_profile import write_profile
from worlds import spelled

from policies.config.runconfig import parse_config
from policies.registry import POLICIES
from sim.cli import main
from sim.fit import fit_file
from sim.run import simulate

ARRIVALS = {
    "open": {"process": "poisson", "rate": 120},
    "closed": {"process": "closed", "concurrency": 2},
    "burst": {"process": "burst"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fitted latency model: an idle device waits for launches, the host takes its time between batches,
    always the same."""
    place = tmp_path_factory.mktemp("model")
    fit_file(write_profile(place / "profile.csv", host_spread=0.0), place / "card.json")
    return place / "card.json"


def config_of(device: str, policy: Any, inflight: int, arrival: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "ouro-1.4b",
        "device": device,
        "policy": policy,
        "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 64, "prefill_chunk_size": 16,
        "inflight": inflight},
        "workload": {
            "kind": "synthetic", "num_requests": 9, "arrival": arrival, "prompt_tokens": [37, 120, 5],
            "output_tokens": [4, 1, 3],
        },
    }  # fmt: skip


def predicted_and_measured(out: Path, run: Path, device: str | None = None) -> pd.DataFrame:
    options = ["--device", device] if device else []
    assert main(["predict", str(run), "--out", str(out), "--jobs", "1", *options]) == 0
    (cell,) = (out / "cells").iterdir()
    return pd.read_csv(cell / "predicted.csv").merge(
        pd.read_csv(run / "batches.csv"), on="seq", suffixes=("", "_logged")
    )


@pytest.mark.filterwarnings("ignore:.*beyond")
@pytest.mark.parametrize("loop", ARRIVALS)
@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_simulated_batch_is_predicted_exactly(
    tmp_path: Path, model: Path, policy: str, inflight: int, loop: str
) -> None:
    raw = config_of(str(model), spelled(policy), inflight, ARRIVALS[loop])
    run, summary = simulate(parse_config(raw, tmp_path, "test"), tmp_path / "run", plots=False)
    both = predicted_and_measured(tmp_path / "sim", run)
    assert len(both) == summary["num_batches"]
    assert both["device_ns"].tolist() == (both["finished_ns"] - both["started_ns"]).tolist()
    for name in ("select_ns", "host_ns", "launch_ns", "linear_ns", "attention_ns"):
        assert both[name].tolist() == both[f"{name}_logged"].tolist()
    if inflight == 1:
        assert (both["launch_ns"] > both["launch_ns"].min()).any(), "no batch waited for its launch"


def test_another_device_predicts_other_times_of_the_same_batches(tmp_path: Path) -> None:
    raw = config_of("h200", "wcpb", 2, ARRIVALS["open"])
    run, _ = simulate(parse_config(raw, tmp_path, "test"), tmp_path / "run", plots=False)
    both = predicted_and_measured(tmp_path / "sim", run, "roofline:l4")
    recurrent = both[both["loop_count"] > 0]
    assert (recurrent["device_ns"] > recurrent["finished_ns"] - recurrent["started_ns"]).all()
    (cell,) = (tmp_path / "sim" / "cells").iterdir()
    assert json.loads((cell / "replay.json").read_text()) == [
        {"run": "run", "num_batches": len(both), "difference": None}
    ]
    assert "device: roofline:l4" in (cell / "config.yaml").read_text()


def test_predictions_stop_where_the_decisions_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = simulate(
        parse_config(config_of("h200", "split", 2, ARRIVALS["burst"]), tmp_path, "test"),
        tmp_path / "run",
        plots=False,
    )
    lines = (run / "batches.csv").read_text().splitlines(keepends=True)
    fields = lines[8].split(",")
    fields[4] = str(int(fields[4]) + 1)
    (run / "batches.csv").write_text("".join([*lines[:8], ",".join(fields), *lines[9:]]))
    assert main(["predict", str(run), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 1
    assert "7 batches are equal; batch 7 differs in rows" in capsys.readouterr().out
    (cell,) = (tmp_path / "sim" / "cells").iterdir()
    with open(cell / "predicted.csv", newline="") as file:
        assert [row["seq"] for row in csv.DictReader(file)] == [str(seq) for seq in range(7)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere", "--out", "x"), "nowhere: no such directory"),
        (("{run}", "--out", "{tmp}/x", "--device", "h2OO"), "device: unknown device 'h2OO'"),
        (("{run}", "--out", "{tmp}/x", "--jobs", "0"), "--jobs: 0, expected -1 or a number of processes"),
        (("{run}", "--out", "{run}/requests.csv"), "requests.csv"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    run, _ = simulate(
        parse_config(config_of("h200", "split", 2, ARRIVALS["burst"]), tmp_path, "test"),
        tmp_path / "run",
        plots=False,
    )
    assert main(["predict", *(item.format(run=run, tmp=tmp_path) for item in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and sentence in err
