"""The slo policy keeps what it promised wherever it could: random worlds on its own model, without host
spread."""

import io
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import draw_world

from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from policies.core.models.shape import SHIPPED_MODELS
from policies.core.seam.batch import ScheduledRange, Stage, Work
from policies.core.seam.view import View
from policies.costs.models import load_device
from policies.slo import MOST_BATCHES, Slo
from sim.replay import replay
from sim.run import Simulation, simulate

OURO_1_4B, OURO_TINY = SHIPPED_MODELS["ouro-1.4b"], SHIPPED_MODELS["ouro-tiny"]
SLO: dict[str, Any] = {"name": "slo", "ttft_ms": 300, "itl_ms": 20}


def config_of(policy: Any, chance: random.Random) -> dict[str, Any]:
    """A crowd of requests that the model can serve, or can not, in chunks of any size."""
    chunk = chance.choice([64, 128, 512])
    return {
        "policy": policy,
        "scheduler": {
            "max_num_seqs": chance.choice([4, 16, 32]), "prefill_chunk_size": chunk,
            "max_num_batched_tokens": chance.choice([512, 1024]), "inflight": chance.choice([1, 2, 4]),
        },
        "workload": {
            "kind": "synthetic", "num_requests": 30,
            "arrival": {"process": "poisson", "rate": chance.choice([5, 20, 60])},
            "prompt_tokens": [chance.randint(1, 3000) for _ in range(7)],
            "output_tokens": [chance.randint(1, 60) for _ in range(5)],
        },
        "seed": chance.randrange(1000),
    }  # fmt: skip


