"""Prompts that begin alike on the device: reused K/V give the bits that computing them gives, beside any
other trouble."""

import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import cells
from log_checker import check_log

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import BASE, Done, config_of, rules_of, run_on, session_of  # noqa: E402
from worlds import on_cpu  # noqa: E402

from executor.checks.slots import Slots  # noqa: E402
from executor.errors import AuditError  # noqa: E402
from executor.prompts import prompt_ids  # noqa: E402
from executor.session import PlannedRun, Session  # noqa: E402
from policies.config.runconfig import RunConfig  # noqa: E402
from policies.core.memory.prefixes import block_keys  # noqa: E402
from policies.core.seam.batch import Allocation, Growth, Preemption, Transfers  # noqa: E402
from policies.core.seam.request import Request  # noqa: E402
from policies.registry import POLICIES  # noqa: E402
from sim.replay import replay  # noqa: E402

PLANES, BLOCK_SIZE = 4, 8
ALIKE: dict[str, Any] = BASE | {
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk_size": 16},
    "cache": {"block_size": BLOCK_SIZE, "watermark": 0.0},
    "workload": {
        "kind": "synthetic", "num_requests": 10, "prompt_tokens": [70, 41, 75, 64, 42], "output_tokens": [12,
        20, 3],
        "arrival": {"process": "burst"}, "shared_prefix": {"groups": 2, "tokens": 44},
    },
}  # fmt: skip
"""Two texts of five and a half blocks; the largest request needs 12 groups, four at once up to 44."""
ROOMY, TIGHT = 120, 15
CELLS = cells(list(POLICIES), (1, 2, 4), ("off", "recompute", "swap"))


def sharing(policy: str, inflight: int, preemption: str) -> RunConfig:
    pressure = (
        f"cache.num_blocks={TIGHT * PLANES}",
        "cache.allocation=incremental",
        f"cache.preemption={preemption}",
    )
    room = pressure if preemption != "off" else (f"cache.num_blocks={ROOMY * PLANES}",)
    return config_of(
        on_cpu(policy), f"scheduler.inflight={inflight}", "cache.prefix_caching=true", *room, base=ALIKE
    )


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Its first run shares nothing, then come those of CELLS."""
    yield session_of(
        config_of(f"cache.num_blocks={ROOMY * PLANES}", base=ALIKE), *(sharing(*cell) for cell in CELLS)
    )


@pytest.fixture(scope="module")
def alone(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run_on(session, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_a_reused_prefix_changes_no_bit(session: Session, alone: Done, tmp_path: Path, cell: Any) -> None:
    """Under pressure too: prefixes are evicted, shared groups go to host memory and come back as one's
    own."""
    run = session.runs[1 + CELLS.index(cell)]
    done = run_on(session, tmp_path / "run", run)
    assert done.against(alone).is_identical
    assert done.summary["prefix_hit_tokens"] >= BLOCK_SIZE
    assert (done.summary["preemptions"] > 0) == (cell[2] != "off")
    check_log(done.text("batches.csv"), done.text("requests.csv"), rules_of(session, run))
    outcome = replay(done.path)
    assert outcome.difference is None, str(outcome)


def test_the_second_of_two_prompts_computes_only_what_the_first_did_not(
    session: Session, tmp_path: Path
) -> None:
    """One after another under wcpb: the window of the later ones begins where their prefix ends, in the
    middle of a chunk."""
    config = config_of(
        "scheduler.max_num_seqs=1",
        "cache.prefix_caching=true",
        f"cache.num_blocks={ROOMY * PLANES}",
        base=ALIKE,
    )
    run = replace(session.runs[0], config=config)
    done = run_on(session, tmp_path / "run", run)
    reused = [
        item.split(":")
        for row in csv.DictReader(io.StringIO(done.text("batches.csv")))
        for item in row["reused"].split()
    ]
    assert [int(count) for _, count in reused] == [5] * 8
    assert done.summary["prefix_hit_tokens"] == 8 * 40


def test_hashing_real_tokens_groups_blocks_as_the_workloads_keys_do(session: Session) -> None:
    """Every block of every prompt of a run, as the executor draws it: keys are equal exactly when all tokens
    so far are."""
    run: PlannedRun = session.runs[1]
    keys: dict[bytes, bytes] = {}
    tokens: dict[bytes, bytes] = {}
    for request in run.workload.requests:
        ids = prompt_ids(run.config.seed, request, session.shape.vocab_size)
        for index, key in enumerate(block_keys(request, BLOCK_SIZE)):
            beginning = ids[: BLOCK_SIZE * (index + 1)].tobytes()
            assert keys.setdefault(key, beginning) == beginning
            assert tokens.setdefault(beginning, key) == key
    assert len(keys) == 2 * 5


def prompt_of(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def reusing(request_id: int, groups: tuple[int, ...], num_reused: int) -> Transfers:
    return Transfers(
        allocations=(
            Allocation(Request(request_id, 0, 5, 1), groups, request_id, num_reused_groups=num_reused),
        )
    )


def filled() -> Slots:
    """Blocks of two tokens, two planes: request 0 has computed the prompt 1 2 3 4 5 in groups 7, 5 and 6."""
    slots = Slots(2, 2)
    slots.transfer(
        Transfers(allocations=(Allocation(Request(0, 0, 5, 1), (7, 5, 6), 0),)), {0: prompt_of(1, 2, 3, 4, 5)}
    )
    for position in range(5):
        slots.wrote(0, position, 0, 2)
    return slots


def test_the_audit_compares_a_reused_prefix_with_the_tokens_it_was_computed_from() -> None:
    slots = filled()
    slots.transfer(reusing(1, (7, 5, 3), 2), {1: prompt_of(1, 2, 3, 4, 9)})
    assert slots.taken[1].origin == 4
    with pytest.raises(
        AuditError,
        match=r"2 is to reuse group 5 for its tokens 2 to 3, which was computed behind other tokens",
    ):
        slots.transfer(reusing(2, (7, 5), 2), {2: prompt_of(1, 2, 4, 4, 9)})
    with pytest.raises(
        AuditError, match=r"3 is to reuse group 6 for its tokens 4 to 5, which holds no complete block"
    ):
        slots.transfer(reusing(3, (7, 5, 6), 3), {3: prompt_of(1, 2, 3, 4, 5, 6, 7)})


def test_the_audit_forgets_what_a_group_held_once_somebody_else_got_it() -> None:
    slots = filled()
    slots.transfer(Transfers(released=(0,)), {})
    slots.transfer(
        Transfers(allocations=(Allocation(Request(1, 0, 5, 1), (2,), 1),)), {1: prompt_of(8, 8, 8)}
    )
    slots.transfer(Transfers(growths=(Growth(1, 1, (5,)),)), {})
    with pytest.raises(AuditError, match=r"request 2 is to reuse group 5 .* holds no complete block"):
        slots.transfer(reusing(2, (7, 5), 2), {2: prompt_of(1, 2, 3, 4, 9)})


def test_the_audit_follows_a_prefix_to_host_memory_and_back_into_other_groups() -> None:
    slots = filled()
    slots.transfer(Transfers(preemptions=(Preemption(0, 0, True, (7, 5)),)), {})
    back = Allocation(Request(0, 0, 5, 1), (1, 4, 9), 3, is_resumed=True, num_swapped_groups=2)
    slots.transfer(Transfers(allocations=(back,)), {0: prompt_of(1, 2, 3, 4, 5)})
    slots.transfer(reusing(1, (1, 4), 2), {1: prompt_of(1, 2, 3, 4, 5)})
    assert (slots.taken[0].origin, slots.taken[1].origin) == (0, 4)
