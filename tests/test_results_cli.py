"""`python -m results` as a user meets it: a table, a page, a picture, and one line for every mistake."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from results_runs import write_run

from policies.core.seam.request import Request
from results.cli import main
from results.table import print_table, table_lines

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    for policy in ("wcpb", "atomic"):
        for chunk in (4, 8):
            write_run(folder / f"{policy}-{chunk}", policy, chunk, trace=False)
    write_run(
        folder / "single",
        "wcpb",
        4,
        [Request(0, 0, 24, 1), Request(1, 0, 90_000, 1)],
        "single <&>",
        trace=False,
    )
    return folder


def status_of(*arguments: object) -> int:
    """Exit status of a command, however it ends."""
    try:
        return main([str(item) for item in arguments])
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


def test_report_prints_a_table_and_writes_one_page_that_needs_nothing_else(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "report.html"
    assert status_of("report", sweep, "--out", page) == 0
    printed = capsys.readouterr()
    assert printed.out.count("wcpb") == 3 and printed.out.count("atomic") == 2
    assert (
        max(map(len, printed.out.splitlines())) > 120 and "…" not in printed.out and "\x1b" not in printed.out
    )
    text = page.read_text()
    assert not re.search(r"<[a-z]+[^>]*(src|href)=", text.split("<script>")[0]) and len(text) < 3_000_000
    assert "single &lt;&amp;&gt;" in text and "single <&>" not in text
    assert "the context holds" in text


def test_the_best_of_a_workload_is_marked_and_runs_come_in_menu_order(sweep: Path) -> None:
    from results.find import find_runs

    summaries = [run.summary for run in find_runs([sweep])[0]]
    lines = [line for line in table_lines(summaries) if line.workload == "toy"]
    assert [(line.policy, line.chunk) for line in lines] == [
        ("atomic", "4"),
        ("wcpb", "4"),
        ("atomic", "8"),
        ("wcpb", "8"),
    ]
    throughput = {float(line.cells[1][0].replace(",", "")): line.cells[1][1] for line in lines}
    assert [value for value, is_best in throughput.items() if is_best] == [max(throughput)]
    (single,) = (line for line in table_lines(summaries) if line.workload != "toy")
    assert single.requests == "1 + 1 refused"
    assert [text for text, _ in single.cells[7:10]] == ["-", "-", "-"]
    assert not any(is_best for _, is_best in single.cells)


def test_a_run_that_did_not_complete_says_so_and_wins_nothing(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", "wcpb"), write_run(tmp_path / "b", "atomic", status="interrupted")]
    file = io.StringIO()
    print_table([run.summary for run in runs], file)
    assert "atomic (interrupted)" in file.getvalue()
    assert not any(
        is_best for line in table_lines([run.summary for run in runs]) for _, is_best in line.cells
    )


@pytest.mark.parametrize(
    "kind",
    [(), ("--wavefront", "--from-batch", 2, "--to-batch", 9), ("--latency",), ("--rows",), ("--pareto",)],
)
def test_plot_draws_every_kind(sweep: Path, tmp_path: Path, kind: tuple[object, ...]) -> None:
    picture = tmp_path / "picture.png"
    assert status_of("plot", sweep / "atomic-4", sweep / "wcpb-4", *kind, "--out", picture) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "nowhere"), "nowhere: no such directory"),
        (("report",), "the following arguments are required: DIR"),
        (("contrast", "a", "b"), "invalid choice: 'contrast'"),
        (("compare", "{sweep}", "nowhere"), "nowhere: no such directory"),
        (
            ("compare", "{sweep}", "{sweep}", "--p50", "-1"),
            "--p50: -1.0, expected a percentage of at least 0",
        ),
        (
            ("compare", "{sweep}", "{sweep}", "--rank-gap", "nan"),
            "--rank-gap: nan, expected a percentage of at least 0",
        ),
        (("plot", "{sweep}/wcpb-4"), "required: --out"),
        (("plot", "{sweep}", "--out", "{tmp}/x.png"), "the runs have different workloads"),
        (
            ("plot", "{sweep}/wcpb-4", "--from-batch", "5", "--to-batch", "4", "--out", "{tmp}/x.png"),
            "--to-batch: 4, expected",
        ),
        (
            ("plot", "{sweep}/wcpb-4", "--from-batch", "-1", "--out", "{tmp}/x.png"),
            "--from-batch: -1, expected a number of at least 0",
        ),
        (
            ("plot", "{sweep}/wcpb-4", "--from-ms", "nan", "--out", "{tmp}/x.png"),
            "--from-ms: nan, expected a number of at least 0",
        ),
        (("plot", "{sweep}/wcpb-4", "--to-ms", "inf", "--out", "{tmp}/x.png"), "--to-ms: inf, expected"),
        (("plot", "{sweep}/wcpb-4", "--from-batch", "5", "--to-ms", "4", "--out", "{tmp}/x.png"), "not both"),
        (
            ("plot", "{sweep}/wcpb-4", "--from-batch", "5", "--rows", "--out", "{tmp}/x.png"),
            "takes no window",
        ),
        (
            ("plot", "{sweep}/wcpb-4", "--from-batch", "900", "--out", "{tmp}/x.png"),
            "no batch in the window of batches 900",
        ),
        (("plot", "{sweep}/wcpb-4", "--out", "/proc/x/y.png"), "/proc/x/y.png: cannot be written"),
        (("report", "{sweep}/wcpb-4", "--out", "/proc/x/y.html"), "/proc/x/y.html: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert status_of(*(item.format(sweep=sweep, tmp=tmp_path) for item in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_module_runs_as_a_program(sweep: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "results", "report", str(sweep / "missing")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "40"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"results: {sweep / 'missing'}: no such directory, expected a run directory\n"
