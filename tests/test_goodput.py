"""Goodput, measured spans and the figures of each request's own gaps, by hand and over whole runs."""

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.config.runconfig import parse_config
from policies.core.engine.runlog import RequestRecord
from policies.core.errors import InputError
from policies.core.seam.objectives import Objectives, Window
from policies.core.seam.request import Request, Status
from results.goodput import Goodput, lateness
from results.latency import own_gaps_ns
from results.load import load_run
from results.table import columns_of
from results.window import Span
from sim.run import simulate

MS = 1_000_000
BASE: dict[str, Any] = {
    "policy": "wcpb",
    "scheduler": {"max_num_seqs": 8, "prefill_chunk_size": 64},
    "workload": {
        "kind": "synthetic", "num_requests": 40, "arrival": {"process": "poisson", "rate": 20},
        "prompt_tokens": [300, 40, 700], "output_tokens": [20, 1, 7],
    },
}  # fmt: skip


def record(
    *token_ms: int, status: Status = Status.FINISHED, ended_ms: int | None = None, number: int = 0
) -> RequestRecord:
    """A request that arrives at 0 and gets tokens at these times."""
    times = array("q", [MS * at for at in token_ms])
    end = MS * ended_ms if ended_ms is not None else times[-1] if times else 0
    return RequestRecord(Request(number, 0, 10, 100), number, status, 0, end, token_ns=times)


