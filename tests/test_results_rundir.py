"""A run directory is whole, or says that it is not."""

import ast
import csv
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from results_runs import REQUESTS, config_of, identity_of, write_run

from policies.config.runconfig import parse_config
from policies.core.engine.batchlines import BATCH_COLUMNS
from policies.core.engine.runlog import RequestRecord, RunLog
from policies.core.errors import InputError
from policies.core.seam.batch import Stage
from policies.core.seam.request import Request, Status
from results import batchlog, requestlog
from results.batchlog import read_batches
from results.find import find_runs
from results.latency import Latencies
from results.load import load_run
from results.rundir import MARKER, RunDirectory

REQUEST_CONTRACT = (
    "request_id,arrival_ns,prompt_tokens,output_tokens,status,first_scheduled_ns,first_token_ns,finished_ns,"
    "preemptions"
)
BATCH_CONTRACT = "seq,stage,loop_count,num_requests,rows,submitted_ns,started_ns,finished_ns,select_ns,ranges"


def test_files_and_columns_start_as_the_contract_says(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plots=True)
    names = sorted(item.name for item in run.path.iterdir())
    assert names == ["batches.csv", "config.yaml", "plots", "requests.csv", "summary.json", "trace.json.gz"]
    assert (run.path / "requests.csv").read_text().startswith(REQUEST_CONTRACT)
    assert (run.path / "batches.csv").read_text().startswith(BATCH_CONTRACT)
    assert run.config == config_of()


