"""Pictures that decide: which figures stand against each other, and what is drawn of objectives and loads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from results_runs import write_run

from policies.core.errors import InputError
from policies.core.seam.request import Request
from results.capacity import rows_of, write_capacity
from results.cli import main
from results.load import Run
from results.plots import plot_goodput, plot_load, plot_pareto
from results.plots.cdf import tail_steps
from results.plots.chunks import rows_taken_in
from results.plots.window import PROMPT, default_window
from results.report import write_report
from results.tradeoff import Point, front, loads_of, tradeoff_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_run(tmp_path_factory.mktemp("runs") / "run", trace=False)


def like(run: Run, policy: str, chunk: int, rate: float = 2.0, **summary: Any) -> Run:
    """`run` as if it had been another, with these figures in its summary."""
    told = {"policy": policy, "prefill_chunk_size": chunk, "offered_request_rate": rate, **summary}
    config = {
        **run.config,
        "workload": {"kind": "synthetic", "arrival": {"process": "poisson", "rate": rate}},
    }
    return replace(run, config=config, summary={**run.summary, **told})


def p99(value: float) -> dict[str, float]:
    return dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), value)


def cell(run: Run, policy: str, chunk: int, output: float, ttft: float, itl: float, **more: Any) -> Run:
    slo = {"ttft_ms": 500.0, "itl_ms": 20.0, "share": 0.99, "share_met": 1.0, "goodput": 2.0,
           "holds": ttft <= 500 and itl <= 20}  # fmt: skip
    figures = {"output_token_throughput": output, "ttft_ms": p99(ttft), "itl_ms": p99(itl), "slo": slo}
    return like(run, policy, chunk, **{**figures, **more})


def test_below_saturation_one_tail_stands_against_the_other_and_the_objective_is_a_box(
    run: Run, tmp_path: Path
) -> None:
    """Throughputs of 131.4 to 131.7 once put a p99 TTFT of 17.8 s on the front."""
    runs = [cell(run, "split", 16, 131.7, 17_800, 9), cell(run, "wcpb", 64, 131.4, 300, 12),
            cell(run, "wcpb", 512, 131.5, 200, 25)]  # fmt: skip
    found = tradeoff_of(runs)
    assert (found.x_name, found.y_name, found.y_rises) == ("p99 ITL, ms", "p99 TTFT, ms", False)
    assert found.box == (20.0, 500.0)
    inside = [point for point in found.points if point.x <= 20 and point.y <= 500]
    assert inside == [Point("wcpb", 64, 12, 300, True)] and inside[0] in front(found.points, False)
    plot_pareto(runs, tmp_path / "below.png")
    assert imread(tmp_path / "below.png").shape[0] > 300
    busy = [*runs, cell(run, "atomic", 16, 120.0, 900, 30)]
    assert tradeoff_of(busy).y_name == "output tokens/s"
    idle = [
        cell(run, item.policy, 16, 100.0 + at, 9, 9, limited_by="arrivals") for at, item in enumerate(runs)
    ]
    assert not tradeoff_of(idle).y_rises


def test_runs_that_differ_in_their_rate_alone_are_one_traffic(run: Run, tmp_path: Path) -> None:
    runs = [cell(run, policy, 16, 10 * rate, 100 * rate, 5, rate=rate)
            for policy in ("wcpb", "split") for rate in (4.0, 1.0, 2.0)]  # fmt: skip
    (load,) = loads_of(runs)
    assert list(load.series) == [("split", 16), ("wcpb", 16)]
    assert [item.summary["offered_request_rate"] for item in load.series["wcpb", 16]] == [1, 2, 4]
    plot_load(runs, tmp_path / "load.png")
    assert imread(tmp_path / "load.png").shape[1] > 600
    with pytest.raises(InputError, match="no traffic of these runs was offered at two rates"):
        plot_load(runs[:1], tmp_path / "none.png")


def test_goodput_is_drawn_for_both_worlds_side_by_side(run: Run, tmp_path: Path) -> None:
    runs = [cell(run, policy, chunk, 9, 90, 9, world=world)
            for policy in ("wcpb", "slo") for chunk in (16, 64) for world in ("sim", "executor")]  # fmt: skip
    plot_goodput(runs, tmp_path / "both.png")
    plot_goodput([item for item in runs if item.summary["world"] == "sim"], tmp_path / "one.png")
    both, one = (imread(tmp_path / name).shape[1] for name in ("both.png", "one.png"))
    assert both > one > 600
    with pytest.raises(InputError, match="no run has objectives"):
        plot_goodput([run], tmp_path / "none.png")
    status = main(["plot", str(run.path), "--goodput", "--out", str(tmp_path / "none.png")])
    assert status == 2 and not (tmp_path / "none.png").exists()


def test_the_steps_of_a_tail_end_at_its_largest_samples() -> None:
    values, larger = tail_steps(np.array([3.0, 1.0, 4.0, 2.0]))
    assert values.tolist() == [1, 1, 2, 3, 4] and larger.tolist() == [1, 0.75, 0.5, 0.25, 0.125]
    many = np.random.default_rng(0).exponential(size=100_000)
    values, larger = tail_steps(many)
    assert len(values) <= 2_001 and values[-1] == many.max()
    assert values[-10:].tolist() == np.sort(many)[-10:].tolist()
    for value, share in zip(values[1:-1:97], larger[1:-1:97], strict=True):
        assert share == (many > value).mean()


def test_rows_taken_in_add_up_to_the_prompts(run: Run) -> None:
    prompts = run.requests()["prompt_tokens"].sum()
    assert sum(map(rows_taken_in, run.batches())) == prompts


def test_the_default_window_shows_two_prompts_where_two_come_near_each_other(tmp_path: Path) -> None:
    """The first prompt joins alone; the second and third come together, later."""
    requests = [Request(0, 0, 16, 200), Request(1, 40_000_000, 24, 2), Request(2, 300_000_000, 60, 2),
                Request(3, 305_000_000, 60, 2)]  # fmt: skip
    run = write_run(tmp_path / "run", requests=requests, trace=False)
    chosen = default_window(run, 16).select(run.batches(), "run")
    prompts = {name for batch in chosen for name in PROMPT.findall(batch.ranges_text)}
    assert prompts == {"2", "3"} and any(batch.num_decode_rows for batch in chosen)


def test_the_page_shows_a_capacity_search_beside_the_runs(run: Run, tmp_path: Path) -> None:
    answer = {"policy": "wcpb", "prefill_chunk_size": 64, "workload": "chat", "value": 3.5, "axis": "rate",
              "replicas": 1, "requests_per_s": 3.5, "is_open": False, "exceptions": [], "beyond": None,
              "alone": None}  # fmt: skip
    beyond = {**answer, "prefill_chunk_size": 16, "value": None, "requests_per_s": None}
    write_capacity(rows_of([[answer], [beyond]]), tmp_path / "found", {})
    write_report([run], tmp_path / "page.html", folders=[tmp_path / "found"])
    assert "<h2>Capacity</h2>" in (tmp_path / "page.html").read_text()
    (tmp_path / "found" / "capacity.csv").write_text("workload,policy\nchat,wcpb\n")
    with pytest.raises(InputError, match=r"capacity\.csv: .*, expected what `sim capacity` writes"):
        write_report([run], tmp_path / "page.html", folders=[tmp_path / "found"])
