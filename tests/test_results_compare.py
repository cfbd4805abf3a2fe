"""Comparing two sides: the same run has no error, a known difference is found in full, and what was not run
alike is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from results.cli import main as results
from results.comparison.compare import compare
from results.comparison.figures import Figure, Tolerances, by_label, centre
from results.comparison.ranking import orders
from results.comparison.requests import Queue, queue_of, queue_steps, request_errors
from sim.cli import main as sim
from sim.run import simulate

POLICIES = ("atomic", "wcpb")
WIDE = ("--p50", "1e6", "--p99", "1e6", "--throughput", "1e6", "--rank-gap", "1e6", "--no-plots")


def config_of(policy: str, device: str = "h200-analytic", **changes: Any) -> dict[str, Any]:
    workload = {
        "kind": "synthetic", "num_requests": 12, "arrival": {"process": "poisson", "rate": 100},
        "prompt_tokens": [37, 120, 5], "output_tokens": [4, 1, 3], **changes.pop("workload", {}),
    }  # fmt: skip
    scheduler = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "prefill_chunk_size": 16}
    return {
        "model": "ouro-1.4b",
        "device": device,
        "policy": policy,
        "scheduler": scheduler,
        "workload": workload,
        **changes,
    }


def simulated(out: Path, raw: dict[str, Any]) -> Path:
    return simulate(parse_config(raw, out.parent, "test"), out, plots=False)[0]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A set that stands for measured runs: two policies on a workload, three repeats of each."""
    folder = tmp_path / "measured"
    for policy in POLICIES:
        for repeat in "abc":
            simulated(folder / f"{policy}-{repeat}", config_of(policy))
    return folder


def status_of(*arguments: object) -> int:
    return results([str(item) for item in arguments])


def edit(path: Path, change: Callable[[str], str]) -> None:
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))


