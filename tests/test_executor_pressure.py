"""A bad day on the device: whoever is preempted and comes back, recomputed or swapped, has the bits of a run
that nothing disturbs."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cells import cells
from log_checker import check_log

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import (  # noqa: E402
    BASE,
    CountingTimeline,
    Done,
    config_of,
    delivered,
    rules_of,
    run_on,
    session_of,
)
from worlds import on_cpu  # noqa: E402

from executor import swap  # noqa: E402
from executor.checks.diagnose import diagnose  # noqa: E402
from executor.session import PlannedRun, Session, plan_runs  # noqa: E402
from executor.swap import SwapSpace  # noqa: E402
from policies.config.runconfig import RunConfig  # noqa: E402
from policies.core.errors import InputError  # noqa: E402
from policies.registry import POLICIES  # noqa: E402
from sim.replay import replay  # noqa: E402

PLANES = 4
PRESSED: dict[str, Any] = BASE | {
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk_size": 16},
    "cache": {"block_size": 8, "watermark": 0.0},
    "workload": {
        "kind": "synthetic", "num_requests": 7, "prompt_tokens": [37, 5, 70, 1, 50], "output_tokens": [24, 40,
        3, 31],
        "arrival": {"process": "burst"},
    },
}  # fmt: skip
"""Four of these requests at once need 26 to 34 groups of 8 positions; the largest alone needs 13."""
DEMAND_GROUPS, THIRD = 39, 13
CELLS = cells(list(POLICIES), (1, 2, 4), ("recompute", "swap"))


def pressed(*overrides: str) -> RunConfig:
    return config_of(*overrides, base=PRESSED)


def squeezed(policy: str, inflight: int, preemption: str, *overrides: str) -> RunConfig:
    return pressed(
        on_cpu(policy),
        f"scheduler.inflight={inflight}",
        f"cache.num_blocks={THIRD * PLANES}",
        "cache.allocation=incremental",
        f"cache.preemption={preemption}",
        *overrides,
    )


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Its first run is the undisturbed one, then come those of CELLS. Copies are cut small, so that one
    request needs several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "COPY_BYTES", 200_000)
        yield session_of(
            pressed(f"cache.num_blocks={DEMAND_GROUPS * PLANES}"), *(squeezed(*cell) for cell in CELLS)
        )


@pytest.fixture(scope="module")
def undisturbed(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Done:
    done = run_on(session, tmp_path_factory.mktemp("undisturbed") / "run")
    assert done.summary["preemptions"] == 0
    return done


def check(session: Session, run: PlannedRun, done: Done, **changes: Any) -> None:
    """The log keeps every rule, and deciding it again decides the same."""
    check_log(done.text("batches.csv"), done.text("requests.csv"), rules_of(session, run, **changes))
    outcome = replay(done.path)
    assert outcome.difference is None, str(outcome)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_a_pool_of_a_third_of_the_demand_changes_no_bit(
    session: Session, undisturbed: Done, tmp_path: Path, cell: Any
) -> None:
    run = session.runs[1 + CELLS.index(cell)]
    done = run_on(session, tmp_path / "run", run)
    assert done.against(undisturbed).is_identical
    assert done.summary["preemptions"] > 3
    assert (done.summary["swapped_bytes"] > 0) == (done.summary["swap_s"] > 0) == (cell[2] == "swap")
    check(session, run, done)


@pytest.mark.parametrize(
    ("policy", "inflight", "preemption"), cells(list(POLICIES), (1, 4), ("recompute", "swap"))
)
def test_clients_that_hang_up_anywhere_change_no_bit_of_the_others(
    session: Session,
    undisturbed: Done,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    inflight: int,
    preemption: str,
) -> None:
    """One waits, one runs, one is preempted and is in host memory or to be computed again."""
    monkeypatch.setattr("executor.run.make_timeline", lambda device: CountingTimeline())
    hanging = squeezed(policy, inflight, preemption, "workload.patience_ms=[1000, 9, 1000, 6, 14, 6, 20]")
    run = plan_runs([hanging], session.shape)[0]
    done = run_on(session, tmp_path / "run", run)
    requests = list(csv.DictReader(io.StringIO(done.text("requests.csv"))))
    survivors = {int(row["request_id"]) for row in requests if row["status"] == "finished"}
    assert done.summary["num_cancelled"] == len(requests) - len(survivors) >= 3
    assert any(row["status"] == "cancelled" and int(row["preemptions"]) for row in requests)
    for key in survivors:
        assert done.tokens[key] == undisturbed.tokens[key]
        assert done.fingerprints[key] == undisturbed.fingerprints[key]
    assert all(undisturbed.tokens[key][: len(tokens)] == tokens for key, tokens in done.tokens.items())
    assert delivered(done) == {key: len(tokens) for key, tokens in done.tokens.items() if tokens}
    check(session, run, done, outputs=None)


@pytest.mark.parametrize("mode", ["{mode: gate, threshold: 0.9}", "{mode: trace}"])
@pytest.mark.parametrize("inflight", [1, 4])
def test_a_token_that_gives_way_between_two_depths_leaves_where_it_would_have(
    tmp_path: Path, mode: str, inflight: int
) -> None:
    """What the exit gate has said of it so far goes with it to host memory and to another ring."""
    early = (f"exit={mode}", "workload.exit_loops=[1, 4, 2, 3, 1]") if "trace" in mode else (f"exit={mode}",)
    ample = pressed("policy=atomic", f"cache.num_blocks={DEMAND_GROUPS * PLANES}", *early)
    runs = [squeezed(policy, inflight, "swap", *early) for policy in ("split", "wcpb")]
    session = session_of(ample, *runs)
    expected = run_on(session, tmp_path / "ample")
    assert expected.summary["loops_saved"] > 20
    for run in session.runs[1:]:
        done = run_on(session, tmp_path / run.config.policy.name, run)
        assert done.against(expected).is_identical
        assert done.summary["preemptions"] > 3
        assert done.summary["tokens_by_loops"] == expected.summary["tokens_by_loops"]
        outcome = replay(done.path)
        assert outcome.difference is None, str(outcome)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_requests_of_higher_priority_put_others_out_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preemption: str
) -> None:
    """Full reservation: every third request is urgent and takes a place and blocks at once."""
    monkeypatch.setattr("executor.run.make_timeline", lambda device: CountingTimeline())
    trace = tmp_path / "trace.csv"
    lines = [
        f"{at // 3 * 0.002:.3f},{prompt},{output},{priority}"
        for at, (prompt, output, priority) in enumerate(URGENT)
    ]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,priority", *lines, ""]))
    base = PRESSED | {"workload": {"kind": "trace", "path": str(trace)}}
    slots = ("scheduler.max_num_seqs=2", "scheduler.admission=priority", f"cache.num_blocks={20 * PLANES}")
    session = session_of(
        config_of("policy=atomic", f"cache.num_blocks={DEMAND_GROUPS * PLANES}", base=base),
        *(
            config_of(on_cpu(policy), *slots, f"cache.preemption={preemption}", base=base)
            for policy in ("split", "wcpb")
        ),
    )
    expected = run_on(session, tmp_path / "expected")
    for run in session.runs[1:]:
        done = run_on(session, tmp_path / run.config.policy.name, run)
        assert done.against(expected).is_identical
        assert done.summary["preemptions"] > 0
        check(session, run, done)


URGENT = (
    (60, 30, 5),
    (40, 30, 5),
    (20, 4, 1),
    (33, 12, 5),
    (70, 9, 5),
    (8, 5, 1),
    (16, 20, 5),
    (50, 3, 4),
    (12, 4, 1),
)
"""Prompt tokens, output tokens and priority of nine requests, three at a time."""


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_one_plane_for_all_depths_gives_way_as_well(tmp_path: Path, preemption: str) -> None:
    shared = (
        "policy=atomic",
        "cache.layout=shared",
        "scheduler.prefill_chunk_size=1",
        "scheduler.inflight=4",
    )
    pressure = (f"cache.num_blocks={THIRD}", "cache.allocation=incremental", f"cache.preemption={preemption}")
    session = session_of(pressed(*shared, f"cache.num_blocks={DEMAND_GROUPS}"), pressed(*shared, *pressure))
    expected = run_on(session, tmp_path / "ample")
    done = run_on(session, tmp_path / "run", session.runs[1])
    assert done.against(expected).is_identical
    assert done.summary["preemptions"] > 2
    check(session, session.runs[1], done)


def test_drawn_tokens_are_the_same_after_giving_way(tmp_path: Path) -> None:
    drawn = ("sampling={temperature: 0.9, top_k: 40}",)
    ample = pressed(f"cache.num_blocks={DEMAND_GROUPS * PLANES}", *drawn)
    session = session_of(
        ample, squeezed("wcpb", 2, "recompute", *drawn), squeezed("mixed", 2, "swap", *drawn)
    )
    expected = run_on(session, tmp_path / "ample")
    for at, run in enumerate(session.runs[1:]):
        assert run_on(session, tmp_path / str(at), run).against(expected).is_identical


def test_host_memory_is_bounded_by_swap_blocks_and_used_again(
    session: Session, undisturbed: Done, tmp_path: Path
) -> None:
    """With room for 4 groups some victims are computed again. Nothing is kept at the end, and no page is
    lost."""
    run = plan_runs([squeezed("wcpb", 2, "swap", f"cache.swap_blocks={4 * PLANES}")], session.shape)[0]
    space = session.swap
    assert space is not None
    before = space.num_pages
    done = run_on(session, tmp_path / "run", run)
    assert done.against(undisturbed).is_identical
    ways = {
        item.split(":")[1]
        for row in csv.DictReader(io.StringIO(done.text("batches.csv")))
        for item in row["preempted"].split()
    }
    assert ways == {"recompute", "swap"}
    assert space.num_pages == before
    check(session, run, done)


def test_host_memory_that_cannot_be_had_is_refused_in_one_sentence(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*shape: object, **options: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    space = SwapSpace(session.pools)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        InputError,
        match=(
            r"cache.preemption: swap: [0-9.]+ GiB of page-locked host memory cannot be had \(CUDA error: "
            r"out of"
        ),
    ):
        space.reserve(40)


def test_diagnose_wants_undisturbed_runs() -> None:
    with pytest.raises(
        InputError,
        match=r"cache.preemption: swap: diagnose compares prompts run once and whole, expected off",
    ):
        diagnose(squeezed("atomic", 1, "swap"), squeezed("split", 1, "swap"), "cpu")