def run(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    config = parse_config({**BASE, **keys}, tmp_path, "test.yaml")
    return simulate(config, tmp_path / "run", plots=False)[1]


def test_a_request_meets_when_it_keeps_every_objective_that_is_given() -> None:
    tokens = record(100, 110, 120, 150)
    assert lateness(tokens, Objectives(ttft_ms=100, itl_ms=30, tpot_ms=17, e2e_ms=150)) == ()
    assert lateness(tokens, Objectives(ttft_ms=99, itl_ms=29, tpot_ms=16, e2e_ms=149)) == (
        "ttft_ms", "itl_ms", "tpot_ms", "e2e_ms",
    )  # fmt: skip
    assert lateness(record(100), Objectives(itl_ms=1, tpot_ms=1)) == ()


def test_who_hung_up_is_judged_by_what_it_waited_for_and_who_was_refused_is_missed() -> None:
    objectives = Objectives(ttft_ms=100, itl_ms=20)
    cancelled = Status.CANCELLED
    assert lateness(record(status=cancelled, ended_ms=99), objectives) is None
    assert lateness(record(status=cancelled, ended_ms=101), objectives) == ("ttft_ms",)
    assert lateness(record(90, 95, status=cancelled, ended_ms=110), objectives) is None
    assert lateness(record(90, 95, status=cancelled, ended_ms=140), objectives) == ("itl_ms",)
    assert lateness(record(status=Status.REFUSED), objectives) == ("refused",)
    assert lateness(record(10, status=Status.RUNNING), objectives) is None
    goodput = Goodput(objectives)
    for item in (record(50, 60), record(50, 90), record(status=Status.REFUSED), record(status=cancelled)):
        goodput.add(item, True, True)
    summary = goodput.as_summary(2.0)
    assert (summary["met"], summary["missed"], summary["left_out"]) == (1, 2, 1)
    assert (summary["share_met"], summary["goodput"]) == (1 / 3, 0.5)
    assert summary["missed_by"] == {"itl_ms": 1, "refused": 1} and not summary["holds"]


def test_own_gaps_are_numpys_percentiles() -> None:
    chance = np.random.default_rng(3)
    for count in (2, 3, 50, 101, 102, 700):
        times = np.cumsum(chance.integers(1, 10**9, count))
        mean_ns, p99_ns = own_gaps_ns(times)
        assert mean_ns == pytest.approx(np.diff(times).mean())
        assert p99_ns == pytest.approx(np.percentile(np.diff(times), 99), rel=1e-12)


def test_a_span_begins_after_what_is_skipped_and_ends_before_until() -> None:
    records = [RequestRecord(Request(at, (5 + at) * 1_000_000_000, 1, 1), at) for at in range(6)]
    assert Span.of(records, Window()) == Span()
    assert Span.of(records, Window(skip_requests=2)) == Span(2, 7_000_000_000, None)
    assert Span.of(records, Window(skip_s=1.5, until_s=4)) == Span(0, 6_500_000_000, 9_000_000_000)
    span = Span.of(records, Window(skip_requests=1, skip_s=2, until_s=4))
    assert [span.has_request(item) for item in records] == [False, False, True, True, False, False]
    nothing = Span.of(records, Window(skip_requests=6))
    assert not any(nothing.has_request(item) for item in records)


def test_the_summary_has_goodput_and_the_table_shows_it_only_then(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    judged = run(tmp_path / "judged", slo={"ttft_ms": 200, "itl_ms": 20})
    assert "slo" not in plain and plain["own_itl_p99_ms"]["max"] <= plain["itl_ms"]["max"]
    slo = judged["slo"]
    assert slo["met"] + slo["missed"] == 40 and slo["goodput"] == slo["met"] / judged["duration_s"]
    heads = [[column.head for column in columns_of([item])] for item in (plain, judged)]
    assert "goodput" not in heads[0] and "goodput" in heads[1]
    assert {**judged, "slo": None, "config_sha256": None} == {**plain, "slo": None, "config_sha256": None} | {
        "input_sha256": judged["input_sha256"], "select_us": judged["select_us"],
    }  # fmt: skip


def test_a_window_leaves_out_requests_and_batches_and_says_so(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    part = run(tmp_path / "part", measure={"skip_requests": 10, "until_s": 1.5}, slo={"ttft_ms": 1})
    measured = part["measured"]
    left_in = 40 - measured["left_out_requests"]
    assert 0 < left_in < 30 and part["num_requests"] == 40
    assert part["num_batches"] + measured["left_out_batches"] == whole["num_batches"]
    assert part["slo"]["met"] + part["slo"]["missed"] == left_in
    assert part["duration_s"] < 1.5 and measured["run_s"] == whole["duration_s"]
    assert any(note.startswith("measure: figures leave out") for note in part["notes"])
    latencies = load_run(tmp_path / "part" / "run").latencies()
    assert len(latencies.ttft_ns) == left_in
    assert latencies.ttft_ns.max() / 1e6 == pytest.approx(part["ttft_ms"]["max"])


def test_an_objective_that_nobody_could_keep_alone_is_named(tmp_path: Path) -> None:
    notes = run(tmp_path, slo={"itl_ms": 2, "ttft_ms": 500})["notes"]
    assert [note for note in notes if "even alone" in note and note.endswith("ms per token")]
    assert not [note for note in notes if "slo.ttft_ms" in note]


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms: 0, expected above 0"),
        ({"slo": {}}, "slo: names no objective"),
        ({"slo": {"share": 0.9}}, "slo: names no objective"),
        ({"slo": {"itl_ms": 5, "share": 1.5}}, "slo.share: 1.5, expected at most 1"),
        ({"slo": {"ttft": 3}}, "unknown key 'slo.ttft'"),
        ({"measure": {"skip": 3}}, "unknown key 'measure.skip'"),
        ({"measure": {"until_s": 0}}, "measure.until_s: 0, expected above 0"),
        ({"measure": {"skip_requests": -1}}, "measure.skip_requests: -1, expected at least 0"),
    ],
)
def test_wrong_objectives_and_windows_are_named(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_config({**BASE, **section}, Path(), "test.yaml")


@pytest.mark.parametrize("room", ["sim", "executor"])
@pytest.mark.parametrize("text", ["ttft_ms", "=5", "ttft_ms=5,,", "ttft_ms=0"])
def test_the_command_line_refuses_in_one_line(tmp_path: Path, room: str, text: str) -> None:
    (tmp_path / "run.yaml").write_text("workload: {kind: preset, name: chat}\n")
    command = [sys.executable, "-m", room, "run", str(tmp_path / "run.yaml"), "--slo", text]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "slo" in done.stderr
