"""The best fixed setting in hindsight is the one that trying all of them to their ends finds."""

from concurrent.futures import Executor, Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from policies.core.errors import InputError
from results.hindsight import hindsight_lines, write_hindsight
from sim.cli import main
from sim.hindsight import SLACK, STEP, Hindsight, Task, load_study, run_one, run_task

STUDY: dict[str, Any] = {
    "base": {"model": "ouro-1.4b", "scheduler": {"max_num_seqs": 16}},
    "traffic": {
        "crowd": {
            "workload": {
                "kind": "synthetic", "num_requests": 24, "arrival": {"process": "poisson", "rate": 30},
                "prompt_tokens": [900, 200, 400], "output_tokens": 6,
            }
        }
    },
    "objectives": [{"ttft_ms": 300, "itl_ms": 15, "share": 0.9}],
    "loads": [0.8, 1.3],
    "fixed": {
        "policy.name": ["split", "wcpb"], "scheduler.prefill_chunk_size": [64, 512],
        "scheduler.max_num_batched_tokens": [256, 1024],
    },
    "sized": {"policy": {"name": "slo"}, "scheduler.prefill_chunk_size": 512},
}  # fmt: skip


class Here(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def task_of(tmp_path: Path, **changes: Any) -> Task:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    (task,) = load_study(path, [], None)
    return task


def test_no_setting_of_the_grid_serves_more_than_the_best_one(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    assert len(task.fixed) == 6  # a chunk of 512 fits no batch of 256
    hindsight = Hindsight(task, Here())
    for rate in (60.0,):
        whole = [run_one(task, setting, rate, 0) for setting in task.fixed]
        _, best = hindsight.best(rate)
        assert all(served.whole for served in whole) and best.whole
        most = max(served.met for served in whole)
        assert best.met <= most <= best.met + SLACK * best.requests
    power, name = hindsight.sustained(task.fixed)
    setting = next(item for item in task.fixed if item.name == name)
    assert run_one(task, setting, hindsight.rate(power), 0).share >= 0.9
    beyond = hindsight.rate(power) * STEP
    assert all(run_one(task, setting, beyond, 0).share < 0.9 for setting in task.fixed)


def test_a_study_leaves_a_row_for_every_load_and_a_picture(tmp_path: Path) -> None:
    fixed = {"policy.name": ["wcpb"], "scheduler.prefill_chunk_size": [64, 512]}
    tight = [{"ttft_ms": 200, "itl_ms": 15, "share": 0.9}]  # within reach of no policy when all come at once
    task = task_of(tmp_path, fixed=fixed, objectives=tight)
    rows = [asdict(row) for row in run_task(task, Here(), lambda: None)]
    table, picture = write_hindsight(rows, tmp_path)
    read = pd.read_csv(table)
    assert list(read["load"]) == [0.8, 1.3] and (read["requests"] == 24).all()
    met = read["rate"] * read["sized_met"] / read["requests"]
    assert list(read["sized_goodput"]) == pytest.approx(list(met), rel=1e-4)
    assert picture.stat().st_size > 10_000 and len(hindsight_lines(rows)) == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fixed": {"policy.name": "wcpb"}}, "fixed.policy.name: 'wcpb', expected a list of values"),
        ({"loads": [0]}, "loads: .*expected factors"),
        ({"loads": []}, "loads: .*expected a list with something in it"),
        ({"objectives": [{"ttft_ms": 5}]}, "expected ttft_ms and itl_ms"),
        ({"traffic": {"crowd": 5}}, "traffic.crowd: expected a mapping with its workload"),
        ({"sized": {"policy": {"name": "slow"}}}, "unknown policy 'slow'"),
        ({"size": {}}, "unknown key 'size'"),
    ],
)
def test_a_wrong_study_is_named(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        task_of(tmp_path, **changes)


def test_objectives_that_nothing_keeps_are_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task_of(
        tmp_path,
        objectives=[{"ttft_ms": 300, "itl_ms": 0.5}],
        fixed={"policy.name": ["wcpb"], "scheduler.prefill_chunk_size": [512]},
    )
    path = str(tmp_path / "study.yaml")
    assert main(["hindsight", path, "--jobs", "1", "--out", str(tmp_path / "out")]) == 2
    assert "held at none of the rates that were tried" in capsys.readouterr().err
