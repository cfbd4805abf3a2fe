"""Capacity: the answer of a search is that of trying every rate; it is found again without searching; what it
says runs."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.config.runconfig import RunConfig, load_config, parse_config
from policies.core.errors import InputError
from results.load import load_run
from sim.capacity.axes import PRECISION, RateAxis, at_rate, axis_of, one_at_a_time, with_poisson
from sim.capacity.probe import measured_requests, probe
from sim.capacity.search import search
from sim.cli import main
from sim.run import Simulation, simulate
from workloads.burstiness import Burstiness

ROOT = Path(__file__).parent.parent
WORKLOAD: dict[str, Any] = {
    "kind": "synthetic", "num_requests": 24, "arrival": {"process": "gamma", "rate": 200, "cv": 1.5},
    "prompt_tokens": [70, 5, 40, 33], "output_tokens": [4, 9, 2],
}  # fmt: skip
BASE: dict[str, Any] = {
    "model": "ouro-tiny", "device": "h200", "policy": "wcpb",
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk_size": 16},
    "slo": {"ttft_ms": 6.0, "itl_ms": 1.5, "share": 0.9}, "workload": WORKLOAD,
}  # fmt: skip


def config(**sections: Any) -> RunConfig:
    return parse_config({**BASE, **sections}, Path(), "test")


@dataclass(frozen=True)
class Line:
    """Steps of a made-up load."""

    first: int
    lightest: int = -200
    heaviest: int = 200

    def heavier(self, step: int) -> int | None:
        return None if step >= self.heaviest else min(step + 35, self.heaviest)

    def lighter(self, step: int) -> int | None:
        return None if step <= self.lightest else max(step - 35, self.lightest)


@dataclass(frozen=True)
class Said:
    holds: bool
    strain: float


@given(st.integers(-200, 200), st.integers(-230, 230), st.floats(0.001, 2), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_search_finds_the_last_step_that_holds(
    first: int, last: int, steepness: float, is_flat: bool
) -> None:
    """Whatever strain says: it places probes, and yes and no decide."""
    asked: list[int] = []

    def ask(step: int) -> Said:
        asked.append(step)
        strain = 1.0 if is_flat else 2.0 ** (steepness * (step - last - 0.5))
        return Said(step <= last, min(strain, 0.99) if step <= last else max(strain, 1.01))

    found = search(Line(first), ask)
    if last < -200:
        assert found.step is None
    else:
        assert (found.step, found.is_open) == (min(last, 200), last >= 200)
    assert found.exceptions == []
    assert len(asked) == len(set(asked)) <= 25


def test_what_is_not_one_piece_is_said() -> None:
    found = search(Line(0), lambda step: Said(step <= 40 and step != 36, 0.5 if step <= 40 else 2))
    assert (found.step, found.exceptions) == (40, [])  # the search has probed near by
    found = search(Line(40), lambda step: Said(step <= 40 or step == 45, 0.999 if step <= 40 else 1.02))
    assert found.step == 40 and found.exceptions == [45]
    asked: list[int] = []

    def ask(step: int) -> Said:
        asked.append(step)
        return Said(step <= 40, 0.999 if step <= 40 else 1.02)

    found = search(Line(40), ask, near=0)
    assert found.step == 40 and sorted(asked) == sorted({*asked}), "no second opinion, nothing twice"
    assert not {36, 45}.intersection(asked)


def check_every_rate(base: RunConfig, start: float, reach: int, num_judged: int) -> None:
    """Search from `start`, then simulate whole, without an early stop, at `reach` rates on each side."""
    axis = RateAxis(base, start)
    found = search(axis, lambda step: probe(axis.config(step), None))
    assert found.step is not None and not found.is_open
    holds = {}
    for step in range(found.step - reach, found.step + reach):
        whole = probe(axis.config(step), None, to_the_end=True)
        assert whole.is_whole and whole.met + whole.missed == num_judged
        assert probe(axis.config(step), None).holds == whole.holds, "an early stop changes no answer"
        holds[step] = whole.holds
    not_one_piece = [step for step, value in holds.items() if value != (step <= found.step)]
    print(f"{axis.value(found.step):g}: {len(holds)} rates, {len(not_one_piece)} not in one piece")
    assert holds[found.step] and not holds[found.step + 1]
    assert set(found.exceptions) <= set(not_one_piece)


@pytest.mark.parametrize("policy", ["atomic", "wcpb"])
def test_the_answer_is_that_of_every_rate(policy: str) -> None:
    """`CAPACITY_RATES` says how many."""
    check_every_rate(config(policy=policy), 200.0, int(os.environ.get("CAPACITY_RATES", "16")) // 2, 24)


@pytest.mark.skipif("CAPACITY_TRACE" not in os.environ, reason="CAPACITY_TRACE=FILE.csv: minutes")
@pytest.mark.parametrize(("policy", "chunk"), [("mixed", 128), ("wcpb", 32), ("atomic", 256)])
def test_the_answer_on_a_trace_is_that_of_every_rate(policy: str, chunk: int) -> None:
    """The shipped question, of the first `CAPACITY_LIMIT` requests."""
    limit = int(os.environ.get("CAPACITY_LIMIT", "300"))
    base = yaml.safe_load((ROOT / "sim" / "configs" / "capacity.yaml").read_text())["base"]
    base["workload"] |= {"path": os.environ["CAPACITY_TRACE"], "limit": limit}
    base["scheduler"]["prefill_chunk_size"] = chunk
    reach = int(os.environ.get("CAPACITY_RATES", "40")) // 2
    check_every_rate(parse_config({**base, "policy": policy}, Path(), "test"), 4.7, reach, limit)


def test_a_probe_judges_as_a_run_does(tmp_path: Path) -> None:
    for rate in (60.0, 300.0, 2000.0):
        at = at_rate(config(slo={"ttft_ms": 4.0, "e2e_ms": 40.0, "share": 0.8}), rate)
        _, summary = simulate(at, tmp_path / f"{rate}", plots=False)
        found, slo = probe(at, None, to_the_end=True), summary["slo"]
        assert (found.met, found.missed, found.left_out) == (slo["met"], slo["missed"], slo["left_out"])
        assert (found.holds, found.missed_by) == (slo["holds"], slo["missed_by"])
        assert found.output_tokens / found.duration_s == pytest.approx(summary["output_token_throughput"])
        early = probe(at, None)
        assert early.holds == found.holds and early.missed <= found.missed


def test_requests_that_do_not_count_decide_nothing() -> None:
    base = config(measure={"skip_requests": 19})
    found = probe(at_rate(base, 300.0), None, to_the_end=True)
    assert found.met + found.missed == found.num_requests == 5
    with pytest.raises(InputError, match="measure: with a concurrency"):
        probe(at_rate(config(measure={"skip_s": 1.0}, workload={**WORKLOAD, "arrival": {
            "process": "poisson", "rate": 3, "concurrency": 2}}), 3.0), None)  # fmt: skip


def test_every_rate_has_the_same_requests_in_the_same_proportions(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at * at},9,{at}\n" for at in range(1, 9))
    )
    trace = {"kind": "trace", "path": "t.csv"}
    kinds = (trace, {**trace, "time_scale": 3.0}, {**trace, "arrival": {"process": "poisson", "rate": 1}},
             WORKLOAD, {"kind": "preset", "name": "chat", "num_requests": 9})  # fmt: skip
    for workload in kinds:
        base = parse_config({**BASE, "workload": workload}, tmp_path, "test")
        sequences = []
        for rate in (0.5, 4.0):
            requests = Simulation.prepare(at_rate(base, rate)).workload.requests
            times = [request.arrival_ns * rate for request in requests]
            sequences.append(([request.prompt_tokens for request in requests], times))
        (lengths, slow), (same_lengths, fast) = sequences
        assert lengths == same_lengths
        assert fast == pytest.approx(slow, abs=10)
        alone = Simulation.prepare(one_at_a_time(base)).workload
        assert alone.concurrency == 1 and [item.prompt_tokens for item in alone.requests] == lengths
    base = parse_config({**BASE, "workload": trace}, tmp_path, "test")
    axis = axis_of("rate", base, Simulation.prepare(base).workload)
    assert axis.value(axis.first) == pytest.approx(7 / 63, rel=PRECISION)
    assert with_poisson(config(workload=kinds[4]), 3.0) is None, "chat's arrivals are Poisson's already"


def sweep_file(folder: Path, **base: Any) -> Path:
    path = folder / "grid.yaml"
    grid = [
        {"policy.name": ["wcpb"], "scheduler.prefill_chunk_size": [16]},
        {"policy": [{"name": "slo", "model": "h200"}], "scheduler.prefill_chunk_size": [32]},
    ]
    path.write_text(yaml.safe_dump({"base": {**BASE, **base}, "grid": grid}))
    return path


def test_the_command_answers_and_its_config_runs_in_both_worlds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = sweep_file(tmp_path, workload={**WORKLOAD, "num_requests": 12}), tmp_path / "out"
    arguments = ["capacity", str(path), "--out", str(out), "--jobs", "1", "--seeds", "2"]
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert {"wcpb", "slo"} <= set(first.out.split()) and "95 %" in first.out
    assert "gaps have a cv of" in first.err and "at Poisson arrivals: " in first.err
    assert (out / "plots" / "capacity.png").read_bytes()[:4] == b"\x89PNG"
    answers = {file.name: file.stat().st_mtime_ns for file in out.glob("*s/*.json")}
    assert main(arguments) == 0
    assert capsys.readouterr().out == first.out
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("*s/*.json")} == answers, (
        "not asked again"
    )
    best = load_config(out / "best.yaml")
    summary = simulate(best, tmp_path / "sim", plots=False)[1]
    assert summary["num_finished"] == 12 and summary["slo"]["ttft_ms"] == 6.0
    pytest.importorskip("torch", reason="the executor needs torch")
    from executor.cli import main as execute

    assert execute(["run", str(out / "best.yaml"), "--device", "cpu", "--out", str(tmp_path / "real")]) == 0
    assert load_run(tmp_path / "real").summary["num_finished"] == 12


@pytest.mark.parametrize(
    ("sections", "more", "sentence"),
    [
        ({"slo": None}, [], "slo: missing, expected what is to hold: --slo ttft_ms=500,itl_ms=20"),
        ({}, ["--slo", "share=0.9"], "slo: names no objective"),
        ({}, ["--seeds", "0"], "--seeds: 0, expected at least 1"),
        ({}, ["--cluster", "here:1"], "expected dask://HOST:PORT of a running scheduler"),
        (
            {"workload": {**WORKLOAD, "arrival": {"process": "closed", "concurrency": 3}}},
            [],
            "closed arrivals have no rate, expected poisson, gamma or constant ones",
        ),
    ],
)
def test_what_cannot_be_searched_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: Any, more: list[str], sentence: str
) -> None:
    path = sweep_file(tmp_path, **sections)
    assert main(["capacity", str(path), "--out", str(tmp_path / "out"), *more]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and len(error) < 400 + len(str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_what_is_out_of_reach_ends_in_one_sentence_with_the_best_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump({**BASE, "workload": {**WORKLOAD, "num_requests": 8}}))
    out = tmp_path / "out"
    assert (
        main(["capacity", str(path), "--slo", "itl_ms=0.1", "--out", str(out), "--seeds", "1", "--jobs", "1"])
        == 1
    )
    said = capsys.readouterr()
    assert "out of reach" in said.out
    (line,) = [line for line in said.err.splitlines() if line.startswith("note: ")]
    assert line.startswith("note: out of reach: with every request alone 0.00% keep ITL <= 0.1 ms for 99 %")
    assert not (out / "best.yaml").exists()


def test_after_ctrl_c_the_search_goes_on_from_its_probes(tmp_path: Path) -> None:
    path, out = sweep_file(tmp_path, workload={**WORKLOAD, "num_requests": 200}), tmp_path / "out"
    command = [sys.executable, "-m", "sim", "capacity", str(path), "--out", str(out), "--jobs", "1"]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    deadline = time.monotonic() + 60
    while len(list(out.glob("probes/*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    kept = {file.name: file.read_bytes() for file in out.glob("probes/*.json")}
    assert len(kept) >= 2 and not list(out.glob("answers/*"))
    assert not list(out.glob("**/*.tmp"))


def test_burstiness_of_known_arrivals() -> None:
    even = Burstiness.of([at * 10**9 for at in range(1801)])
    assert (even.rate, even.cv, even.window_s) == (1.0, 0.0, 300.0)
    assert (even.slowest, even.fastest) == (1.0, 1.0)
    bursts = Burstiness.of(sorted([at * 10**9 for at in range(1801)] + [5 * 10**9] * 600))
    assert (bursts.slowest, bursts.fastest) == (1.0, 3.0) and bursts.cv > 0.5
    assert "five-minute windows carry 1.00 to 3.00 requests/s" in str(bursts)


def test_cards_needed_for_a_rate_that_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fewest replicas at which the objectives hold: not one fewer; and a fleet's own capacity."""
    path, out = tmp_path / "one.yaml", tmp_path / "out"
    workload = {**WORKLOAD, "arrival": {"process": "poisson", "rate": 2000}}
    fleet = {"replicas": 1, "router": "least_loaded"}
    path.write_text(yaml.safe_dump({**BASE, "workload": workload, "fleet": fleet}))
    arguments = [
        "capacity",
        str(path),
        "--axis",
        "replicas",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    assert "cards" in capsys.readouterr().out
    best = load_config(out / "best.yaml")
    assert best.fleet is not None and best.fleet.replicas > 1
    fleet = {"replicas": best.fleet.replicas - 1, "router": "least_loaded"}
    fewer = parse_config({**best.resolved, "fleet": fleet}, Path(), "test")
    assert probe(best, None).holds and not probe(fewer, None).holds


def test_where_objectives_hold_at_any_rate_no_file_says_that_the_last_one_tried_is_the_most(
    tmp_path: Path,
) -> None:
    path, out = tmp_path / "one.yaml", tmp_path / "out"
    workload = {**WORKLOAD, "num_requests": 3}
    path.write_text(yaml.safe_dump({**BASE, "workload": workload, "slo": {"ttft_ms": 1e6}}))
    assert main(["capacity", str(path), "--seeds", "2", "--jobs", "1", "--out", str(out)]) == 0
    assert " or more, " in (out / "best.yaml").read_text().splitlines()[0]
    (row,) = csv.DictReader((out / "capacity.csv").open())
    assert row["capacity"] and (row["low"], row["high"]) == ("", "")


def test_what_was_kept_and_is_damaged_is_asked_again(tmp_path: Path) -> None:
    at = at_rate(config(workload={**WORKLOAD, "num_requests": 8}), 900.0)
    first = probe(at, tmp_path)
    (file,) = tmp_path.glob("*.json")
    whole = file.read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace('"met": ', '"met": 1'), '{"met": 3}', "[]", ""):
        assert damaged != whole
        file.write_text(damaged)
        assert probe(at, tmp_path) == first
        assert file.read_text() == whole
    found = file.stat().st_mtime_ns
    assert probe(at, tmp_path) == first and file.stat().st_mtime_ns == found