def test_requests_come_back_as_they_were(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    frame = run.requests()
    assert frame["request_id"].tolist() == [0, 1, 2]
    assert frame["output_tokens"].tolist() == [request.max_tokens for request in REQUESTS]
    assert run.summary["num_finished"] == 3 and run.summary["output_tokens"] == 8
    latencies = Latencies.of_frame(frame)
    assert float(np.percentile(latencies.itl_ns, 99)) / 1e6 == run.summary["itl_ms"]["p99"]
    assert (latencies.e2e_ns >= latencies.ttft_ns).all()


def test_batches_are_counted_by_stage_and_read_back_in_order(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    batches = list(run.batches())
    assert [batch.seq for batch in batches] == list(range(run.summary["num_batches"]))
    by_stage = run.summary["num_batches_by_stage"]
    assert sum(by_stage.values()) == len(batches)
    assert by_stage["CODA"] == sum(batch.stage == Stage.CODA for batch in batches)
    pieces = list(run.batch_frames(("seq", "rows"), num_batches=7))
    assert all(len(piece) <= 7 for piece in pieces)
    assert [seq for piece in pieces for seq in piece["seq"]] == [batch.seq for batch in batches]


def test_a_loops_time_is_divided_without_losing_a_nanosecond(tmp_path: Path) -> None:
    for batch in write_run(tmp_path / "run", policy="atomic").batches():
        parts = batch.invocations()
        assert len(parts) == max(batch.loop_count, 1)
        assert (parts[0][0], parts[-1][1]) == (batch.started_ns, batch.finished_ns)
        assert all(earlier[1] == later[0] for earlier, later in itertools.pairwise(parts))


def test_an_interrupted_run_is_marked_and_keeps_what_it_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", status="interrupted", plots=True)
    assert run.summary["status"] == "interrupted"
    assert not (run.path / "plots").exists() and not (run.path / "trace.json.gz").exists()
    assert len(run.requests()) == 3


def test_a_run_that_did_not_end_does_not_look_whole(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        RunDirectory.create(config_of(), identity_of(), tmp_path / "run") as directory,
    ):
        RunLog(directory.batches)
        raise RuntimeError("the engine broke")
    with pytest.raises(InputError, match=r"has no summary\.json, so the run there did not end"):
        load_run(tmp_path / "run")


def test_running_again_replaces_the_summary_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plots=True)
    (run.path / "notes.txt").write_text("mine")
    with RunDirectory.create(config_of(), identity_of(), run.path):
        assert sorted(item.name for item in run.path.iterdir()) == [
            "batches.csv",
            "config.yaml",
            "notes.txt",
            "requests.csv",
        ]


def test_the_default_directory_is_below_results_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDirectory.create(config_of(), identity_of()) as directory:
        assert directory.path == Path("results/runs") / identity_of().directory_name


def test_foreign_directories_and_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="holds files and is not a run directory"):
        RunDirectory.create(config_of(), identity_of(), tmp_path)
    with pytest.raises(InputError, match="is a file, expected a directory"):
        RunDirectory.create(config_of(), identity_of(), tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_a_nan_never_reaches_the_summary(tmp_path: Path) -> None:
    with (
        RunDirectory.create(config_of(), identity_of(), tmp_path / "run") as directory,
        pytest.raises(ValueError, match="JSON"),
    ):
        directory.write_summary({"ttft_ms": float("nan")})
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_refused_request_has_empty_times_and_its_reason(tmp_path: Path) -> None:
    refused = RequestRecord(Request(0, 0, 10, 1), 0, Status.REFUSED, reason='needs 9, "has" 4')
    with RunDirectory.create(config_of(), identity_of(), tmp_path / "run") as directory:
        directory.requests.write(refused)
    with open(tmp_path / "run" / "requests.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["first_scheduled_ns"], row["first_token_ns"], row["token_ns"]) == ("", "", "")
    assert row["reason"] == 'needs 9, "has" 4'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", "{", "summary.json: not valid JSON"),
        ("summary.json", "[]", "holds list, expected a mapping"),
        ("summary.json", '{"policy": "wcpb"}', "summary.json: model: is missing"),
        ("config.yaml", "model: x\n", "not a run directory"),
        ("config.yaml", MARKER + "model: x\n", "workload is missing, expected the config of a run"),
        (
            "requests.csv",
            "a,b\n1,2\n",
            "requests.csv line 1: column request_id is missing, expected request_id,",
        ),
        ("batches.csv", "a,b\n1,2\n", "batches.csv line 1: column seq is missing, expected seq,"),
        (
            "batches.csv",
            ",".join(BATCH_COLUMNS) + "\n1,NAP,1,1,1,0,0,0,0,x" + "," * (len(BATCH_COLUMNS) - 10) + "\n",
            "batches.csv line 2: stage: 'NAP', expected one of PREFILL,",
        ),
        (
            "batches.csv",
            ",".join(BATCH_COLUMNS) + "\n1,CODA,0,1,1\n",
            f"batches.csv line 2: 5 fields, expected {len(BATCH_COLUMNS)}",
        ),
    ],
)
def test_damage_is_named_in_one_sentence(tmp_path: Path, name: str, text: str, message: str) -> None:
    run = write_run(tmp_path / "run", trace=False)
    (run.path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        loaded = load_run(run.path)
        loaded.requests()
        list(loaded.batches())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"batches\.csv: no such file"):
        list(read_batches(tmp_path / "batches.csv"))


def test_a_directory_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    for chunk in (4, 8):
        write_run(tmp_path / "sweep" / "cells" / f"c{chunk}", chunk=chunk)
    RunDirectory.create(config_of(), identity_of(), tmp_path / "sweep" / "cells" / "dead").batches.close()
    runs, unfinished = find_runs([tmp_path / "sweep"])
    assert [run.chunk_tokens for run in runs] == [4, 8]
    assert [path.name for path in unfinished] == ["dead"]


def test_the_same_run_gives_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    code = "import sys, pathlib; from results_runs import write_run; write_run(pathlib.Path(sys.argv[1]))"
    for seed in ("1", "2"):
        folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": folders}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], env=environment, check=True)
    for name in ("batches.csv", "requests.csv", "config.yaml", "summary.json", "trace.json.gz"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert json.loads((tmp_path / "1" / "summary.json").read_text())["status"] == "complete"


def test_the_modules_of_results_import_one_another_without_a_circle() -> None:
    folder = Path(__file__).parent.parent / "results"
    imports: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        imports[name] = {
            node.module
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("results")
        }
    while leaves := {name for name, needed in imports.items() if not needed & imports.keys()}:
        for name in leaves:
            del imports[name]
    assert imports == {}


def test_one_module_opens_the_logs_of_a_run_to_read_them() -> None:
    """`frames` reads whole columns by pandas and asks it for every fault; packs keep bytes; a profiling run
    looks at its own log before it is a file; a report reads the table of a capacity search, no log."""
    root = Path(__file__).parent.parent
    opens = re.compile(r"csv\.(reader|DictReader)\(|read_csv\(")
    found = {
        path.relative_to(root).as_posix()
        for folder in ("results", "sim", "executor")
        for path in (root / folder).rglob("*.py")
        if opens.search(path.read_text(encoding="utf-8"))
    }
    found -= {"executor/lab/profiling/engine_runs.py", "results/report.py"}
    assert found == {"results/csvlog.py", "results/frames.py", "results/logcode.py", "results/profile.py"}


def test_logs_recorded_before_a_column_existed_read_as_if_it_were_empty_and_are_replayed(
    tmp_path: Path,
) -> None:
    from sim.replay import replay
    from sim.run import simulate

    raw = {
        "model": "ouro-tiny",
        "policy": "wcpb",
        "workload": {"kind": "synthetic", "num_requests": 5, "prompt_tokens": 40, "output_tokens": 3},
    }
    path, _ = simulate(parse_config(raw, tmp_path, "test"), tmp_path / "run", plots=False)
    for name, columns in (("batches.csv", batchlog.COLUMNS), ("requests.csv", requestlog.COLUMNS)):
        header, *rows = csv.reader((path / name).read_text().splitlines())
        kept = [at for at, column in enumerate(header) if column not in columns.later]
        assert len(header) - len(kept) == len(columns.later) > 0
        with open(path / name, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [row[at] for at in kept] for row in (header, *rows)
            )
    run = load_run(path)
    assert {batch.fields["reused"] for batch in run.batches()} == {""}
    assert {batch.exits for batch in run.batches()} == {frozenset()}
    (frame,) = run.batch_frames(("seq", "grown"))
    assert frame["grown"].tolist() == [""] * run.summary["num_batches"]
    assert run.requests()["content"].tolist() == [""] * 5
    outcome = replay(path)
    assert outcome.difference is None and outcome.num_batches == run.summary["num_batches"]
