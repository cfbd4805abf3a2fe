"""Pictures are drawn, show what is there, and say it when there is nothing."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from results_runs import write_run

from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from policies.core.seam.request import Request
from results.load import Run, load_run
from results.plots import (
    Window,
    plot_account,
    plot_chunks,
    plot_latency_cdfs,
    plot_pareto,
    plot_rows,
    plot_wavefront,
)
from results.plots.account import IDLE, Share, account
from results.plots.rows import bin_rows
from results.plots.window import default_window, layout
from results.tradeoff import Point, front, tradeoff_of
from sim.run import simulate

ONE_TOKEN = tuple(Request(at, 0, 24, 1) for at in range(3))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        write_run(folder / f"{policy}-{chunk}", policy, chunk, trace=False)
        for policy in ("atomic", "wcpb")
        for chunk in (4, 8)
    ]


def assert_is_picture(path: Path) -> None:
    """A PNG of some size in which a fair share of pixels is neither white nor grey."""
    pixels = imread(path)
    assert pixels.shape[0] > 200 and pixels.shape[1] > 600
    assert (np.ptp(pixels[..., :3], axis=2) > 0.15).mean() > 0.0005


def test_a_run_leaves_its_three_pictures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plots=True)
    names = sorted(item.name for item in (run.path / "plots").iterdir())
    assert names == ["latency.png", "rows.png", "time.png", "wavefront.png"]
    for name in names:
        assert_is_picture(run.path / "plots" / name)


def test_several_runs_are_drawn_together(runs: list[Run], tmp_path: Path) -> None:
    for draw in (plot_account, plot_chunks, plot_latency_cdfs, plot_pareto, plot_rows, plot_wavefront):
        name = draw.__name__
        path = tmp_path / f"{name}.png"
        draw(runs, path)
        assert_is_picture(path)


def test_one_token_requests_are_compared_by_ttft(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", requests=ONE_TOKEN, trace=False)
    found = tradeoff_of([run])
    assert (found.x_name, found.y_name) == ("p99 TTFT, ms", "prompt tokens/s")
    figures = (run.summary["ttft_ms"]["p99"], run.summary["prompt_token_throughput"])
    assert found.points == (Point("wcpb", 4, *figures),)
    plot_latency_cdfs([run], tmp_path / "cdf.png")
    assert_is_picture(tmp_path / "cdf.png")


def test_the_parts_of_a_bar_add_up_to_the_time_between_the_first_batch_and_the_last(runs: list[Run]) -> None:
    for run in runs:
        batches = list(run.batches())
        whole_ns = batches[-1].finished_ns - batches[0].started_ns
        assert sum(share.seconds for share in account(run.summary)) == pytest.approx(whole_ns / 1e9)


def test_a_stage_is_its_limit_and_what_it_took_beyond() -> None:
    def stage(device_s: float, limit_fraction: float | None) -> dict[str, object]:
        return {"device_s": device_s, "limit_fraction": limit_fraction}

    summary = {
        "stages": {"RECURRENT": stage(2.0, 0.75), "CODA": stage(0.5, 0.5), "PRELUDE": stage(0.25, None)},
        "device_idle_s": 1.0, "device_idle_host_s": 0.5, "device_idle_launch_s": 0.125,
    }  # fmt: skip
    assert account(summary) == [
        Share("prompt", 0, True), Share("prompt", 0),
        Share("decode and mixed", 1.5, True), Share("decode and mixed", 0.5),
        Share("prelude and coda", 0.25, True), Share("prelude and coda", 0.5),
        *(Share(name, seconds) for name, seconds in zip(IDLE, (0.5, 0.125, 0.375), strict=True)),
    ]  # fmt: skip


def test_the_front_holds_what_nothing_beats() -> None:
    best, fast, slow, same = (
        Point("a", 1, 1.0, 5.0),
        Point("a", 2, 3.0, 9.0),
        Point("b", 1, 3.0, 8.0),
        Point("b", 2, 1.0, 5.0),
    )
    assert front([slow, fast, same, best]) == [best, same, fast]
    assert front([slow, fast, same, best], y_rises=False) == [best, same]


def test_row_bins_weigh_up_to_the_mean(runs: list[Run]) -> None:
    run = runs[-1]
    bins = bin_rows(run, num_bins=1)
    assert bins.prompt_rows[0] + bins.decode_rows[0] == pytest.approx(
        run.summary["rows_per_recurrent_invocation"]
    )
    invocations = run.summary["recurrent_invocations"]
    decode = sum(batch.loop_count * batch.num_decode_rows for batch in run.batches())
    assert bins.decode_rows[0] == pytest.approx(decode / invocations)


def test_boxes_are_as_many_as_ranges_times_loops_and_stay_in_their_lane(runs: list[Run]) -> None:
    for run in runs:
        batches = list(run.batches())
        (boxes,) = layout([batches], 4)
        assert len(boxes) == sum(max(batch.loop_count, 1) * len(batch.ranges()) for batch in batches)
        for box in boxes:
            if 0 <= box.depth < 4:
                assert box.depth <= box.y and box.y + box.height <= box.depth + 1 + 1e-9


def test_rows_on_a_refused_guess_are_struck_out_and_they_are_the_surplus_ones(tmp_path: Path) -> None:
    """As many rows as the run counts as surplus, and each refused one's own boxes before it was known."""
    config = parse_config(
        {
            "model": "ouro-tiny",
            "policy": "wcpb",
            "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 64, "prefill_chunk_size": 16},
            "speculation": {"mode": "loops", "draft_loops": 2, "max_tokens": 3, "acceptance": 0.5},
            "workload": {"kind": "synthetic", "num_requests": 2, "prompt_tokens": 20, "output_tokens": 12},
        },
        tmp_path,
        "test.yaml",
    )
    path, summary = simulate(config, tmp_path / "run", plots=False)
    batches = list(load_run(path).batches())
    (boxes,) = layout([batches], 4)
    struck = [box for box in boxes if box.is_refused]
    assert struck and not any(box.item.is_prompt for box in struck)
    known = {(request_id, at): batch.seq for batch in batches for request_id, at in batch.refused}
    assert {box.item.request_id for box in struck} == {request_id for request_id, _ in known}
    late = [
        (item.request_id, item.token_start)
        for batch in batches
        for item in batch.ranges()
        if any(r == item.request_id and at < item.token_start and batch.after_seq < seq < batch.seq
               for (r, at), seq in known.items())
    ]  # fmt: skip
    assert summary["surplus_rows"] >= len(late) > 0