def test_a_fleet_of_two_kinds_counts_its_cards_and_cannot_be_searched_by_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "one.yaml", tmp_path / "out"
    workload = {**WORKLOAD, "num_requests": 8}
    path.write_text(
        yaml.safe_dump({**BASE, "workload": workload, "fleet": {"prefill": 1, "decode": 1}, "device": "h200"})
    )
    arguments = ["capacity", str(path), "--out", str(out), "--jobs", "1", "--seeds", "1"]
    assert main(arguments) == 0
    assert "per card" in capsys.readouterr().out
    (row,) = csv.DictReader((out / "capacity.csv").open())
    assert float(row["requests_per_s_per_card"]) == pytest.approx(float(row["capacity"]) / 2)
    assert "executor run" not in (out / "best.yaml").read_text().partition("model:")[0]
    for override, sentence in (
        ("seed=0", "fleet.prefill: --axis replicas counts engines that are alike"),
        ("fleet={devices: [h200, h200]}", "fleet.devices: --axis replicas counts engines that are alike"),
        ("fleet={replicas: 0}", "fleet.replicas: 0, expected at least 1"),
    ):
        assert main([*arguments, "--axis", "replicas", "--set", override]) == 2
        assert sentence in capsys.readouterr().err


def test_requests_left_out_are_left_out_of_those_alone_too(tmp_path: Path) -> None:
    base = config(measure={"skip_requests": 19})
    alone = probe(one_at_a_time(base), None, to_the_end=True)
    assert alone.num_requests == 5
    workload = Simulation.prepare(base).workload
    for measure, sentence in (
        ({"skip_requests": 24}, "leaves none of the 24 requests"),
        ({"skip_s": 0.01}, "a span in seconds has other requests at every rate"),
        ({"until_s": 0.05}, "a span in seconds has other requests at every rate"),
    ):
        with pytest.raises(InputError, match=sentence):
            other = config(measure=measure)
            measured_requests(workload, other.measure)
            axis_of("rate", other, workload)


def test_a_fleet_has_a_rate_as_one_engine_has() -> None:
    def last(base: RunConfig) -> int:
        axis = RateAxis(base, 900.0)
        found = search(axis, lambda step: probe(axis.config(step), None))
        assert found.step is not None and probe(axis.config(found.step), None).holds
        assert not probe(axis.config(found.step + 1), None).holds
        return found.step

    one, two = (config(fleet={"replicas": count, "router": "least_kv"}) for count in (1, 2))
    for rate in (300.0, 2000.0):
        assert probe(at_rate(one, rate), None) == probe(at_rate(config(), rate), None)
    assert last(two) > last(config())
