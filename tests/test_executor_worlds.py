"""Random small runs of the executor on a CPU: requests, limits, pools, prefixes, exits, hang-ups, all drawn
from one seed. None is lost, and no bit differs from each request run alone.

`RANDOM_RUNS` says how many (300 take some minutes); a failing one names its seed.
"""

import os
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import CountingTimeline, config_of, rules_of, run_on, session_of  # noqa: E402
from log_checker import check_log  # noqa: E402
from worlds import VARIANTS  # noqa: E402

from policies.core.models.shape import OURO_TINY  # noqa: E402
from sim.replay import replay  # noqa: E402

RUNS = int(os.environ.get("RANDOM_RUNS", "20"))
PARTS = 4
PLANES = OURO_TINY.num_loops


def draw_run(chance: Random, folder: Path) -> dict[str, Any]:
    """A config of a run in a pool that holds its largest request and at most as much again."""
    name = chance.choice(list(VARIANTS))
    is_shared = VARIANTS[name].splits_prefill is False and chance.random() < 0.3
    budget = chance.choice([8, 16, 40, 96])
    chunk = 1 if is_shared else chance.choice([None, chance.randint(1, 8), chance.randint(1, budget)])
    prompts = [chance.randint(1, chance.choice([12, 60])) for _ in range(chance.randint(2, 6))]
    outputs = [chance.randint(1, chance.choice([4, 16])) for _ in prompts]
    allocation, preemption = chance.choice(
        [("full", "off"), ("full", "swap"), *2 * [("incremental", "recompute"), ("incremental", "swap")]]
    )
    block_size = chance.choice([1, 4, 8, 16])
    groups = max(-(-(p + o) // block_size) for p, o in zip(prompts, outputs, strict=True))
    cache: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": (groups + chance.randint(0, groups)) * (1 if is_shared else PLANES),
        "layout": "shared" if is_shared else "last_exited",
        "prefix_caching": not is_shared and chance.random() < 0.4,
        "allocation": allocation,
        "preemption": preemption,
        "admit": chance.choice(["whole_context", "first_chunk"]),
        "watermark": chance.choice([0.0, 0.1]),
        "swap_blocks": chance.choice([None, None, 8]),
    }
    may_exit = preemption == "off" or (preemption == "swap" and cache["swap_blocks"] is None)
    exits = chance.choice(["trace", "gate", "fixed"]) if may_exit else "fixed"
    workload: dict[str, Any] = {
        "kind": "synthetic", "num_requests": len(prompts), "prompt_tokens": prompts, "output_tokens": outputs,
        "arrival": chance.choice([{"process": "burst"}, {"process": "poisson", "rate": 1000}]),
    }  # fmt: skip
    if exits == "trace":
        workload["exit_loops"] = [chance.randint(1, PLANES) for _ in range(5)]
    if cache["prefix_caching"]:
        workload["shared_prefix"] = {"groups": 2, "tokens": chance.choice([8, 24])}
    elif exits != "trace" and chance.random() < 0.4:
        rows = [
            f"{at * 0.0005:.4f},{prompt},{output},{chance.randint(0, 2)}"
            for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        trace = folder / "trace.csv"
        trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,priority", *rows, ""]))
        workload = {"kind": "trace", "path": str(trace)}
    if chance.random() < 0.3:
        workload["patience_ms"] = [chance.choice([1000, chance.randint(1, 30)]) for _ in prompts]
    low, high = sorted((chance.randint(1, PLANES), chance.randint(1, PLANES)))
    exit_rule: dict[str, Any] = {"mode": exits}
    if exits != "fixed":
        exit_rule |= {"min_loops": low, "max_loops": high, **({"threshold": 0.9} if exits == "gate" else {})}
    return {
        "model": "ouro-tiny",
        "policy": {"name": VARIANTS[name].name, **asdict(VARIANTS[name])},  # type: ignore[call-overload]
        "scheduler": {
            "max_num_seqs": chance.randint(1, 5),
            "max_num_batched_tokens": budget,
            "prefill_chunk_size": chunk,
            "decode": chance.choice(["refill", "no_refill"]),
            "inflight": chance.choice([1, 2, 4]),
            "admission": chance.choice(["fcfs", "priority"]),
            "max_prefill_batches_before_decode": chance.randint(1, 3),
            "min_coda_batch_size": chance.randint(1, 3),
        },
        "cache": cache,
        "exit": exit_rule,
        "workload": workload,
        "seed": chance.randint(0, 9),
    }  # fmt: skip


def alone(config: dict[str, Any]) -> dict[str, Any]:
    """The same requests one at a time, with room for everything, and nobody hangs up."""
    shared = config["cache"]["layout"] == "shared"
    return config | {
        "policy": "atomic",
        "scheduler": {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 96,
            "prefill_chunk_size": 1 if shared else None,
            "inflight": 1,
        },
        "cache": {key: config["cache"][key] for key in ("block_size", "num_blocks", "layout")},
        "workload": {key: value for key, value in config["workload"].items() if key != "patience_ms"},
    }


def check_run(seed: int, folder: Path) -> None:
    """Run the world of `seed`, under the address audit, and alone."""
    config = draw_run(Random(seed), folder)
    session = session_of(config_of(base=alone(config)), config_of(base=config))
    expected = run_on(session, folder / "alone")
    run = session.runs[1]
    done = run_on(session, folder / "run", run)
    has_hang_ups, exits = "patience_ms" in config["workload"], run.config.exit
    assert done.summary["num_refused"] == 0
    assert done.summary["num_finished"] + done.summary["num_cancelled"] == len(expected.tokens)
    if has_hang_ups:
        assert all(expected.tokens[key][: len(tokens)] == tokens for key, tokens in done.tokens.items())
        for key, tokens in done.tokens.items():
            if tokens == expected.tokens[key]:
                assert done.fingerprints[key] == expected.fingerprints[key]
    else:
        assert done.against(expected).is_identical
    changes: dict[str, Any] = {"outputs": None} if has_hang_ups else {}
    if exits.mode != "fixed":
        changes |= {"min_loops": exits.min_loops, "max_loops": exits.max_loops}
    check_log(done.text("batches.csv"), done.text("requests.csv"), rules_of(session, run, **changes))
    outcome = replay(done.path)
    assert outcome.difference is None, str(outcome)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_runs_lose_nothing_and_no_bit_differs_from_running_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr("executor.run.make_timeline", lambda device: CountingTimeline())
    for seed in range(part, RUNS, PARTS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            check_run(seed, folder)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
