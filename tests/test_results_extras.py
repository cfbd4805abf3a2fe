"""Pictures, traces and reports are extras: they never cost a run its summary, they show names as they are,
and every file is whole or absent."""

import html
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from results_runs import write_run

from policies.core.errors import InputError, WriteError
from policies.core.seam.request import Request
from results.cli import main
from results.comparison.markdown import escaped
from results.files import drafted, user_file
from results.find import find_runs
from results.load import Run, finished_summary, load_run
from results.pack import pack
from results.plots import draw_pictures, pictures_of_runs, plot_pareto
from results.plots.gallery import names_of
from results.sweep import write_sweep
from results.table import COLUMNS, print_table, table_lines

ROOT = Path(__file__).parent.parent
NAMES = (
    "cost_$5_$6",
    "$\\frac{ \u6f22\u5b57",
    "x[bold] a|b*c <b>&amp;",
    "line\nend\x1b[31m half \udcff",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_may_have_any_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    run = write_run(tmp_path / "run", workload=name)
    shown = "".join(c if c.isprintable() else "?" for c in name)
    assert main(["report", str(run.path), "--out", str(tmp_path / "r.html")]) == 0
    out = capsys.readouterr().out
    assert f" {shown} " in out
    page = (tmp_path / "r.html").read_text().split("<script>")[0]
    assert html.escape(shown) in page and "could not" not in page
    assert not recwarn.list


def test_markdown_shows_a_name_as_it_is_and_leaves_plain_names_alone() -> None:
    assert escaped("a|b [x](y) *z* _u_ `v` <w> $5") == (r"a\|b \[x\](y) \*z\* \_u\_ \`v\` \<w\> \$5")
    for name in ("azurellminferencetrace_conv, chunk 128", "wcpb mix_decode=false", "+3.1 ±0.4", "-"):
        assert escaped(name) == name


def test_a_window_toolkit_that_is_not_there_is_not_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace=False)
    command = [sys.executable, "-m", "results", "plot", str(run.path), "--out", str(tmp_path / "x.png")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"MPLBACKEND": "junk"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, f"plot: {tmp_path}/x.png\n")


@pytest.mark.parametrize(
    "what",
    ["results.finish.write_trace", "results.plots.gallery.plot_rows", "results.plots.gallery.plot_account"],
)
def test_ctrl_c_while_extras_are_made_leaves_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(what, pressed)
    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path / "run", plots=True)
    assert load_run(tmp_path / "run").summary["status"] == "complete"
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.suffix]


def test_ctrl_c_while_the_summary_is_made_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from results import finish

    real = finish.summarize

    def summarize(*arguments: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(finish, "summarize", summarize)
    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path / "run", plots=True)
    assert load_run(tmp_path / "run").summary["status"] == "complete"
    assert not (tmp_path / "run" / "plots").exists()


def test_an_extra_that_breaks_is_a_note_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no\nfont " + "x" * 900)

    monkeypatch.setattr("results.plots.gallery.plot_rows", broken)
    run = write_run(tmp_path / "run", plots=True)
    assert sorted(path.name for path in (run.path / "plots").iterdir()) == [
        "latency.png", "time.png", "wavefront.png",
    ]  # fmt: skip
    (note,) = run.summary["notes"]
    assert note.startswith("rows.png could not be drawn: no font xxx") and len(note) < 400
    assert run.summary["status"] == "complete"