def test_prompt_boxes_share_one_scale_between_panels(runs: list[Run]) -> None:
    panels = layout([list(run.batches()) for run in (runs[0], runs[2])], 4)
    heights = [
        {
            round(box.height, 9)
            for box in panel
            if box.item.is_prompt and box.item.token_count == 4 and 0 <= box.depth < 4
        }
        for panel in panels
    ]
    assert len(heights[0]) == 1 and heights[0] == heights[1]


def test_the_default_window_shows_a_prompt_that_joins_running_decodes(tmp_path: Path) -> None:
    requests = [Request(0, 0, 16, 60), Request(1, 50_000_000, 400, 2)]
    run = write_run(tmp_path / "run", requests=requests, trace=False)
    chosen = default_window(run, 12).select(run.batches(), "run")
    assert len(chosen) == 12
    starts = [
        place
        for place, batch in enumerate(chosen)
        if any(item[:1] + item[2:4] == (1, 0, 0) for item in batch.ranges())
    ]
    assert starts[0] == 6 and any(batch.num_decode_rows for batch in chosen[:6])


def test_a_prompt_after_an_idle_device_joins_nothing(tmp_path: Path) -> None:
    requests = [Request(0, 0, 16, 3), Request(1, 900_000_000, 40, 1)]
    run = write_run(tmp_path / "run", requests=requests, trace=False)
    assert default_window(run, 12) == Window(first_batch=0, last_batch=11)


def test_without_decodes_the_default_window_is_the_start(tmp_path: Path) -> None:
    assert default_window(write_run(tmp_path / "run", requests=ONE_TOKEN, trace=False), 12) == Window(
        first_batch=0, last_batch=11
    )


def test_a_window_is_cut_by_batches_or_by_time(runs: list[Run]) -> None:
    batches = list(runs[0].batches())
    assert [batch.seq for batch in Window(first_batch=2, last_batch=4).select(batches, "run")] == [2, 3, 4]
    by_time = Window(start_ns=batches[2].started_ns, end_ns=batches[4].finished_ns).select(batches, "run")
    assert [batch.seq for batch in by_time] == [2, 3, 4]
    with pytest.raises(InputError, match="run: no batch in the window of batches 900 to 901"):
        Window(first_batch=900, last_batch=901).select(batches, "run")
    with pytest.raises(InputError, match="run: no batch in the window from 9e\\+06 ms to the end"):
        Window(start_ns=9 * 10**12).select(batches, "run")


def test_a_window_too_long_to_draw_is_refused(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("results.plots.window.MAX_BOXES", 10)
    with pytest.raises(InputError, match="holds more than 10 ranges, choose a shorter one"):
        Window(first_batch=0).select(runs[0].batches(), "run")


def test_the_same_run_gives_the_same_picture(runs: list[Run], tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plot_wavefront(runs[:1], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
