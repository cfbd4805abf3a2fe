"""Random small worlds for property tests: requests, clients, limits, a pool and a device, all drawn from one
seed. Cheap to make.

A world is everything but the policy. `RandomWorld.run` drives the scheduler through it, `RandomWorld.check`
has an outside checker go through the log. A feature that joins the scheduler joins `draw_world`, and every
property is tested with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random

from log_checker import Replay, Rules, check_log
from toy_backend import Run, World, model_with, run

from policies.core.seam.batch import ExecutionBatch
from policies.core.seam.exits import ExitSettings
from policies.core.seam.guesses import NO_GUESSES, SpeculationSettings
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.registry import POLICIES
from policies.sjf import ShortestFirst
from policies.slo import Slo

SJF_NS_PER_TOKEN = 8
"""A prompt of 48 tokens then ranks behind what comes 384 ns later: requests of these worlds come so far
apart."""


def variants() -> dict[str, Policy]:
    """Every policy of the registry by its name, once for every setting of its switches."""
    found = {}
    for name, kind in POLICIES.items():
        if kind in (Slo, ShortestFirst):
            continue
        switches = [item.name for item in fields(kind) if isinstance(item.default, bool)]
        for values in product((True, False), repeat=len(switches)):
            policy = kind(**dict(zip(switches, values, strict=True)))
            changed = [
                f"{key}={value}" for key, value in vars(policy).items() if value != getattr(kind(), key)
            ]
            found["-".join([name, *changed])] = policy
    found["sjf"] = ShortestFirst(ms_per_token=SJF_NS_PER_TOKEN / 1e6)
    for gaps in ("strict", "banked"):
        found[f"slo-{gaps}"] = Slo(ttft_ms=5.0, itl_ms=1.0, gaps=gaps, model="roofline:h200")
    return found


def spelled(name: str, model: str = "h200") -> str | dict[str, object]:
    """The policy called `name` as a config says it; slo believes `model`."""
    return {"name": name, "ttft_ms": 300, "itl_ms": 15, "model": model} if name == "slo" else name


def on_cpu(name: str) -> str:
    """The policy called `name` as an override, for the executor on a CPU."""
    return f"policy={json.dumps(spelled(name, 'roofline:cpu'))}"


def plain(name: str) -> Policy:
    """The policy called `name` with no more options than it needs."""
    return VARIANTS["slo-strict"] if name == "slo" else POLICIES[name]()


VARIANTS = variants()


@dataclass(frozen=True)
class RandomWorld:
    """One random world. `outputs` is its oracle, `patience_ns` says who hangs up and when."""

    requests: tuple[Request, ...]
    outputs: Mapping[int, int]
    patience_ns: Mapping[int, int]
    scheduler: SchedulerSettings
    cache: CacheSettings
    num_loops: int
    concurrency: int | None
    durations_ns: tuple[int, ...]
    host_ns: int
    collect_delay_ns: int
    max_context_tokens: int
    exits: ExitSettings
    exit_seed: int
    speculation: SpeculationSettings = NO_GUESSES

    def run(self, policy: Policy) -> Run:
        return run(
            policy,
            self.requests,
            self.scheduler,
            cache=self.cache,
            concurrency=self.concurrency,
            model=model_with(self.num_loops, self.max_context_tokens),
            world=World(self.duration_ns, self.outputs, self.host_ns, self.collect_delay_ns, self.exit_loops),
            patience_ns=self.patience_ns,
            exits=self.exits,
            speculation=self.speculation,
        )

    def exit_loops(self, request_id: int, position: int) -> int:
        return 1 + (self.exit_seed + 7 * request_id + 3 * position) * 40503 % 65536 * self.num_loops // 65536

    def loops_of(self, request_id: int, position: int) -> int:
        """Loops that the decoded token at `position` counts for, whatever surplus work is done on it."""
        if self.exits.mode == "fixed":
            return self.num_loops
        most = self.exits.max_loops or self.num_loops
        return min(max(self.exit_loops(request_id, position), self.exits.min_loops), most)

    def allows(self, policy: Policy) -> bool:
        """Shared K/V go with atomic prefill only."""
        if policy.guesses == "never" and self.speculation != NO_GUESSES:
            return False
        return self.cache.layout == "last_exited" or not policy.splits_prefill

    def duration_ns(self, batch: ExecutionBatch) -> int:
        return self.durations_ns[batch.seq % len(self.durations_ns)]

    def rules(self, policy: Policy) -> Rules:
        assert self.cache.num_blocks is not None
        return Rules(
            num_loops=self.num_loops,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_num_batched_tokens=self.scheduler.max_num_batched_tokens,
            chunk_tokens=self.scheduler.prefill_chunk_size or self.scheduler.max_num_batched_tokens,
            inflight=self.scheduler.inflight,
            resident_chunks=policy.resident_chunks(self.num_loops),
            num_groups=self.cache.num_blocks // self.cache.planes(self.num_loops),
            block_size=self.cache.block_size,
            max_context_tokens=self.max_context_tokens,
            by_priority=self.scheduler.admission == "priority",
            rank_ns_per_token=SJF_NS_PER_TOKEN if policy.name == "sjf" else 0,
            scan_limit=self.scheduler.admission_scan_limit,
            max_bypasses=self.scheduler.max_admission_bypasses,
            concurrency=self.concurrency,
            outputs=self.outputs,
            min_loops=None if self.exits.mode == "fixed" else self.exits.min_loops,
            max_loops=self.exits.max_loops,
            grows=self.cache.allocation == "incremental",
            whole_context=self.cache.admit == "whole_context",
            preemption=self.cache.preemption,
            watermark_groups=int(
                self.cache.watermark * (self.cache.num_blocks // self.cache.planes(self.num_loops))
            ),
            shares_prefixes=self.cache.prefix_caching,
            draft_loops=self.speculation.draft_loops if self.speculation != NO_GUESSES else 0,
            max_guesses=self.speculation.max_tokens,
            swap_groups=None
            if self.cache.swap_blocks is None
            else self.cache.swap_blocks // self.cache.planes(self.num_loops),
        )

    def check(self, policy: Policy) -> tuple[Run, Replay]:
        """Run, and raise unless all invariants hold in the log and nothing is left allocated."""
        result = self.run(policy)
        result.engine.scheduler.check_drained()
        replay = check_log(result.batches_csv, result.requests_csv, self.rules(policy))
        assert replay.surplus_rows == result.engine.scheduler.surplus_rows
        return result, replay


def draw_world(chance: Random) -> RandomWorld:
    """Up to nine requests, a third of which are hung up on."""
    num_loops = chance.choice([4, 4, 4, 1, 2, 3, 5])
    requests, outputs, patience_ns, now_ns = [], {}, {}, 0
    span = chance.randint(1, 12)
    ids = list(range(chance.randint(1, 9)))
    chance.shuffle(ids)
    for request_id in ids:
        now_ns += chance.choice([0, 0, 1, 7, 40, 300])
        max_tokens = chance.randint(1, chance.choice([6, 16]))
        prompt_tokens = chance.randint(1, chance.choice([12, 48]))
        content_ids = tuple(chance.randint(0, 1) for _ in range(chance.choice([0, 2, 5])))
        content_tokens = chance.choice([span, span, 9])
        requests.append(
            Request(
                request_id,
                now_ns,
                prompt_tokens,
                max_tokens,
                chance.randint(0, 2),
                content_ids,
                content_tokens,
            )
        )
        outputs[request_id] = chance.randint(1, max_tokens)
        if chance.random() < 0.35:
            patience_ns[request_id] = chance.choice([0, chance.randint(0, 60), chance.randint(0, 600)])
    requests.sort(key=lambda request: (request.arrival_ns, request.request_id))
    is_shared = chance.random() < 0.1
    cache = draw_cache(chance, num_loops, requests)
    if is_shared:
        assert cache.num_blocks is not None
        cache = replace(
            cache, layout="shared", prefix_caching=False, num_blocks=cache.num_blocks // num_loops
        )
    min_loops, max_loops = sorted((chance.randint(1, num_loops), chance.randint(1, num_loops)))
    scheduler = draw_scheduler(chance)
    if is_shared:
        scheduler = replace(scheduler, prefill_chunk_size=1)
    may_exit = chance.random() < 0.4 and not cache.may_recompute
    return RandomWorld(
        requests=tuple(requests),
        outputs=outputs,
        patience_ns=patience_ns,
        scheduler=scheduler,
        cache=cache,
        num_loops=num_loops,
        concurrency=chance.choice([None, None, 1, 2, 4]),
        durations_ns=tuple(chance.randint(0, 30) for _ in range(chance.randint(1, 7))),
        host_ns=chance.choice([0, 0, 5, 50]),
        collect_delay_ns=chance.choice([0, 0, 3]),
        max_context_tokens=chance.choice([65536, 65536, 40]),
        exits=ExitSettings("trace", min_loops, max_loops) if may_exit else ExitSettings(),
        exit_seed=chance.randint(0, 9),
    )


def with_guesses(world: RandomWorld, chance: Random) -> RandomWorld | None:
    """`world` with tokens guessed, right never to always, and up to eight batches in flight; None where they
    cannot be."""
    if world.num_loops < 2 or world.cache.layout == "shared":
        return None
    acceptance = chance.choice([0.0, 0.3, 0.9, 1.0, (0.9, 0.5, 0.2)])
    draft_loops, max_tokens = chance.randint(1, world.num_loops - 1), chance.randint(1, 4)
    return replace(
        world,
        exits=ExitSettings(),
        scheduler=replace(world.scheduler, inflight=chance.choice([1, 2, 4, 8])),
        speculation=SpeculationSettings("loops", draft_loops, max_tokens, acceptance),
    )


def draw_scheduler(chance: Random) -> SchedulerSettings:
    """Limits from the smallest that work to some that never bind; chunks up to the budget, and None."""
    budget = chance.randint(1, chance.choice([12, 64]))
    return SchedulerSettings(
        max_num_seqs=chance.randint(1, 5),
        max_num_batched_tokens=budget,
        prefill_chunk_size=chance.choice(
            [None, chance.randint(1, min(budget, 6)), chance.randint(1, budget)]
        ),
        decode=chance.choice(["refill", "no_refill"]),
        inflight=chance.choice([1, 2, 4]),
        admission=chance.choice(["fcfs", "priority"]),
        admission_scan_limit=chance.randint(1, 4),
        max_admission_bypasses=chance.randint(0, 3),
        max_prefill_batches_before_decode=chance.randint(1, 3),
        min_coda_batch_size=chance.randint(1, 3),
    )


def draw_cache(chance: Random, num_loops: int, requests: Sequence[Request]) -> CacheSettings:
    """A pool of any size, or, more often, one that holds each request and few of them at once."""
    block_size = chance.randint(1, 8)
    groups = chance.choice([chance.randint(1, 12), chance.randint(8, 80)])
    if chance.random() < 0.7:
        groups = max(-(-request.num_kv_positions // block_size) for request in requests)
        groups += chance.randint(0, groups)
    allocation, preemption = chance.choice(
        [("full", "off"), ("full", "recompute"), ("full", "swap")]
        + 3 * [("incremental", "recompute"), ("incremental", "swap")]
    )
    return CacheSettings(
        prefix_caching=chance.random() < 0.5,
        block_size=block_size,
        num_blocks=groups * num_loops + chance.randint(0, num_loops - 1),
        allocation=allocation,
        preemption=preemption,
        watermark=chance.choice([0.0, 0.1, 0.5]),
        swap_blocks=chance.choice([None, None, 0, chance.randint(0, 20)]),
        admit=chance.choice(["whole_context", "whole_context", "first_chunk"]),
    )