def test_a_page_or_picture_that_finds_no_room_leaves_the_old_one_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", trace=False)
    page, picture = tmp_path / "r.html", tmp_path / "p.png"
    commands = (["report", str(run.path), "--out", str(page)], ["plot", str(run.path), "--out", str(picture)])
    for command in commands:
        assert main(command) == 0
    before = page.read_bytes(), picture.read_bytes()

    def full(source: object, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    capsys.readouterr()
    for command in commands:
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert out == "" and err == f"results: {command[-1]}: cannot be written: No space left on device\n"
    assert (page.read_bytes(), picture.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.png", "r.html", "run"]


def test_nothing_is_printed_before_it_is_known_that_it_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", trace=False)
    for out in ("/proc/x", tmp_path / "run" / "batches.csv" / "x"):
        assert main(["report", str(run.path), "--out", str(out)]) == 2
        assert main(["compare", str(run.path), str(run.path), "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("cannot be written") == printed.err.count("\n") == 2


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    with user_file(Path("/dev/null")) as draft:
        assert draft == Path("/dev/null")
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    with user_file(tmp_path / "link.txt") as draft:
        draft.write_text("new")
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real.txt").read_text() == "new"
    with pytest.raises(InputError, match="cannot be written: Is a directory"), user_file(tmp_path) as draft:
        draft.write_text("x")
    with (
        pytest.raises(WriteError, match=r"y.txt: cannot be written: File too large"),
        user_file(tmp_path / "y.txt"),
    ):
        raise OSError(27, "File too large")


def test_a_killed_writers_draft_is_cleared_by_the_next_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace=False)
    with pytest.raises(RuntimeError), drafted(run.path / "summary.json") as draft:
        shutil.copy(run.path / "summary.json", draft)
        shutil.copy(draft, run.path / "summary.json.4711.tmp")
        raise RuntimeError
    write_run(run.path, trace=False)
    assert not list(run.path.glob("*.tmp"))


def test_two_reports_have_two_names_and_one_made_again_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("results.report.write_page", lambda path, *page: path.touch())
    (tmp_path / "results" / "runs").mkdir(parents=True)
    for folder in ("a", "b"):
        write_run(tmp_path / folder / "run", trace=False)
    for names in (["a/run"], ["b/run"], ["a/run", "b/run"], ["a", "b", "a/run"], ["a/run"]):
        assert main(["report", *names]) == 0
    for _ in range(2):
        assert main(["compare", "a/run", "b/run", "--no-plots"]) == 0
    found = sorted(path.name for path in (tmp_path / "results" / "runs").iterdir())
    assert len(found) == 5
    assert [name[: name.rindex("-")] for name in found] == [
        "compare-run-run", "report-a-b-and-1", "report-run", "report-run", "report-run-run",
    ]  # fmt: skip


def test_a_pack_with_repeats_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / folder / "run", trace=False) for folder in ("a", "b", "c")]
    for logs in ("first", "none"):
        pack(runs, tmp_path / f"{logs}.tar.xz", logs)  # type: ignore[arg-type]
        assert (
            main(["report", str(tmp_path / f"{logs}.tar.xz"), "--out", str(tmp_path / f"{logs}.html")]) == 0
        )
    assert capsys.readouterr().out.count("wcpb") == 6
    pages = [(tmp_path / f"{logs}.html").read_text() for logs in ("first", "none")]
    assert ["<h2>Latencies</h2>" in page for page in pages] == [True, False]
    assert ["1 of 3 runs have a wavefront here" in page for page in pages] == [True, False]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("cells")
    return [
        write_run(folder / f"{policy}-{chunk}", policy, chunk, trace=False)
        for policy in ("atomic", "wcpb")
        for chunk in (4, 8)
    ]


def test_a_finished_sweep_draws_only_what_has_changed(
    cells: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    from results.plots import style

    real = style.Figure.savefig

    def savefig(self: object, path: Path, **options: object) -> None:
        drawn.append(Path(path).name.split(".")[0])
        real(self, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(style.Figure, "savefig", savefig)
    for run in cells:
        shutil.copytree(run.path, tmp_path / run.path.name)
    runs = find_runs([tmp_path])[0]
    todo = [({}, run.path, run.summary) for run in runs]
    files = write_sweep(todo, tmp_path / "out")
    assert sorted(drawn) == ["latency-toy", "pareto", "rows-toy", "time-toy", "wavefront-toy"]
    assert files[0].name == "sweep.csv" and len(files) == 6
    before = {file.name: file.read_bytes() for file in files}
    drawn.clear()
    assert write_sweep(todo, tmp_path / "out") == files and drawn == []
    (tmp_path / "out" / "plots" / "rows-toy.png").unlink()
    write_sweep(todo, tmp_path / "out")
    assert drawn == ["rows-toy"]
    assert {file.name: file.read_bytes() for file in files} == before
    drawn.clear()
    other = write_run(tmp_path / "atomic-8", "atomic", 8, requests=[Request(0, 0, 30, 9)], trace=False)
    write_sweep([*todo[:1], ({}, other.path, other.summary), *todo[2:]], tmp_path / "out")
    assert sorted(drawn) == ["latency-toy", "pareto", "time-toy"]  # rows and wavefront show chunk 4


def test_pictures_that_are_no_longer_drawn_are_removed_and_nothing_else_is(
    cells: list[Run], tmp_path: Path
) -> None:
    draw_pictures(pictures_of_runs(cells), tmp_path)
    (tmp_path / "mine.png").write_text("x")
    draw_pictures(pictures_of_runs(cells)[:1], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drawn.json", "mine.png", "pareto.png"]
    (tmp_path / "drawn.json").write_text('{"../mine.png": "a", "mine.png": 1}')
    draw_pictures([], tmp_path)
    assert (tmp_path / "mine.png").exists()


def test_latencies_of_a_sweep_show_every_chunk_size(
    cells: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int]] = []

    def plot_latency_cdfs(runs: list[Run], path: Path) -> None:
        shown.extend((run.policy, run.chunk_tokens) for run in runs)

    monkeypatch.setattr("results.plots.gallery.plot_latency_cdfs", plot_latency_cdfs)
    draw_pictures(pictures_of_runs(cells), tmp_path)
    assert sorted(shown) == [("atomic", 4), ("atomic", 8), ("wcpb", 4), ("wcpb", 8)]


def test_two_workloads_whose_names_make_one_file_name_have_two() -> None:
    assert names_of(["a b", "a-b", "c", "A B"]) == ["a-b", "a-b-1", "c", "a-b-2"]


def test_too_many_runs_for_one_picture_are_one_sentence(cells: list[Run], tmp_path: Path) -> None:
    import dataclasses

    runs = [
        dataclasses.replace(cells[0], summary={**cells[0].summary, "workload": f"w{at}"}) for at in range(400)
    ]
    with pytest.raises(InputError, match="too many runs for one picture"):
        plot_pareto(runs, tmp_path / "x.png")
    assert len(pictures_of_runs(runs)) == 1 + 8 * 4


def test_only_what_is_better_by_more_than_a_hundredth_is_marked(cells: list[Run]) -> None:
    column = [item.head for item in COLUMNS].index("prompt")

    def marked(*values: float) -> list[bool]:
        summaries = [
            {**cells[0].summary, "policy": f"p{at}", "prompt_token_throughput": value}
            for at, value in enumerate(values)
        ]
        return [line.cells[column][1] for line in table_lines(summaries)]

    assert marked(1000.0, 1001.0) == [False, False]
    assert marked(1000.0, 1010.0) == [False, False]
    assert marked(1000.0, 1011.0) == [False, True]
    assert marked(1000.0, 1001.0, 900.0) == [True, True, False]


def test_the_table_says_what_was_offered_and_what_limited_a_run(cells: list[Run]) -> None:
    file = io.StringIO()
    print_table(
        [
            {
                **cells[0].summary,
                "limited_by": "places",
                "waited_for_places_s": cells[0].summary["duration_s"] / 2,
            }
        ],
        file,
    )
    assert "places 50%" in file.getvalue() and "offered" in file.getvalue()


def test_two_simulations_that_differ_are_pointed_to_what_sets_runs_side_by_side(
    cells: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(cells[0].path), str(cells[2].path), "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "both were simulated: `results diff` sets two such sides against each other" in err


def test_a_cell_whose_summary_lacks_a_field_is_run_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace=False, extra={"input_sha256": "1"})
    assert finished_summary(run.path, "1") == run.summary
    text = (run.path / "summary.json").read_text()
    (run.path / "summary.json").write_text(text.replace('"itl_ms"', '"itl"'))
    assert finished_summary(run.path, "1") is None


def test_a_full_disk_under_standard_output_is_named_and_the_page_is_there(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace=False)
    command = [sys.executable, "-m", "results", "report", str(run.path), "--out", str(tmp_path / "r.html")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "results: standard output: No space left on device"
    assert (tmp_path / "r.html").read_text().endswith("</html>\n")
