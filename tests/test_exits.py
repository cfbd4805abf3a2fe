"""Early exit without a device: where batches come back, what is surplus, and that no schedule changes which
token leaves when."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from log_checker import Broken, Rules, check_log
from toy_backend import Run, World, run
from worlds import spelled

from policies.atomic import Atomic
from policies.config.runconfig import RunConfig, load_config, parse_config
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import InputError, InvariantError
from policies.core.models.shape import OURO_1_4B, OURO_TINY
from policies.core.seam.batch import ScheduledRange, Stage, Work
from policies.core.seam.events import Completion
from policies.core.seam.exits import ExitRule, ExitSettings
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.costs.models import load_device
from policies.registry import POLICIES
from sim.exits import DrawnExits
from sim.replay import replay
from sim.run import simulate
from workloads.spec import parse_workload
from workloads.workload import load_workload

RULES = Rules(4, 2, 16, 4, 2, 1, 100, 16, min_loops=1)


@pytest.mark.parametrize(
    ("rule", "boundaries"),
    [
        (ExitRule(1, 4, True), [1, 2, 3, 4]),
        (ExitRule(2, 4, True), [2, 2, 3, 4]),
        (ExitRule(3, 4, True), [3, 3, 3, 4]),
        (ExitRule(2, 3, True), [2, 2, 3]),
        (ExitRule(4, 4, False), [4, 4, 4, 4]),
        (ExitRule(1, 2, False), [2, 2]),
    ],
)
def test_a_decode_row_runs_to_the_next_depth_at_which_it_may_leave(
    rule: ExitRule, boundaries: list[int]
) -> None:
    assert [rule.boundary(depth) for depth in range(rule.max_loops)] == boundaries


def test_limits_alone_and_a_threshold_of_1_decide_nothing() -> None:
    assert ExitSettings("gate").rule(4) == ExitRule(1, 4, False)
    assert ExitSettings("gate", threshold=0.999).rule(4) == ExitRule(1, 4, True)
    assert ExitSettings("trace", 2, 2).rule(4) == ExitRule(2, 2, False)
    assert ExitSettings().rule(4) == ExitRule(4, 4, False)


def decoded(result: Run) -> list[tuple[str, int, int]]:
    """(stage, depth, loops) of every batch after the first token."""
    return [(str(batch.stage), batch.ranges[0].depth, batch.loop_count) for batch in result.batches[2:]]


def one_request(inflight: int, exits: ExitSettings, loops: list[int]) -> Run:
    """One prompt token, one output token from prefill and one for each of `loops`."""
    world = World(exit_loops=lambda _, position: loops[position - 1])
    settings = SchedulerSettings(2, 16, 4, inflight=inflight)
    return run(Atomic(), [Request(0, 0, 1, len(loops) + 1)], settings, world=world, exits=exits)


def test_a_token_goes_to_coda_at_the_depth_at_which_it_left() -> None:
    result = one_request(1, ExitSettings("trace"), [2, 4, 1])
    assert decoded(result) == [
        ("PRELUDE", 0, 0), ("RECURRENT", 0, 1), ("RECURRENT", 1, 1), ("CODA", 2, 0), ("PRELUDE", 0, 0),
        ("RECURRENT", 0, 1), ("RECURRENT", 1, 1), ("RECURRENT", 2, 1), ("RECURRENT", 3, 1), ("CODA", 0, 0),
        ("PRELUDE", 0, 0), ("RECURRENT", 0, 1), ("CODA", 1, 0),
    ]  # fmt: skip
    assert result.engine.scheduler.surplus_rows == 0
    assert result.engine.scheduler.tokens_by_loops == [0, 1, 1, 0, 1]


def test_with_two_batches_in_flight_the_decision_comes_one_batch_late_and_the_surplus_row_is_counted() -> (
    None
):
    result = one_request(2, ExitSettings("trace"), [2, 4, 1])
    assert decoded(result) == [
        ("PRELUDE", 0, 0), ("RECURRENT", 0, 1), ("RECURRENT", 1, 1), ("RECURRENT", 2, 1), ("CODA", 2, 0),
        ("PRELUDE", 0, 0), ("RECURRENT", 0, 1), ("RECURRENT", 1, 1), ("RECURRENT", 2, 1), ("RECURRENT", 3, 1),
        ("CODA", 0, 0), ("PRELUDE", 0, 0), ("RECURRENT", 0, 1), ("RECURRENT", 1, 1), ("CODA", 1, 0),
    ]  # fmt: skip
    assert result.engine.scheduler.surplus_rows == 2
    assert result.engine.scheduler.tokens_by_loops == [0, 1, 1, 0, 1]
    assert check_log(result.batches_csv, result.requests_csv, RULES).surplus_rows == 2


def test_with_more_in_flight_no_coda_is_formed_before_every_decision_on_its_token_is_known() -> None:
    result = one_request(4, ExitSettings("trace"), [2, 1, 4])
    depths = [("PRELUDE", 0, 0), *(("RECURRENT", depth, 1) for depth in range(4))]
    assert decoded(result) == [*depths, ("CODA", 2, 0), *depths, ("CODA", 1, 0), *depths, ("CODA", 0, 0)]
    assert result.engine.scheduler.surplus_rows == 2 + 3
    assert check_log(result.batches_csv, result.requests_csv, replace(RULES, inflight=4)).surplus_rows == 5


def test_no_boundary_before_min_loops_and_none_after_max_loops() -> None:
    result = one_request(1, ExitSettings("trace", 2, 3), [1, 2, 3, 4])
    early = [("PRELUDE", 0, 0), ("RECURRENT", 0, 2), ("CODA", 2, 0)]
    late = [("PRELUDE", 0, 0), ("RECURRENT", 0, 2), ("RECURRENT", 2, 1), ("CODA", 3, 0)]
    assert decoded(result) == [*early, *early, *late, *late]
    fixed_at_2 = one_request(2, ExitSettings("trace", 2, 2), [1, 4])
    assert decoded(fixed_at_2) == 2 * [("PRELUDE", 0, 0), ("RECURRENT", 0, 2), ("CODA", 2, 0)]


@pytest.mark.parametrize(
    ("seq", "exits", "sentence"),
    [
        (0, {0}, "batch 0 reports an exit of .*, which may not leave there"),
        (2, {0}, "batch 2 reports an exit of .*, which may not leave there"),
        (3, {0, 7}, r"batch 3 reports exits of \[0, 7\], it has rows of 1 of them"),
    ],
)
def test_a_backend_may_report_an_exit_only_of_a_row_that_may_leave(
    seq: int, exits: set[int], sentence: str
) -> None:
    scheduler = Scheduler(
        Atomic(), OURO_TINY, SchedulerSettings(), CacheSettings(num_blocks=400), ExitSettings("trace", 2)
    )
    scheduler.enqueue(Request(0, 0, 1, 9))
    with pytest.raises(InvariantError, match=sentence):
        for at in range(seq + 1):
            batch = scheduler.form_batch(0)
            assert batch is not None
            scheduler.collect(Completion(at, 0, 0, 0, exits=frozenset(exits if at == seq else ())))


def raw_config(policy: str, inflight: int, mode: str) -> dict[str, Any]:
    exits = {
        "trace": {"mode": "trace"},
        "gate": {"mode": "gate", "threshold": 0.6, "loop_weights": [3, 2, 1, 4], "min_loops": 2},
    }
    return {
        "model": "ouro-1.4b", "device": "h200", "policy": spelled(policy),
        "scheduler": {"max_num_seqs": 6, "max_num_batched_tokens": 48, "prefill_chunk_size": 16,
        "inflight": inflight},
        "exit": exits[mode],
        "workload": {
            "kind": "synthetic", "num_requests": 14, "prompt_tokens": [37, 5, 60], "output_tokens": [9, 1,
            14],
            "arrival": {"process": "poisson", "rate": 60}, "exit_loops": {"distribution": "choice",
            "values": [1, 2, 3, 4]},
        },
        "seed": 3,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["trace", "gate"])
def test_the_depth_of_every_token_is_the_same_under_every_policy_and_replay_repeats_every_run(
    tmp_path: Path, mode: str
) -> None:
    histograms, depths = [], []
    for policy in POLICIES:
        for inflight in (1, 2, 5):
            config = parse_config(raw_config(policy, inflight, mode), tmp_path, "test")
            path, summary = simulate(config, tmp_path / f"{policy}{inflight}", plots=False)
            histograms.append(summary["tokens_by_loops"])
            depths.append(coda_depths(path))
            assert (
                sum(summary["tokens_by_loops"].values()) == summary["output_tokens"] - summary["num_finished"]
            )
            assert summary["loops_saved"] == sum(
                (4 - int(key)) * count for key, count in summary["tokens_by_loops"].items()
            )
            assert (summary["surplus_rows"] > 0) == (inflight > 1)
            check_run(path, config)
            outcome = replay(path)
            assert outcome.difference is None, str(outcome)
    assert all(item == histograms[0] for item in histograms)
    assert all(item == depths[0] for item in depths)
    assert len(histograms[0]) == (4 if mode == "trace" else 3)


def coda_depths(path: Path) -> Counter[tuple[str, str, str]]:
    """(request, position, first skipped depth) of every CODA row."""
    with open(path / "batches.csv") as file:
        ranges = [
            item.split(":")
            for line in csv.DictReader(file)
            for item in line["ranges"].split()
            if ":CODA:" in item
        ]
    return Counter((request, position, depth) for request, _, depth, position, _ in ranges)


def check_run(path: Path, config: RunConfig) -> None:
    num_blocks = load_config(path / "config.yaml").cache.num_blocks
    assert num_blocks is not None
    rules = Rules(
        4, 6, 48, 16, config.scheduler.inflight, config.policy.resident_chunks(4), num_blocks // 4, 16,
        has_exact_times=False, min_loops=config.exit.min_loops,
    )  # fmt: skip
    texts = (path / "batches.csv").read_text(), (path / "requests.csv").read_text()
    check_log(*texts, rules)
    with pytest.raises(Broken):
        check_log(*texts, replace(rules, min_loops=None))


def test_drawn_depths_follow_their_weights_and_nothing_but_seed_request_and_position() -> None:
    draws = DrawnExits(7, (1.0, 0.0, 2.0, 1.0))
    found = Counter(draws.exit_loops(request, position) for request in range(100) for position in range(200))
    assert found[2] == 0
    assert [found[loops] / 20_000 for loops in (1, 3, 4)] == pytest.approx([0.25, 0.5, 0.25], abs=0.01)
    assert [draws.exit_loops(5, 9) for _ in range(3)] == [
        DrawnExits(7, (1.0, 0.0, 2.0, 1.0)).exit_loops(5, 9)
    ] * 3
    assert found != Counter(
        DrawnExits(8, (1.0, 0.0, 2.0, 1.0)).exit_loops(r, p) for r in range(100) for p in range(200)
    )


@pytest.mark.parametrize("device", ["h200-analytic", "roofline:h200"])
def test_an_exit_copy_takes_its_bytes_over_the_bandwidth(device: str) -> None:
    model = load_device(device, OURO_1_4B)

    def coda(*depths: int) -> Work:
        rows = tuple(ScheduledRange(at, Stage.CODA, depth, 900, 1) for at, depth in enumerate(depths))
        return Work.of(Stage.CODA, 0, rows)

    planes = (1 + 3) + (1 + 1)  # left after 1 loop: one plane read, three written; after 3: one and one
    copies_ns = int(planes * 196_608 / model.facts.bandwidth_bytes_per_s * 1e9)
    none, some = model.predict(coda(0, 0, 0)), model.predict(coda(0, 1, 3))
    assert none.breakdown()["copies"] == 0
    assert some.breakdown()["copies"] == copies_ns
    assert some.device_ns - none.device_ns == copies_ns
    assert some.limit_ns - none.limit_ns in (copies_ns, copies_ns + 1)


def test_a_fitted_model_predicts_exit_copies_from_its_profile_and_never_below_their_limit() -> None:
    model = load_device("h200", OURO_1_4B)
    rows = tuple(ScheduledRange(at, Stage.CODA, 1, 900, 1) for at in range(32))
    limit_ns = 32 * (1 + 3) * 196_608 / model.facts.bandwidth_bytes_per_s * 1e9
    assert limit_ns <= model.predict(Work.of(Stage.CODA, 0, rows)).breakdown()["copies"] < 100_000


def test_a_trace_says_the_loops_of_each_decoded_token(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,exit_loops\n0,8,4,2 1 3\n1,5,6,4\n2,5,2,\n")
    workload = load_workload(parse_workload({"kind": "trace", "path": str(path)}, "test"), 0)
    assert workload.exits is not None
    assert [workload.exits.exit_loops(0, position) for position in (8, 9, 10, 11)] == [2, 1, 3, 3]
    assert [workload.exits.exit_loops(1, position) for position in (5, 9)] == [4, 4]
    assert workload.exits.exit_loops(2, 5) > 4
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"arrival_s": 0, "prompt_tokens": 8, "output_tokens": 4, "exit_loops": [2, 1]}\n')
    workload = load_workload(parse_workload({"kind": "trace", "path": str(lines)}, "test"), 0)
    assert workload.exits is not None and workload.exits.exit_loops(0, 9) == 1
    path.write_text("arrival_s,prompt_tokens,output_tokens,exit_loops\n0,8,4,2 0 3\n")
    with pytest.raises(
        InputError, match="line 2: exit_loops: '2 0 3', expected nothing or whole numbers from 1 on"
    ):
        load_workload(parse_workload({"kind": "trace", "path": str(path)}, "test"), 0)


def test_a_synthetic_list_of_loops_is_cycled_over_the_decoded_tokens_of_all_requests() -> None:
    raw = {
        "kind": "synthetic",
        "num_requests": 3,
        "prompt_tokens": 4,
        "output_tokens": [3, 1, 4],
        "exit_loops": [1, 2, 3],
    }
    exits = load_workload(parse_workload(raw, "test"), 0).exits
    assert exits is not None
    assert [exits.exit_loops(0, 4), exits.exit_loops(0, 5)] == [1, 2]
    assert [exits.exit_loops(2, position) for position in (4, 5, 6)] == [3, 1, 2]
