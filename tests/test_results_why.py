"""Why a tail is long, and what differs between two sides: sums that can be checked against the logs."""

from pathlib import Path

import pytest
from results_runs import REQUESTS, write_run

from policies.core.seam.request import Request
from results.cli import main
from results.difference import differences
from results.load import Run
from results.why import composition, kind_of, why

MANY = tuple(Request(at, 4_000_000 * at, 8 + at % 5, 3 + at % 4) for at in range(40))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"a": ("wcpb", 4), "b": ("wcpb", 8), "c": ("atomic", 4)}
    found = {
        name: write_run(folder / name / "run", *kind, requests=MANY, trace=False)
        for name, kind in kinds.items()
    }
    found["same"] = write_run(folder / "same" / "run", "wcpb", 4, requests=MANY, trace=False)
    return found


def test_the_batches_behind_a_tail_are_those_that_ran_in_it(runs: dict[str, Run]) -> None:
    """Held against every gap and every batch, one by one."""
    run, batches = runs["a"], list(runs["a"].batches())
    times = [list(map(int, text.split())) for text in run.requests()["token_ns"]]
    gaps = [(row[at], row[at + 1]) for row in times for at in range(len(row) - 1)]
    reason = why(run, "itl", 90)
    slow = [(start, end) for start, end in gaps if end - start >= reason.limit_ns]
    assert reason.tail.num_gaps == len(slow) >= len(gaps) // 10
    behind = {}
    for batch in batches:
        inside = [min(end, batch.finished_ns) - max(start, batch.started_ns) for start, end in slow]
        if any(part > 0 for part in inside):
            behind[batch.seq] = (sum(part for part in inside if part > 0), sum(part > 0 for part in inside))
    assert reason.num_batches == len(behind)
    for item in reason.batches:
        assert (item.behind_ns, item.num_gaps) == behind[item.batch.seq]
    shown = [item.behind_ns for item in reason.batches]
    assert shown == sorted((part for part, _ in behind.values()), reverse=True)[: len(shown)]
    whole_ns = sum(end - start for start, end in slow)
    assert reason.tail.whole_ns == whole_ns == sum(reason.tail.by_name.values())
    assert sum(reason.tail.by_kind.values()) == whole_ns - reason.tail.by_name["idle"]


def test_first_tokens_are_asked_about_from_their_arrival(runs: dict[str, Run]) -> None:
    reason = why(runs["a"], "ttft", 99)
    table = runs["a"].requests()
    ttft = [
        int(text.split()[0]) - arrival
        for arrival, text in zip(table["arrival_ns"], table["token_ns"], strict=True)
    ]
    assert reason.tail.num_gaps == 1 and reason.tail.whole_ns == max(ttft)


def test_a_batch_is_described_by_what_it_held(runs: dict[str, Run]) -> None:
    for batch in runs["a"].batches():
        text, ranges = composition(batch, 4), batch.ranges()
        assert ("decode rows" in text) == any(not item.is_prompt for item in ranges)
        prompts = sum(item.token_count for item in ranges if item.is_prompt)
        assert kind_of(batch) in ("embedding and LM head", "decode rows alone") or prompts


def test_two_simulations_alike_differ_by_nothing_and_unlike_ones_by_their_figures(
    runs: dict[str, Run],
) -> None:
    (row,), notes = differences([runs["a"]], [runs["same"]])
    assert notes == [] and row.by is None
    assert all(item.change == 0 and not item.is_sure for item in row.figures)
    assert {item.name for item in row.figures if item.low is not None} >= {
        "TTFT p50",
        "TTFT p99",
        "ITL p99",
        "E2E p99",
    }
    (row,), _ = differences([runs["a"]], [runs["c"]])
    found = {item.name: item for item in row.figures}
    for key, name in (("ttft_ms", "TTFT p99"), ("itl_ms", "ITL p99")):
        figures = [runs[side].summary[key]["p99"] for side in ("a", "c")]
        assert (found[name].a, found[name].b) == tuple(figures)
        assert found[name].low <= found[name].change + 0.5 and found[name].low <= found[name].high
    again = differences([runs["a"]], [runs["c"]])[0][0]
    assert again.figures == row.figures  # drawn from a seed


def test_a_difference_is_sure_where_every_request_shows_it(tmp_path: Path) -> None:
    fast = [Request(at, 90_000_000 * at, 16, 4) for at in range(30)]
    slow = [Request(at, 90_000_000 * at, 48, 4) for at in range(30)]
    sides = [
        [write_run(tmp_path / name / "run", requests=many, trace=False)]
        for name, many in (("a", fast), ("b", slow))
    ]
    (row,), _ = differences(*sides)
    ttft = next(item for item in row.figures if item.name == "TTFT p50")
    assert ttft.is_sure and (ttft.low, ttft.high) == (pytest.approx(ttft.change), pytest.approx(ttft.change))


def test_the_commands_print_and_write(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, c = str(runs["a"].path), str(runs["c"].path)
    assert main(["diff", a, c, "--out", str(tmp_path / "d.html")]) == 0
    printed = capsys.readouterr()
    assert (
        "95 % interval" in printed.out and "TTFT p99: " in printed.out and "configs differ: " in printed.err
    )
    page = (tmp_path / "d.html").read_text()
    assert (
        "pairs of runs, B against A" in page
        and "A: ouro-tiny on h200 (sim)" in page
        and len(page) < 3_000_000
    )
    assert main(["why", a, "--itl", "p99"]) == 0
    printed = capsys.readouterr()
    assert "gaps between tokens took" in printed.out and "what it held" in printed.out
    for arguments, sentence in (
        (["why", a, "--itl", "fast"], "--itl: fast, expected a percentile"),
        (["why", a, "--ttft", "p100"], "--ttft: p100, expected a percentile"),
        (["why", str(runs["a"].path.parents[1]), "--itl", "p99"], "holds 4 runs, expected one"),
    ):
        assert main(arguments) == 2
        assert sentence in capsys.readouterr().err


def test_runs_of_which_none_has_a_partner_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, chunks in (("a", (4, 8)), ("b", (16, 32))):
        for chunk in chunks:
            write_run(tmp_path / name / str(chunk), chunk=chunk, requests=REQUESTS, trace=False)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    err = capsys.readouterr().err
    assert (
        "expected some to set side by side" in err
        and err.count("\n") == 1
        and len(err) < 400 + 2 * len(str(tmp_path))
    )
