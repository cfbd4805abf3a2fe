"""Guessed tokens: what comes out is what does without, whatever is guessed rightly; every accepted (token,
depth) once;
nothing left at the end.

`RANDOM_GUESSES` says how many random worlds (3,000 take some minutes); a failing one names its seed.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from log_checker import Broken, Rules, check_log
from toy_backend import Run, World, run
from worlds import VARIANTS, RandomWorld, draw_world, plain, with_guesses

from policies.config.overrides import apply_overrides
from policies.config.runconfig import parse_config
from policies.core.engine.scheduler import Scheduler
from policies.core.errors import InputError, InvariantError
from policies.core.models.shape import OURO_TINY
from policies.core.progress.tokens import Head, TokenRows
from policies.core.seam.events import Completion
from policies.core.seam.guesses import DrawnAcceptance, SpeculationSettings
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from sim.replay import replay
from sim.run import simulate

WORLDS = int(os.environ.get("RANDOM_GUESSES", "120"))
GUESSING = [name for name, policy in VARIANTS.items() if policy.guesses != "never"]
RULES = Rules(4, 2, 16, 4, 1, 4, 100, 16, draft_loops=2, max_guesses=3)


def drawn(seed: int) -> tuple[RandomWorld, str] | None:
    chance = Random(seed)
    world = with_guesses(draw_world(chance), chance)
    return None if world is None else (world, chance.choice(GUESSING))


def test_random_worlds_keep_every_invariant_and_deliver_what_they_would_without_guesses() -> None:
    checks = right = 0
    for seed in range(WORLDS):
        found = drawn(seed)
        if found is None:
            continue
        world, name = found
        try:
            result, _ = world.check(VARIANTS[name])
            for request_id, record in result.records.items():
                if record.status.value == "finished":
                    assert record.output_tokens == world.outputs[request_id]
        except BaseException as error:
            error.add_note(f"seed {seed}, {name}, {world.speculation}")
            raise
        totals = result.engine.scheduler.guesses
        checks, right = checks + sum(totals.checks), right + sum(totals.right)
    assert 0 < right < checks


def one_request(acceptance: float, inflight: int = 1, policy: str = "wcpb", outputs: int = 5) -> Run:
    settings = SchedulerSettings(2, 16, 4, inflight=inflight)
    guesses = SpeculationSettings("loops", 2, 3, acceptance)
    return run(plain(policy), [Request(0, 0, 1, outputs)], settings, speculation=guesses)


def decoded(result: Run) -> list[str]:
    """The batches after the prompt's, as loops and ranges."""
    return [
        f"{batch.loop_count} "
        + " ".join(f"{item.stage}:{item.depth}:{item.token_start}" for item in batch.ranges)
        for batch in result.batches[1:]
    ]


def test_right_guesses_halve_the_loops_of_a_token() -> None:
    result = one_request(1.0)
    assert decoded(result) == [
        "0 CODA:0:0", "2 RECURRENT:0:1", "0 DRAFT:1:1", "2 RECURRENT:2:1 RECURRENT:0:2",
        "0 VERIFY:1:1 DRAFT:1:2", "2 RECURRENT:2:2 RECURRENT:0:3", "0 VERIFY:1:2 DRAFT:1:3",
        "2 RECURRENT:2:3 RECURRENT:0:4", "0 VERIFY:1:3", "2 RECURRENT:2:4", "0 CODA:0:4",
    ]  # fmt: skip
    scheduler = result.engine.scheduler
    assert (scheduler.guesses.right[1], scheduler.guesses.checks[1], scheduler.surplus_rows) == (3, 3, 0)
    assert scheduler.guesses.request_loops == 10
    assert check_log(result.batches_csv, result.requests_csv, RULES).surplus_rows == 0


def test_a_wrong_guess_is_dropped_and_its_position_runs_again_with_the_true_token() -> None:
    result = one_request(0.0, outputs=3)
    assert decoded(result) == [
        "0 CODA:0:0", "2 RECURRENT:0:1", "0 DRAFT:1:1", "2 RECURRENT:2:1 RECURRENT:0:2",
        "0 VERIFY:1:1", "2 RECURRENT:0:2", "2 RECURRENT:2:2", "0 CODA:0:2",
    ]  # fmt: skip
    assert result.engine.scheduler.surplus_rows == 1


