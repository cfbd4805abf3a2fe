"""Whatever is in the files of a run directory: a command ends with 0, 1 or 2, in one short line, never with a
traceback."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from results_runs import write_run

from results.cli import main
from results.frames import requests_frame
from results.load import Run, load_run
from results.predictions import PREDICTED_COLUMNS, read_predictions, read_replays

WRONG = (None, "x", "1", True, -1, 1.5, [], {}, [1], {"a": None}, 10**400, 1e308, float("nan"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("whole") / "run", trace=False)


@pytest.fixture
def run(whole: Run, tmp_path: Path) -> Path:
    shutil.copytree(whole.path, tmp_path / "run")
    return tmp_path / "run"


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([str(item) for item in arguments])
    err = capsys.readouterr().err
    assert status in (0, 1, 2), arguments
    if status == 2:
        assert err.count("\n") == 1 and len(err) < 400 + len(str(arguments)), err
    return status, err


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from places_in(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    found = json.loads(json.dumps(value))
    at = found
    for key in path[:-1]:
        at = at[key]
    if new is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return found


def test_a_summary_with_any_one_field_absent_or_anything_else_is_read_or_refused_by_name(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading alone decides: what is let through is shown by a table and a bar of time without a fault."""
    from results.plots.account import _beside, account
    from results.report import provenance
    from results.table import comparison_table

    summary = json.loads((run / "summary.json").read_text())
    num_refused = 0
    for path in places_in(summary):
        for new in (..., *WRONG):
            (run / "summary.json").write_text(json.dumps(changed(summary, path, new)))
            try:
                loaded = load_run(run)
            except Exception as error:
                assert type(error).__name__ == "InputError", (path, new, error)
                assert "\n" not in str(error) and len(str(error)) < 400 + len(str(run))
                num_refused += 1
                continue
            comparison_table([loaded.summary, loaded.summary])
            account(loaded.summary)
            _beside(loaded.summary)
            list(provenance([loaded], ["run"]))
    assert num_refused > 300


@pytest.mark.parametrize("key", ["prefill_chunk_size", "num_loops", "stages", "ttft_ms", "status", "notes"])
@pytest.mark.parametrize("new", [None, "x", -1, 1.5, {"RECURRENT": None}])
def test_report_and_plot_name_the_field_that_is_wrong(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, new: object
) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, key: new}))
    for command in (("report", run), ("plot", run), ("plot", run, "--time"), ("plot", run, "--latency")):
        status, err = outcome(capsys, *command, "--out", tmp_path / "x.png")
        if (key, new) != ("status", "x"):
            assert status == 2 and "summary.json: " in err and key in err


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"num_loops": ' + "9" * 5000 + "}",
        "\x00",
        '{"policy": "a", "policy": "b"}',
        "null",
        "",
    ],
    ids=["depth", "depth-of-keys", "digits", "nul", "twice", "null", "empty"],
)
def test_a_summary_that_is_none_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (run / "summary.json").write_text(text)
    status, err = outcome(capsys, "report", run, "--out", tmp_path / "r.html")
    assert status == 2 and "summary.json: " in err and not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    "text", ["workload: {}\npolicy: []\n", "a: 2026-13-01\n", "- 1\n", "cache: 1\nworkload: {}\npolicy: {}\n",
             "[" * 5000, "x: !!int x\n", "x: 0x_\n", "\x07"]
)  # fmt: skip
def test_a_config_that_is_none_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    marker = (run / "config.yaml").read_text().splitlines(keepends=True)[0]
    (run / "config.yaml").write_text(marker + text)
    status, err = outcome(capsys, "report", run, "--out", tmp_path / "r.html")
    assert status == 2 and "config.yaml: " in err


@pytest.mark.parametrize("column", ["loop_count", "rows", "started_ns", "finished_ns", "seq", "host_ns"])
@pytest.mark.parametrize("text", ["", "x", "1.5", "9" * 30, "1_0", " 1"])
def test_a_batch_that_is_none_is_named_with_line_and_column_before_anything_is_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, text: str
) -> None:
    lines = [line.split(",") for line in (run / "batches.csv").read_text().splitlines()]
    lines[3][lines[0].index(column)] = text
    (run / "batches.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    assert main(["plot", str(run), "--out", str(tmp_path / "x.png")]) == 2
    err = capsys.readouterr().err
    shown = text if len(text) < 80 else text[:80]
    assert f"batches.csv line 4: {column}: {shown!r}, expected a whole number" in err
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"batches.csv line 4: {column}: " in err and not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(("column", "text"), [("arrival_ns", ""), ("finished_ns", "x"), ("priority", "a")])
def test_a_request_that_is_none_is_named_with_line_and_column(run: Path, column: str, text: str) -> None:
    lines = [line.split(",") for line in (run / "requests.csv").read_text().splitlines()]
    lines[2][lines[0].index(column)] = text
    (run / "requests.csv").write_text("".join(",".join(line) + "\n" for line in lines))
    with pytest.raises(Exception, match=rf"requests.csv line 3: {column}: '{text}', expected a whole number"):
        requests_frame(run / "requests.csv")


def test_a_reason_that_pandas_takes_for_nothing_stays_a_reason(run: Path) -> None:
    text = (run / "requests.csv").read_text()
    (run / "requests.csv").write_text(text.replace(",0,,", ",0,NA,", 1))
    assert requests_frame(run / "requests.csv")["reason"].tolist()[0] == "NA"


def test_a_log_cut_inside_a_line_or_with_a_column_twice_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_text = (run / "batches.csv").read_text()
    for text, complaint in (
        (whole_text[:-1], "its last line has no end, so the file was cut"),
        (whole_text.replace("reused", "rows", 1), "column rows is there twice"),
        (whole_text.replace("\n0,", '\n"0,', 1), "is not a CSV file"),
    ):
        (run / "batches.csv").write_text(text)
        status, err = outcome(capsys, "report", run, "--out", tmp_path / "r.html")
        assert status == 2 and complaint in err


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"run": 1}]', '[{"run": "a", "num_batches": "1", "difference": null}]']
)
def test_a_replay_that_is_none_is_one_line(run: Path, text: str) -> None:
    (run / "replay.json").write_text(text)
    with pytest.raises(Exception, match=r"replay.json: ") as caught:
        read_replays(run)
    assert type(caught.value).__name__ == "InputError" and "\n" not in str(caught.value)


def test_a_prediction_that_is_none_is_named_with_line_and_column(run: Path) -> None:
    header = ",".join(PREDICTED_COLUMNS)
    for text, complaint in (
        ("", "column seq is missing"),
        (header + "\n1,2\n", "line 2: 2 fields, expected"),
        (
            header + "\n" + "1," * (len(PREDICTED_COLUMNS) - 1) + "x\n",
            f"line 2: {PREDICTED_COLUMNS[-1]}: 'x'",
        ),
    ):
        (run / "predicted.csv").write_text(text)
        with pytest.raises(Exception, match=rf"predicted.csv.*{complaint}") as caught:
            read_predictions(run)
        assert type(caught.value).__name__ == "InputError"
