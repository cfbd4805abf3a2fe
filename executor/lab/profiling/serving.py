"""Batches as policies really form them: the shared engine over serving workloads, on a device that takes no
time.

The same mixes, a few of them and shorter, are run for real in `executor.lab.profiling.engine_runs`.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from executor.lab.profiling.cases import Case, Scale
from executor.session import PlannedRun
from policies.assembly import assemble
from policies.config.runconfig import RunConfig, parse_config
from policies.core.engine.engine import advance
from policies.core.models.shape import ModelShape
from policies.core.seam.batch import PROMPT_STAGES, ExecutionBatch, Stage, Work
from policies.core.seam.events import Completion, Event, Submit, Tick
from policies.core.seam.oracle import Foresight

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("atomic", {"name": "atomic"}),
    ("split", {"name": "split"}),
    ("mixed", {"name": "mixed"}),
    ("wcpb", {"name": "wcpb"}),
    ("wcpb staging apart", {"name": "wcpb", "fuse_prelude": False}),
)
WORKLOADS = ("serving", "long", "chat", "crowd")
INFLIGHT = 4
"""Batches in flight, as the serving configs have it: the device then hardly ever waits for the host."""
NATIVE_CONTEXT = 16384
"""Lengths below are for this context; a smaller `Scale` shrinks them in proportion."""
SHARES = {
    (Stage.RECURRENT, False): 0.2,
    (Stage.RECURRENT, True): 0.3,
    (Stage.PREFILL, True): 0.2,
    (Stage.PREFILLING_RECURRENT, True): 0.18,
    (Stage.CODA, False): 0.05,
    (Stage.PRELUDE, False): 0.04,
    (Stage.PREFILLING_PRELUDE, True): 0.03,
}
"""Of the sampled batches, by stage and whether they hold prompt rows."""


def mix(
    model: str,
    seed: int,
    scale: Scale,
    policy: str,
    workload: str,
    chunk: int,
    num_requests: int,
    inflight: int = INFLIGHT,
) -> RunConfig:
    """A run of `num_requests` requests of `workload`: the seed's serving profile, its long prompts, chat-like
    lengths, short prompts of as many requests at a time as there may be, or requests so far apart that the
    host sleeps between them."""

    def tokens(count: int) -> int:
        return max(1, count * scale.max_context // NATIVE_CONTEXT)

    few, many = min(8, scale.max_requests), min(32, scale.max_requests)
    lengths: dict[str, Any] = {
        "serving": {
            "arrival": {"process": "closed", "concurrency": few},
            "prompt_tokens": [tokens(256), tokens(512), tokens(768)],
            "output_tokens": 24,
        },
        "long": {"arrival": {"process": "burst"}, "prompt_tokens": tokens(8064), "output_tokens": [1, 8]},
        "chat": {
            "arrival": {"process": "closed", "concurrency": many},
            "prompt_tokens": {
                "distribution": "lognormal",
                "median": tokens(1020),
                "sigma": 0.843,
                "min": 2,
                "max": tokens(14050),
            },
            "output_tokens": {
                "distribution": "lognormal",
                "median": 60,
                "sigma": 0.761,
                "min": 2,
                "max": max(8, tokens(200)),
            },
        },
        "crowd": {
            "arrival": {"process": "closed", "concurrency": scale.max_requests},
            "prompt_tokens": [tokens(64), tokens(192), tokens(448)],
            "output_tokens": [16, 32, 48],
        },
        "light": {
            "arrival": {"process": "constant", "rate": 12},
            "prompt_tokens": [tokens(256), tokens(512), tokens(768)],
            "output_tokens": 4,
        },
    }
    seats = {"chat": many, "crowd": scale.max_requests}.get(workload, few)
    raw = {
        "model": model,
        "policy": dict(POLICIES)[policy],
        "scheduler": {
            "max_num_seqs": seats,
            "max_num_batched_tokens": scale.max_rows if workload == "chat" else scale.max_rows // 2,
            "prefill_chunk_size": chunk,
            "inflight": inflight,
        },
        "workload": {"kind": "synthetic", "num_requests": num_requests, **lengths[workload]},
        "seed": seed,
    }
    return parse_config(raw, Path("."), f"profile: {policy}, chunk {chunk}, {workload}")


def all_mixes(model: str, seed: int, scale: Scale) -> list[tuple[str, RunConfig]]:
    """Every policy x workload x chunk size, with a name for each."""
    requests = {"serving": 12, "long": 4, "chat": 40, "crowd": 2 * scale.max_requests}
    return [
        (
            f"{policy}, chunk {chunk}, {workload}",
            mix(model, seed, scale, policy, workload, chunk, requests[workload]),
        )
        for (policy, _), workload, chunk in product(POLICIES, WORKLOADS, scale.chunks)
    ]


def sampled_cases(
    runs: Sequence[tuple[str, PlannedRun]], shape: ModelShape, buckets: Sequence[int], count: int, seed: int
) -> list[Case]:
    """About `count` batches of `runs`, `SHARES` of them by kind, spread evenly over what batches of a kind
    look like and over runs.

    Batches that look alike are a stratum; of each stratum every run offers one, chosen at random.
    """
    rng = random.Random(seed)
    strata: dict[tuple[Any, ...], dict[str, Case]] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for name, run in runs:
        for work in formed_work(run, shape):
            key = _stratum(work, buckets)
            seen[key, name] += 1
            if rng.randrange(seen[key, name]) == 0:
                strata.setdefault(key, {})[name] = Case.of("batch", name, work)
    chosen: dict[Any, Case] = {}
    for share_key, share in SHARES.items():
        offers = [
            rng.sample(list(cases.values()), len(cases))
            for key, cases in strata.items()
            if key[0] == share_key
        ]
        rng.shuffle(offers)
        in_turn = [cases[turn] for turn in range(len(runs)) for cases in offers if turn < len(cases)]
        chosen |= {case.row().key: case for case in in_turn[: round(share * count)]}
    return list(chosen.values())


def _stratum(work: Work, buckets: Sequence[int]) -> tuple[Any, ...]:
    """The key in `SHARES`, then coarsely what decides the cost: loops, launched rows, longest range, context,
    decode rows."""
    share_key = (work.stage, any(item.stage in PROMPT_STAGES for item in work.ranges))
    longest = max(item.token_count for item in work.ranges)
    decode_rows = sum(item.stage is Stage.RECURRENT for item in work.ranges)
    kv_tokens, _ = work.attention_work()
    bucket = next(size for size in buckets if size >= work.rows)
    return (
        share_key,
        work.loop_count,
        bucket,
        (longest - 1).bit_length(),
        kv_tokens.bit_length(),
        decode_rows.bit_length(),
    )


def formed_work(run: PlannedRun, shape: ModelShape) -> Iterator[Work]:
    """What the batches of `run` do on a device that is done with each when the engine waits for it."""
    config, workload = run.config, run.workload
    foresight = Foresight(workload.oracle, None, config.rule(shape))
    engine = assemble(config, run.shape(shape), workload.clients())
    pending: deque[ExecutionBatch] = deque()
    now_ns = 0
    loop = engine.run()
    command = next(loop, None)
    while command is not None:
        now_ns += 1
        event: Event = Tick(now_ns)
        if isinstance(command, Submit):
            foresight.see(command.batch.transfers)
            pending.append(command.batch)
            yield command.batch.work
        elif pending:
            batch = pending.popleft()
            event = Completion(batch.seq, now_ns, now_ns, now_ns, foresight.stops(batch.work))
        elif command.until_ns is not None:
            now_ns = max(now_ns, command.until_ns)
            event = Tick(now_ns)
        command = advance(loop, event)