def test_what_is_in_flight_behind_a_wrong_guess_is_surplus() -> None:
    result = one_request(0.0, inflight=4, outputs=9)
    waits = check_log(result.batches_csv, result.requests_csv, replace(RULES, inflight=4))
    assert waits.surplus_rows == result.engine.scheduler.surplus_rows > 20
    assert [record.output_tokens for record in result.records.values()] == [9]


@pytest.mark.parametrize("policy", ["atomic", "split"])
def test_drafts_are_checked_in_one_submission_of_the_loops_that_remain(policy: str) -> None:
    assert decoded(one_request(1.0, policy=policy, outputs=6))[1:8] == [
        "2 RECURRENT:0:1", "0 DRAFT:1:1", "2 RECURRENT:0:2", "0 DRAFT:2:2", "2 RECURRENT:0:3", "0 DRAFT:3:3",
        "2 RECURRENT:0:4",
    ]  # fmt: skip
    assert decoded(one_request(1.0, policy=policy, outputs=6))[8:10] == [
        "2 RECURRENT:2:1 RECURRENT:2:2 RECURRENT:2:3 RECURRENT:2:4",
        "0 VERIFY:1:1 VERIFY:2:2 VERIFY:3:3 CODA:0:4",
    ]


def test_rows_of_tokens_move_as_the_docstring_says() -> None:
    rows = TokenRows(10, 2, 20, 4, 2, 3)
    assert rows.head(10, 0) == Head(True, 1)
    rows.guess(1)
    rows.loop(10, 2)
    rows.loop(11, 2)
    assert (rows.depths, rows.head(10, 0), rows.head(11, 1)) == ([4, 2], Head(False, 1), Head(True, 1))
    rows.sample()
    rows.guess(1)
    assert (rows.position, rows.depths) == (11, [2, 0])
    rows.settle()
    assert (rows.first, rows.depths, rows.behind) == (11, [2, 0], 13)
    rows.loop(11, 2)
    rows.sample()
    rows.refuse()
    assert (rows.position, rows.depths) == (12, [0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0:RECURRENT:0:2:1", "0:RECURRENT:0:3:1"),
        ("0:DRAFT:1:1:1", "0:DRAFT:2:1:1"),
        ("0:DRAFT:1:1:1", "0:VERIFY:1:1:1"),
        ("0:VERIFY:1:1:1", "0:CODA:0:1:1"),
        ("0:RECURRENT:2:1:1", "0:RECURRENT:3:1:1"),
        (",0:1,", ",,"),
        (",0:1,", ",0:2,"),
    ],
)
def test_the_checker_sees_a_falsified_guess(old: str, new: str) -> None:
    result = one_request(0.0, outputs=3)
    assert old in result.batches_csv
    with pytest.raises(Broken, match="invariant 2"):
        check_log(result.batches_csv.replace(old, new, 1), result.requests_csv, RULES)


def test_a_backend_may_refuse_only_a_guess_that_was_checked() -> None:
    guesses = SpeculationSettings("loops", 2, 3)
    scheduler = Scheduler(
        plain("wcpb"), OURO_TINY, SchedulerSettings(), CacheSettings(num_blocks=400), speculation=guesses
    )
    scheduler.enqueue(Request(0, 0, 1, 9))
    with pytest.raises(InvariantError, match=r"batch 1 refuses a guess at .*, there is none"):
        for seq in range(2):
            scheduler.form_batch(0)
            scheduler.collect(Completion(seq, 0, 0, 0, refused=frozenset({(0, 0)})))


def test_draws_depend_on_the_token_alone_and_follow_the_place_in_the_guess() -> None:
    oracle = DrawnAcceptance(3, (0.9, 0.5))
    shares = [
        sum(oracle.is_right(request_id, at, rank) for request_id in range(50) for at in range(100)) / 5000
        for rank in (1, 2, 9)
    ]
    assert shares[0] == pytest.approx(0.9, abs=0.02)
    assert shares[1] == shares[2] == pytest.approx(0.5, abs=0.03)