class Watched:
    """A run on the policy's own model, whose host takes what it takes, and every choice that was made.

    What letting a request in, or waking, takes the host is left out: who comes is no choice of the policy,
    and it cannot know before."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        simulation = Simulation.prepare(parse_config(raw, Path(), "test.yaml"))
        loop = simulation.latency.loop
        simulation.latency.loop = replace(loop, host_spread=0.0, admit_ns=0, wake_ns=0)
        ended: list[Any] = []
        engine = simulation.engine(io.StringIO(), ended.append)
        chooser = engine.scheduler._select.__self__  # type: ignore[attr-defined]
        self.choices: list[tuple[int, int, bool, bool]] = []
        chooser.on_choice = self.note
        simulation.backend(engine).run()
        engine.scheduler.check_drained()
        self.records = ended

    def note(self, view: View, rows: int, keeps_all: bool, is_forced: bool) -> None:
        self.choices.append((view.now_ns, rows, keeps_all, is_forced))


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_PROMISES", 24))))
def test_no_gap_is_late_by_a_choice_of_the_policy(seed: int) -> None:
    chance = random.Random(seed)
    itl_ms = chance.choice([12, 15, 20, 40])
    policy = {**SLO, "itl_ms": itl_ms, "margin": 0.02}
    run = Watched(config_of(policy, chance))
    doomed = [at for at, _, keeps_all, is_forced in run.choices if not keeps_all or is_forced]
    for record in run.records:
        for before, after in zip(record.token_ns, record.token_ns[1:], strict=False):
            if after - before > 1e6 * itl_ms:
                # With nothing injected some token would have been late as well, or a prompt starved.
                assert any(before - 1e6 * itl_ms <= at <= after for at in doomed), (record.request, before)


def test_a_wavefront_that_is_sized_keeps_what_a_fixed_one_breaks(tmp_path: Path) -> None:
    crowd = {
        "slo": {"ttft_ms": 500, "itl_ms": 15},
        "scheduler": {"max_num_seqs": 32, "prefill_chunk_size": 128},
        "workload": {
            "kind": "synthetic", "num_requests": 120, "arrival": {"process": "closed", "concurrency": 16},
            "prompt_tokens": 512, "output_tokens": 64,
        },
    }  # fmt: skip
    fixed, sized = (
        simulate(parse_config({**crowd, "policy": policy}, tmp_path, "x"), tmp_path / name, plots=False)[1]
        for name, policy in (("a", "wcpb"), ("b", {"name": "slo", "ttft_ms": 500, "itl_ms": 15}))
    )
    assert fixed["slo"]["share_met"] < 0.3 and sized["slo"]["share_met"] > 0.95
    assert sized["output_token_throughput"] > 0.95 * fixed["output_token_throughput"]
    assert any("policy slo believes h200" in note and "margin" in note for note in sized["notes"])


@pytest.mark.parametrize("gaps", ["strict", "banked"])
def test_a_recorded_run_is_decided_again_exactly(tmp_path: Path, gaps: str) -> None:
    raw = config_of({**SLO, "gaps": gaps}, random.Random(5))
    simulate(parse_config(raw, tmp_path, "test.yaml"), tmp_path / "run", plots=False)
    outcome = replay(tmp_path / "run")
    assert outcome.difference is None and outcome.num_batches > 100


@pytest.mark.parametrize("seed", range(4))
def test_nobody_starves_under_a_promise_that_cannot_be_kept(seed: int) -> None:
    chance = random.Random(seed)
    raw = config_of({**SLO, "itl_ms": 5.9, "gaps": ("strict", "banked")[seed % 2]}, chance)
    raw["scheduler"] |= {"max_num_seqs": 6, "inflight": (1, 2, 4)[seed % 3]}
    raw["workload"] |= {"num_requests": 10, "output_tokens": 300, "prompt_tokens": 100 + 5 * seed}
    run = Watched(raw)
    assert len(run.records) == 10 and any(is_forced for *_, is_forced in run.choices)
    waits = 0
    for _, rows, *_ in run.choices:
        waits = 0 if rows else waits + 1
        assert waits <= MOST_BATCHES + 3 * raw["scheduler"]["max_num_seqs"]


def test_objectives_that_no_request_could_keep_are_said_and_hold_nobody_up(tmp_path: Path) -> None:
    raw = {**config_of({**SLO, "itl_ms": 1}, random.Random(1)), "slo": {"ttft_ms": 1, "itl_ms": 1}}
    _, summary = simulate(parse_config(raw, tmp_path, "test.yaml"), tmp_path / "run", plots=False)
    for sentence in (
        "policy.itl_ms: 1: no request could keep it even alone: ",
        "slo.itl_ms: 1: no request could",
    ):
        assert any(note.startswith(sentence) and "ms per token" in note for note in summary["notes"])
    raw["policy"] = "wcpb"
    _, wcpb = simulate(parse_config(raw, tmp_path, "test.yaml"), tmp_path / "wcpb", plots=False)
    assert summary["duration_s"] < 1.2 * wcpb["duration_s"]


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_PROMISES", 60))))
def test_a_promise_that_cannot_be_kept_breaks_no_rule(seed: int) -> None:
    world = draw_world(random.Random(seed))
    hopeless = Slo(ttft_ms=0.0005, itl_ms=0.0002, gaps=("strict", "banked")[seed % 2], model="roofline:h200")
    if world.allows(hopeless):
        world.check(hopeless)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "policy.ttft_ms and policy.itl_ms missing"),
        ({"ttft_ms": 5}, "policy.itl_ms missing"),
        ({"itl_ms": 0, "ttft_ms": 5}, "policy.itl_ms: 0, expected above 0"),
        ({"itl_ms": 5, "ttft_ms": 5, "model": "h300"}, "unknown device 'h300'"),
        ({"itl_ms": 5, "ttft_ms": 5, "gaps": "loose"}, "policy.gaps"),
        ({"itl_ms": 5, "ttft_ms": 5, "itl": 5}, "unknown key 'policy.itl'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], sentence: str) -> None:
    raw = {"policy": {"name": "slo", **options}, "workload": {"kind": "preset", "name": "chat"}}
    with pytest.raises(InputError, match=sentence):
        Simulation.prepare(parse_config(raw, Path(), "test.yaml"))


def test_a_roofline_is_called_one_and_another_card_is_refused() -> None:
    roofline = Slo(ttft_ms=500, itl_ms=20, model="roofline:h200")
    assert "a roofline, which no kernel reaches" in roofline.notes(OURO_TINY)[0]
    roofline.check_card(OURO_TINY, "cpu")
    fitted = Slo(ttft_ms=500, itl_ms=20)
    fitted.check_card(OURO_1_4B, "NVIDIA H200")
    for shape, card in ((OURO_1_4B, "NVIDIA H100 80GB HBM3"), (OURO_TINY, "NVIDIA H200")):
        with pytest.raises(InputError, match=rf"not fitted on this card, {card}: .*executor profile"):
            fitted.check_card(shape, card)


@pytest.mark.parametrize("device", ["h200", "h200-2026-11-30", "h200-analytic"])
def test_a_batch_beside_common_ranges_takes_what_the_whole_batch_takes(device: str) -> None:
    latency, chance = load_device(device, OURO_1_4B), random.Random(5)
    for _ in range(100):
        counts = [chance.choice([1, 1, 1, 16, chance.randint(2, 300)]) for _ in range(chance.randint(1, 24))]
        ranges = [
            ScheduledRange(at, Stage.RECURRENT, 0, chance.randint(0, 3000), count)
            for at, count in enumerate(counts)
        ]
        cut = chance.randint(0, len(ranges))
        whole = latency.predict(Work.of(Stage.RECURRENT, 1, ranges))
        found = latency.beside(ranges[:cut])(ranges[cut:])
        assert found._replace(limit_ns=0) == whole._replace(limit_ns=0)