def edit_summary(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    summary = json.loads((run / "summary.json").read_text())
    change(summary)
    (run / "summary.json").write_text(json.dumps(summary))


def test_a_run_against_its_own_prediction_has_no_error_at_all(measured: Path, tmp_path: Path) -> None:
    assert sim(["predict", str(measured), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 0
    assert (
        status_of(
            "compare",
            tmp_path / "sim",
            measured,
            "--out",
            tmp_path / "out",
            "--p50",
            0,
            "--p99",
            0,
            "--throughput",
            0,
        )
        == 0
    )
    data = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert data["holds"] is True and [cell["policy"] for cell in data["cells"]] == list(POLICIES)
    for cell in data["cells"]:
        assert cell["num_repeats"] == 3 and len(cell["decisions"]) == 3
        assert {item["difference"] for item in cell["decisions"]} == {None}
        assert {figure["error"] for figure in cell["figures"].values()} == {0.0}
        assert {figure["spread"] for figure in cell["figures"].values()} == {0.0}
        assert {(stage["bias"], stage["median"], stage["p95"]) for stage in cell["batches"].values()} == {
            (0.0, 0.0, 0.0)
        }
        assert {(item["mean_absolute_ms"], item["bias_ms"]) for item in cell["requests"].values()} == {
            (0.0, 0.0)
        }
        assert cell["queue"]["simulated"] == cell["queue"]["measured"]
    assert data["ranking"] and all(order["is_alike"] for order in data["ranking"])
    pictures = {item.name for item in (tmp_path / "out" / "plots").iterdir()}
    assert {"agreement.png", "batches.png", "errors.png", "latency-synthetic-chunk-16.png"} <= pictures
    page = (tmp_path / "out" / "compare.md").read_text()
    assert "## Every figure" in page and "Beyond their tolerance" not in page


def test_another_device_is_off_by_what_the_summaries_say_and_fails(measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        sim(
            [
                "predict",
                str(measured),
                "--out",
                str(tmp_path / "sim"),
                "--device",
                "roofline:l4",
                "--jobs",
                "1",
            ]
        )
        == 0
    )
    assert status_of("compare", tmp_path / "sim", measured, "--out", out, "--no-plots") == 1
    assert status_of("compare", tmp_path / "sim", measured, "--out", out, *WIDE) == 0
    data = json.loads((out / "compare.json").read_text())
    comparison = compare(tmp_path / "sim", measured, Tolerances())
    for cell, written in zip(comparison.cells, data["cells"], strict=True):
        left, right = cell.pair.predicted.summary, cell.pair.measured[0].summary
        for name, key in (("TTFT p50", "ttft_ms"), ("E2E p50", "e2e_ms")):
            assert written["figures"][name]["predicted"] == left[key]["p50"]
            assert written["figures"][name]["error"] == pytest.approx(
                left[key]["p50"] / right[key]["p50"] - 1, abs=1e-12
            )
        assert written["batches"]["CODA"]["bias"] > 0
    factors = [abs(figure.error) / (figure.tolerance or 1) for _, figure in comparison.misses]
    assert factors == sorted(factors, reverse=True) and factors[-1] > 1
    assert (out / "compare.md").read_text().startswith("# Simulated against measured\n")
    status_of("compare", tmp_path / "sim", measured, "--out", out, "--no-plots")
    assert "## Beyond their tolerance" in (out / "compare.md").read_text()


def test_repeats_give_a_mean_and_a_spread_and_too_few_are_said(measured: Path, tmp_path: Path) -> None:
    assert sim(["predict", str(measured), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 0
    for repeat, factor in zip("abc", (0.9, 1.0, 1.1), strict=True):
        run = measured / f"wcpb-{repeat}"
        edit_summary(
            run,
            lambda summary, f=factor: summary.update(request_throughput=summary["request_throughput"] * f),
        )  # type: ignore[misc]
    shutil.rmtree(measured / "atomic-c")
    comparison = compare(tmp_path / "sim", measured, Tolerances())
    throughput = {
        cell.pair.predicted.policy: by_label(cell.figures)["throughput"] for cell in comparison.cells
    }
    assert throughput["wcpb"].spread == pytest.approx(0.1) and throughput["wcpb"].error == pytest.approx(0)
    assert throughput["atomic"].spread == 0
    assert comparison.notes == [
        "1 of 2 configs were measured fewer than 3 times: their spread is not known well"
    ]


def test_a_changed_decision_fails_the_comparison_whatever_the_tolerance(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(
        measured / "wcpb-b" / "batches.csv",
        lambda text: text.replace(":PREFILLING_RECURRENT:0:16:16", ":PREFILLING_RECURRENT:0:16:15"),
    )
    assert sim(["predict", str(measured), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 1
    assert status_of("compare", tmp_path / "sim", measured, "--out", tmp_path / "out", *WIDE) == 1
    printed = capsys.readouterr().out
    assert "decisions differ: wcpb-b after " in printed and "DIFFER" in printed


def test_without_replays_and_predictions_the_figures_are_compared_and_that_is_said(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = simulated(tmp_path / "sim", config_of("wcpb"))
    assert status_of("compare", run, measured / "wcpb-a", "--out", tmp_path / "out", "--no-plots") == 0
    assert "not replayed" in capsys.readouterr().out
    (run / "batches.csv").unlink()
    assert status_of("compare", run, measured / "wcpb-a", "--out", tmp_path / "out") == 0
    data = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert data["cells"][0]["requests"] == {} and data["cells"][0]["queue"] is None and data["batches"] == {}


def test_packed_runs_are_compared_like_directories(measured: Path, tmp_path: Path) -> None:
    pack = tmp_path / "recorded" / "p.tar.xz"
    assert status_of("pack", measured, "--out", pack) == 0
    assert sim(["predict", str(pack.parent), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 0
    comparison = compare(tmp_path / "sim", pack.parent, Tolerances())
    assert [
        (len(cell.pair.measured), cell.times is not None, len(cell.replays)) for cell in comparison.cells
    ] == [(3, True, 1)] * 2
    assert comparison.holds and not comparison.notes


def test_runs_packed_without_logs_are_simulated_from_their_config(measured: Path, tmp_path: Path) -> None:
    pack = tmp_path / "recorded" / "p.tar.xz"
    assert status_of("pack", measured, "--logs", "none", "--out", pack) == 0
    assert sim(["predict", str(pack), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 0
    comparison = compare(tmp_path / "sim", pack, Tolerances(0, 0, 0))
    assert [(len(cell.pair.measured), cell.is_replayed, cell.times) for cell in comparison.cells] == [
        (3, None, None)
    ] * 2
    assert comparison.holds
    assert sim(["replay", str(pack)]) == 2


def test_an_open_trace_is_simulated_from_the_recorded_requests_when_its_file_is_gone(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"{at * 1.5},{20 + 13 * at % 90},{1 + at % 4}" for at in range(15)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    workload = {"kind": "trace", "path": str(trace), "time_scale": 0.004}
    raw = {**config_of("wcpb"), "workload": workload}
    simulated(tmp_path / "measured" / "run", raw)
    capped = simulated(tmp_path / "capped", {**raw, "workload": {**workload, "concurrency": 2}})
    trace.unlink()
    assert sim(["predict", str(tmp_path / "measured"), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 0
    comparison = compare(tmp_path / "sim", tmp_path / "measured", Tolerances(0, 0, 0, 0))
    assert comparison.holds and {figure.error for figure in comparison.cells[0].figures} == {0.0}
    assert sim(["predict", str(capped), "--out", str(tmp_path / "sim"), "--jobs", "1"]) == 2


def refusal(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        compare(*paths, Tolerances())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_not_run_alike_is_refused_by_name(measured: Path, tmp_path: Path) -> None:
    run = measured / "wcpb-a"
    simulated_run = simulated(tmp_path / "sim" / "wcpb", config_of("wcpb"))
    assert 'policy.name: "atomic" simulated, "wcpb" measured' in refusal(measured / "atomic-a", run)
    seeded = simulated(tmp_path / "seeded", config_of("wcpb", seed=1))
    assert "seed: 1 simulated, 0 measured" in refusal(seeded, run)
    fewer = simulated(tmp_path / "fewer", config_of("wcpb", workload={"num_requests": 11}))
    assert "workload.num_requests: 11 simulated, 12 measured" in refusal(fewer, run)
    capped = simulated(tmp_path / "capped", config_of("wcpb", workload={"max_tokens": 9}))
    assert "workload.max_tokens: 9 simulated, None measured" in refusal(capped, run)
    small = simulated(tmp_path / "small", config_of("wcpb", cache={"num_blocks": 400}))
    assert "cache.num_blocks: 400 simulated, " in refusal(small, run)
    assert "simulate the same config, expected it once" in refusal(measured, run)
    edit_summary(measured / "wcpb-b", lambda summary: summary.update(device="another"))
    assert "measured on another and on h200-analytic, expected repeats on one device" in refusal(
        simulated_run, measured
    )
    edit(run / "requests.csv", lambda text: text.replace(",37,4,finished", ",38,4,finished", 1))
    assert "request 0: prompt_tokens: 37 simulated, 38 measured" in refusal(simulated_run, run)
    edit(run / "requests.csv", lambda text: text[: text.rindex("\n", 0, -1) + 1])
    assert "requests.csv has 12 lines simulated, 11 measured" in refusal(simulated_run, run)
    edit_summary(run, lambda summary: summary.update(output_tokens=1))
    assert "output_tokens: " in refusal(simulated_run, run)


def test_sides_the_wrong_way_round_and_runs_that_did_not_complete_are_refused(
    measured: Path, tmp_path: Path
) -> None:
    run = simulated(tmp_path / "sim", config_of("wcpb"))
    edit_summary(measured / "wcpb-a", lambda summary: summary.update(world="executor"))
    assert "expected the simulated side first" in refusal(measured / "wcpb-a", run)
    edit_summary(measured / "wcpb-a", lambda summary: summary.update(status="interrupted"))
    assert refusal(run, measured / "wcpb-a") == "nothing to compare: wcpb-a: interrupted, not compared"


def test_a_run_without_a_partner_is_named_and_the_others_are_compared(measured: Path, tmp_path: Path) -> None:
    simulated(tmp_path / "sim" / "wcpb", config_of("wcpb"))
    simulated(tmp_path / "sim" / "split", config_of("split"))
    comparison = compare(tmp_path / "sim", measured, Tolerances())
    assert [cell.pair.predicted.policy for cell in comparison.cells] == ["wcpb"]
    assert (
        "atomic-a: measured, not simulated" in comparison.notes
        and "split: simulated, not measured" in comparison.notes
    )


def test_an_option_that_came_after_the_recording_does_not_part_two_runs(
    measured: Path, tmp_path: Path
) -> None:
    run = simulated(tmp_path / "sim", config_of("wcpb"))
    edit(measured / "wcpb-a" / "config.yaml", lambda text: text.replace("  fuse_prelude: true\n", ""))
    assert compare(run, measured / "wcpb-a", Tolerances()).holds


@pytest.mark.parametrize(
    ("measurements", "spreads", "predictions", "found"),
    [
        ((100.0, 110.0), (None, None), (50.0, 60.0), [True]),
        ((100.0, 110.0), (None, None), (60.0, 50.0), [False]),
        ((100.0, 110.0), (None, None), (50.0, 50.0), [False]),
        ((100.0, 101.9), (None, None), (60.0, 50.0), []),
        ((101.9, 100.0), (None, None), (60.0, 50.0), []),
        ((102.1, 100.0), (None, None), (60.0, 50.0), [True]),
        ((100.0, 110.0), (0.06, 0.05), (60.0, 50.0), []),
        ((100.0, 110.0), (0.04, 0.05), (60.0, 50.0), [False]),
    ],
)
def test_policies_have_an_order_only_where_they_differ_enough(
    measurements: tuple[float, ...],
    spreads: tuple[float | None, ...],
    predictions: tuple[float, ...],
    found: list[bool],
) -> None:
    figures = [
        {"TTFT p50": Figure("TTFT", "p50", predicted, measured, spread, None)}
        for predicted, measured, spread in zip(predictions, measurements, spreads, strict=True)
    ]
    data = orders("w", dict(zip(("a", "b"), figures, strict=True)), 0.02)
    assert [order.is_alike for order in data] == found


def test_the_centre_of_repeats_is_their_mean_and_their_largest_distance_from_it() -> None:
    assert centre([9.0, 10.0, 11.0]) == (10.0, pytest.approx(0.1))
    assert centre([4.0]) == (4.0, None)


def requests_frame(arrivals_s: list[float], waits_s: list[float], served_s: float = 1.0) -> pd.DataFrame:
    arrival = (np.array(arrivals_s) * 1e9).astype("int64")
    start = arrival + (np.array(waits_s) * 1e9).astype("int64")
    end = start + int(served_s * 1e9)
    return pd.DataFrame(
        {
            "request_id": range(len(arrival)), "arrival_ns": arrival, "first_scheduled_ns": start,
            "first_token_ns": start,
            "finished_ns": end, "output_tokens": 1, "status": "finished",
        }
    )  # fmt: skip


def test_a_wait_that_grows_with_time_is_saturation_and_its_slope_is_told() -> None:
    arrivals = [float(at) for at in range(20)]
    growing = queue_of(requests_frame(arrivals, [0.3 * at for at in range(20)]), 30.0)
    assert growing.wait_growth == pytest.approx(0.3) and growing.verdict == "saturated"
    steady = queue_of(requests_frame(arrivals, [0.5] * 20), 20.0)
    assert steady.wait_growth == pytest.approx(0, abs=1e-9) and steady.verdict == "not saturated"
    assert (steady.mean_depth, steady.max_depth) == (pytest.approx(0.5), 1)
    burst = queue_of(requests_frame([0.0] * 20, arrivals), 20.0)
    assert burst == Queue(9.5, 19, None) and burst.verdict == "no arrivals over time"


def test_the_queue_steps_up_at_an_arrival_and_down_when_it_is_scheduled() -> None:
    times, depth = queue_steps(requests_frame([1.0, 2.0, 3.0], [0.0, 2.0, 0.5]))
    assert times.tolist() == [1.0, 2.0, 2.5, 3.0]
    assert depth.tolist() == [1, 2, 1, 0]


def test_errors_of_requests_are_told_by_size_by_sign_and_by_order() -> None:
    measured = requests_frame([0.0, 1.0, 2.0], [0.1, 0.2, 0.3])
    later = requests_frame([0.0, 1.0, 2.0], [0.2, 0.2, 0.4])
    ttft = request_errors(later, measured)["TTFT"]
    assert (ttft.num_requests, ttft.mean_absolute_ms, ttft.bias_ms) == (
        3,
        pytest.approx(200 / 3),
        pytest.approx(200 / 3),
    )
    assert ttft.correlation == pytest.approx(np.corrcoef([0.2, 0.2, 0.4], [0.1, 0.2, 0.3])[0, 1])
    assert "TPOT" not in request_errors(later, measured)
    assert (
        request_errors(requests_frame([0.0, 1.0], [0.1, 0.1]), measured.head(2))["TTFT"].correlation is None
    )