CONFIG: dict[str, Any] = {
    "model": "ouro-1.4b", "device": "h200", "policy": "wcpb",
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk_size": 16, "inflight": 4},
    "speculation": {"mode": "loops", "acceptance": 0.8},
    "workload": {"kind": "synthetic", "num_requests": 6, "prompt_tokens": [37, 5], "output_tokens": [9, 14],
                 "arrival": {"process": "poisson", "rate": 60}},
}  # fmt: skip


def simulated(folder: Path, *overrides: str) -> tuple[Path, dict[str, Any]]:
    return simulate(parse_config(apply_overrides(CONFIG, overrides), folder, "test.yaml"), folder / "run")


@pytest.mark.parametrize("policy", [name for name, kind in POLICIES.items() if kind.guesses != "never"])
def test_a_simulation_is_replayed_from_its_log(tmp_path: Path, policy: str) -> None:
    options = {"ttft_ms": 300, "itl_ms": 15} if policy == "slo" else {}
    path, _ = simulated(tmp_path, f"policy={json.dumps({'name': policy, **options})}")
    found = replay(path)
    assert found.difference is None, str(found)


def test_a_trace_says_of_every_token_whether_it_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival,prompt_tokens,output_tokens,guessed\n0,5,9,0 1\n1,5,9,\n")
    trace = "workload={kind: trace, path: t.csv}"
    path, _ = simulated(tmp_path, trace, "speculation.acceptance=trace", "scheduler.inflight=1")
    outcomes = [
        line.split(",")[-5].split(":") for line in (path / "batches.csv").read_text().splitlines()[1:]
    ]
    refused = [(int(item[0]), int(item[1])) for item in outcomes if len(item) == 2]
    assert [at for request_id, at in refused if request_id == 0] == [5]
    assert [at for request_id, at in refused if request_id == 1][:2] == [5, 6]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["policy=mixed"], "policy mixed cannot run with speculation: .*use wcpb, slo, atomic or split"),
        (
            ["policy=atomic", "cache.layout=shared", "scheduler.prefill_chunk_size=1"],
            "cannot run with cache.layout shared: .*use last_exited",
        ),
        (["exit={mode: gate, threshold: 0.5}"], "cannot run with exit.mode gate: .*use exit.mode fixed"),
        (["speculation.draft_loops=4"], "draft_loops: 4, expected fewer than the 4 loops"),
        (["speculation.acceptance=[]"], "acceptance: an empty list"),
        (["speculation.acceptance=null"], "acceptance: missing, expected a probability"),
        (["speculation.acceptance=trace"], "acceptance: trace needs .*a column `guessed`"),
        (["speculation.mode=off"], "mode: off guesses nothing, expected no other key"),
        (["speculation.max_tokens=17"], "speculation.max_tokens: 17"),
        (["speculation.acceptance=1.5"], "speculation.acceptance: 1.5, expected at most 1$"),
        (["speculation.acceptance=[1, 2]"], "speculation.acceptance.1: 2, expected at most 1$"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(
    tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        simulated(tmp_path, *overrides)
    assert len(str(caught.value)) < 400


def test_without_guesses_nothing_says_so(tmp_path: Path) -> None:
    path, _ = simulated(tmp_path, "speculation={mode: off}")
    assert "speculation" not in (path / "config.yaml").read_text()
    assert "VERIFY" not in (path / "batches.csv").read_text()


def test_the_world_of_a_test_may_be_longer_than_its_requests_are() -> None:
    """A request that stops before max_tokens ends at its last token, whatever was guessed behind it."""
    guesses = SpeculationSettings("loops", 1, 4, 1.0)
    settings = SchedulerSettings(2, 16, 4, inflight=8)
    result = run(
        plain("wcpb"), [Request(0, 0, 3, 40)], settings, world=World(outputs={0: 7}), speculation=guesses
    )
    assert [record.output_tokens for record in result.records.values()] == [7]
    rules = replace(RULES, inflight=8, draft_loops=1, max_guesses=4, outputs={0: 7})
    check_log(result.batches_csv, result.requests_csv, rules)
