"""Stretches: a run that takes many batches in one step leaves the bytes of one that takes them one by one."""

import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import simpy
from test_sim_backend import ConstantCost
from toy_backend import World, by_id, model_with, requests_text
from worlds import VARIANTS, RandomWorld, draw_world

from policies.config.runconfig import parse_config
from policies.core.engine.engine import Engine
from policies.core.engine.rhythm import Plan
from policies.core.engine.runlog import RequestRecord, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.engine.stretch import Stretches
from policies.core.errors import WriteError
from policies.core.models.shape import OURO_1_4B
from policies.core.seam.batch import ScheduledRange, Stage, Work
from policies.core.seam.clients import Clients
from policies.core.seam.oracle import Foresight
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.costs.latency import HostLoop, Prediction
from policies.costs.models import load_device
from policies.registry import POLICIES
from sim.backend import SimBackend
from sim.run import Simulation

WORLDS = int(os.environ.get("RANDOM_STRETCHES", "120"))
"""Random worlds of each policy; more on demand."""


class ShapedCost(ConstantCost):
    """Times that depend on stage, rows and positions, all different."""

    def predict(self, work: Work) -> Prediction:
        tiles = sum([item.token_start // 3 for item in work.ranges])
        components = (work.rows, 17 * work.loop_count, 5 * tiles, 3, len(work.exit_depths), len(work.stage))
        return Prediction(components, tiles, 11 + work.rows, 7 * len(work.ranges), 13, 9)


def simulated(
    world: RandomWorld, policy: Policy, loop: HostLoop, seed: int, skips: bool
) -> tuple[object, ...]:
    """All that a run of `world` leaves, and how many commands the engine gave."""
    model = model_with(world.num_loops, world.max_context_tokens)
    scheduler = Scheduler(policy, model, world.scheduler, world.cache, world.exits)
    text, ended = io.StringIO(), list[RequestRecord]()
    clients = Clients(world.requests, world.concurrency, world.patience_ns)
    engine = Engine(scheduler, clients, RunLog(text, ended.append))
    oracle = World(outputs=world.outputs, exit_loops=world.exit_loops)
    foresight = Foresight(oracle, oracle, scheduler.exits)
    cost = ShapedCost(0, 0, 0, loop)
    SimBackend(simpy.Environment(), engine, cost, foresight, seed=seed, skips=skips).run()
    scheduler.check_drained()
    left = (scheduler.surplus_rows, scheduler.tokens_by_loops, scheduler.peak_hidden_rows, scheduler.next_seq)
    return text.getvalue(), requests_text(by_id(ended).values()), engine.log.totals, left


def long_world(chance: Random) -> RandomWorld:
    """A random world; in most, outputs are long and the pool grows with them."""
    world = draw_world(chance)
    world = replace(world, scheduler=replace(world.scheduler, inflight=chance.randint(1, 8)))
    factor = chance.choice([1, 6, 20, 20])
    requests = tuple([replace(item, max_tokens=item.max_tokens * factor) for item in world.requests])
    outputs = {key: max(1, value * factor - chance.randint(0, 3)) for key, value in world.outputs.items()}
    patience_ns = {key: value * chance.choice([1, 30, 600]) for key, value in world.patience_ns.items()}
    assert world.cache.num_blocks is not None
    cache = replace(world.cache, num_blocks=world.cache.num_blocks * chance.choice([1, factor]))
    gap = chance.choice([1, 1, 100, 3000])
    requests = tuple([replace(item, arrival_ns=item.arrival_ns * gap) for item in requests])
    return replace(
        world,
        requests=requests,
        outputs=outputs,
        patience_ns=patience_ns,
        cache=cache,
        max_context_tokens=65536,
    )


def drawn_loop(chance: Random) -> HostLoop:
    times = [chance.choice([0, 0, chance.randint(1, 60)]) for _ in range(5)]
    return HostLoop(*times, host_spread=chance.choice([0.0, 0.3]))


@pytest.mark.parametrize("policy", VARIANTS)
@pytest.mark.parametrize("block", range(WORLDS // 12))
def test_every_file_of_a_random_world_is_the_same_byte_for_byte(policy: str, block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        chance = Random(seed)
        world, loop = long_world(chance), drawn_loop(chance)
        if world.allows(VARIANTS[policy]):
            whole, skipped = (
                simulated(world, VARIANTS[policy], loop, seed, skips) for skips in (False, True)
            )
            assert whole == skipped, f"world {seed}"


@pytest.mark.parametrize("policy", [name for name, kind in POLICIES.items() if kind.repeats])
@pytest.mark.parametrize("max_num_seqs", [1, 6, 24])
@pytest.mark.parametrize("inflight", [1, 4])
def test_a_run_on_a_fitted_device_is_the_same_and_most_of_its_batches_lie_in_stretches(
    policy: str, max_num_seqs: int, inflight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts begin in stretches too, and where nobody waits one may begin as soon as somebody has gone."""
    begun, after_end, form = list[int](), list[bool](), Stretches.form

    def witnessed(self: Stretches, plan: Plan, formed_ns: Sequence[int]) -> None:
        begun.extend(plan.begun_at)
        after_end.append(self._scheduler.residents.may_admit)  # no batch was formed by itself since
        form(self, plan, formed_ns)

    monkeypatch.setattr(Stretches, "form", witnessed)
    raw = {
        "policy": policy,
        "scheduler": {"max_num_seqs": max_num_seqs, "prefill_chunk_size": 64, "inflight": inflight},
        "cache": {"num_blocks": 8000},
        "workload": {
            "kind": "synthetic",
            "num_requests": 24,
            "arrival": {"process": "poisson", "rate": 40},
            "prompt_tokens": [30, 200, 90],
            "output_tokens": [150, 260, 310],
        },
    }
    simulation = Simulation.prepare(parse_config(raw, Path("."), "test"))
    found = []
    for skips in (False, True):
        text, ended = io.StringIO(), list[RequestRecord]()
        engine = simulation.engine(text, ended.append)
        formed = _counting(engine)
        simulation.backend(engine, skips=skips).run()
        found.append((text.getvalue(), requests_text(by_id(ended).values()), engine.log.totals))
    assert found[0] == found[1]
    assert formed[0] < 0.5 * engine.log.totals.num_batches
    assert max_num_seqs != 6 or (begun and any(after_end))


def _counting(engine: Engine) -> list[int]:
    """How many batches are formed one by one, as it goes."""
    formed, form_batch = [0], engine.scheduler.form_batch

    def counted(now_ns: int) -> object:
        formed[0] += 1
        return form_batch(now_ns)

    engine.scheduler.form_batch = counted  # type: ignore[method-assign, assignment]
    return formed


@pytest.mark.parametrize("device", ["h200", "h200-analytic", "a100-seed", "roofline:h100-sxm"])
@pytest.mark.parametrize("stage", [Stage.PRELUDE, Stage.RECURRENT, Stage.CODA])
def test_times_ahead_are_those_of_each_batch_by_itself(device: str, stage: Stage) -> None:
    latency, chance = load_device(device, OURO_1_4B), Random(3)
    loops = 4 if stage is Stage.RECURRENT else 0
    for rows in (1, 7, 40):
        ranges = [ScheduledRange(at, stage, 0, chance.randint(0, 5000), 1) for at in range(rows)]
        work = Work.of(stage, loops, ranges)
        ahead = [
            prediction._replace(limit_ns=limit_ns)
            for prediction, limits_ns in latency.ahead(work, 300)
            for limit_ns in limits_ns
        ]
        assert ahead == [latency.predict(work.moved(tokens)) for tokens in range(300)]


def test_a_policy_that_says_nothing_of_what_it_looks_at_is_asked_every_time() -> None:
    class Quiet(POLICIES["wcpb"]):  # type: ignore[misc, valid-type]
        repeats = False

    scheduler = Scheduler(Quiet(), model_with(), SchedulerSettings(), CacheSettings(num_blocks=400))
    text = io.StringIO()
    engine = Engine(scheduler, Clients([Request(0, 0, 4, 50)]), RunLog(text))
    formed = _counting(engine)
    foresight = Foresight(World(), None, scheduler.exits)
    SimBackend(simpy.Environment(), engine, ShapedCost(0, 0, 0, HostLoop()), foresight).run()
    assert formed[0] >= engine.log.totals.num_batches > 0


def decoding(text: io.StringIO, seed: int = 4) -> tuple[Engine, Callable[[Callable[[], bool]], SimBackend]]:
    """A run most of whose batches lie in stretches, and what simulates it."""
    scheduler = Scheduler(
        POLICIES["wcpb"](), model_with(), SchedulerSettings(), CacheSettings(num_blocks=4000)
    )
    requests = [Request(at, 3000 * at, 4 + 3 * at, 300 + 40 * at) for at in range(5)]
    engine = Engine(scheduler, Clients(requests), RunLog(text))
    cost, foresight = (
        ShapedCost(0, 0, 0, HostLoop(3, 1, 4, 2, 2, 0.2)),
        Foresight(World(), None, scheduler.exits),
    )
    env = simpy.Environment()
    return engine, lambda stopped: SimBackend(env, engine, cost, foresight, stopped, seed=seed)


@pytest.mark.parametrize("steps", [0, 30, 60, 90])
def test_a_run_that_is_stopped_leaves_the_beginning_of_the_log_and_the_tokens_that_it_tells_of(
    steps: int,
) -> None:
    whole, text = io.StringIO(), io.StringIO()
    decoding(whole)[1](lambda: False).run()
    engine, backend = decoding(text)
    checks = iter(range(steps))
    with pytest.raises(KeyboardInterrupt):
        backend(lambda: next(checks, None) is None).run()
    written = text.getvalue()
    assert whole.getvalue().startswith(written) and written.endswith("\n")
    assert engine.log.totals.num_batches == written.count("\n") - 1
    assert steps < 60 or engine.num_repeated > 0
    codas = [line.split(",")[9].split(" ") for line in written.splitlines()[1:] if ",CODA," in line]
    told = Counter([int(item.split(":")[0]) for row in codas for item in row])
    for request_id, record in engine.log.records.items():
        assert len(record.token_ns) == told[request_id]
    engine.scheduler.check_integrity()


def test_a_disk_that_is_full_in_the_middle_of_a_stretch_ends_the_run_with_what_it_says() -> None:
    class Full(io.StringIO):
        """Takes lines until a stretch's come all at once."""

        def write(self, text: str) -> int:
            if text.count("\n") > 20:
                raise WriteError("batches.csv: No space left on device")
            return super().write(text)

    whole, text = io.StringIO(), Full()
    decoding(whole)[1](lambda: False).run()
    engine, backend = decoding(text)
    with pytest.raises(WriteError, match="No space left on device"):
        backend(lambda: False).run()
    assert whole.getvalue().startswith(text.getvalue())
    assert 0 < text.getvalue().count("\n") - 1 < engine.log.totals.num_batches
    engine.scheduler.check_integrity()
