"""Token preservation on a CPU, bit for bit: nothing that a policy, a chunk size or a neighbour does reaches a
request's result."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import Done, config_of, run_on, session_of  # noqa: E402

from executor.checks.fingerprint import Fingerprint, Fingerprints, checksum  # noqa: E402
from executor.checks.preserve import compare, spell  # noqa: E402
from executor.packing import RunningRequest  # noqa: E402
from executor.session import PlannedRun, Session  # noqa: E402
from workloads.workload import Workload  # noqa: E402

POLICIES = ("atomic", "split", "mixed", "wcpb")
CHUNKS = (16, 32, 64, 128, "null")
COMPANY = ((1, 1), (4, 2), (3, 1), (6, 4), (2, 8))
"""(max_num_seqs, inflight): alone, with all others, and between; one of them for every policy and chunk size,
in turn."""
PROMPTS, OUTPUTS = "[37, 140, 63, 5, 128, 1]", "[4, 2, 5]"
BASE = (
    "scheduler.max_num_batched_tokens=160", "workload.num_requests=6", f"workload.prompt_tokens={PROMPTS}",
    f"workload.output_tokens={OUTPUTS}",
)  # fmt: skip
SAMPLING = "sampling={temperature: 0.9, top_k: 40, top_p: 0.95}"
ARRIVALS = {
    "closed loop of 2": "workload.arrival={process: closed, concurrency: 2}",
    "one every 2 ms": "workload.arrival={process: constant, rate: 500}",
    "poisson": "workload.arrival={process: poisson, rate: 300}",
    "cap of 3": "workload.arrival={process: burst, concurrency: 3}",
}


def grid() -> dict[str, tuple[str, ...]]:
    """Overrides of every cell by its name."""
    cells = {}
    for at, policy in enumerate(POLICIES):
        for by, chunk in enumerate(CHUNKS):
            seqs, inflight = COMPANY[(at + by) % len(COMPANY)]
            cells[f"{policy} chunk {chunk} seqs {seqs} inflight {inflight}"] = (
                f"policy={policy}",
                f"scheduler.prefill_chunk_size={chunk}",
                f"scheduler.max_num_seqs={seqs}",
                f"scheduler.inflight={inflight}",
            )
        for name, arrival in list(ARRIVALS.items())[at % 2 :: 2]:
            cells[f"{policy}, {name}"] = (f"policy={policy}", arrival, "scheduler.prefill_chunk_size=32")
        cells[f"{policy}, no refill"] = (
            f"policy={policy}",
            "scheduler.decode=no_refill",
            "scheduler.prefill_chunk_size=64",
        )
    for options in ("mix_decode: false", "fuse_prelude: false", "mix_decode: false, fuse_prelude: false"):
        for chunk in (16, 64):
            cells[f"wcpb {options} chunk {chunk}"] = (
                f"policy={{name: wcpb, {options}}}",
                f"scheduler.prefill_chunk_size={chunk}",
            )
    cells["a tight budget"] = ("scheduler.max_num_batched_tokens=19", "scheduler.max_num_seqs=6")
    cells["a tight pool"] = ("cache.num_blocks=44", "policy=mixed", "scheduler.max_num_seqs=6")
    cells["decode steps back"] = (
        "policy=split",
        "scheduler.max_prefill_batches_before_decode=3",
        "scheduler.min_coda_batch_size=2",
    )
    return cells


CELLS = grid()


@dataclass(frozen=True)
class World:
    """One loaded model, a planned run for every cell, and what all of them must reproduce."""

    session: Session
    runs: dict[str, PlannedRun]
    expected: Done


def world(folder: Path, cells: dict[str, tuple[str, ...]], *extra: str) -> World:
    alone = (
        *BASE,
        *extra,
        "policy=atomic",
        "scheduler.prefill_chunk_size=null",
        "scheduler.max_num_seqs=1",
        "scheduler.inflight=1",
    )
    session = session_of(config_of(*alone), *(config_of(*BASE, *extra, *cell) for cell in cells.values()))
    runs = dict(zip(cells, session.runs[1:], strict=True))
    return World(session, runs, run_on(session, folder / "alone", audit=True))


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("greedy"), CELLS)


@pytest.mark.parametrize("cell", CELLS)
def test_tokens_hidden_states_and_kv_are_the_same_bits_as_alone_and_atomic(
    cell: str, greedy: World, tmp_path: Path
) -> None:
    done = run_on(greedy.session, tmp_path / "run", greedy.runs[cell])
    assert done.against(greedy.expected).is_identical
    assert [len(done.tokens[key]) for key in sorted(done.tokens)] == [4, 2, 5, 4, 2, 5]
    assert done.summary["audited_rows"] >= sum(len(tokens) for tokens in done.tokens.values()) + 374


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_of_arrival_changes_no_bit(policy: str, greedy: World, tmp_path: Path) -> None:
    planned = next(run for name, run in greedy.runs.items() if name.startswith(f"{policy} chunk 32"))
    done = run_on(
        greedy.session, tmp_path / "run", replace(planned, workload=reversed_arrivals(planned.workload))
    )
    assert list(done.tokens) != sorted(done.tokens)
    assert done.against(greedy.expected).is_identical


def reversed_arrivals(workload: Workload) -> Workload:
    """The same requests, the last one first, a nanosecond apart."""
    late = [replace(request, arrival_ns=at) for at, request in enumerate(reversed(workload.requests))]
    return replace(workload, requests=tuple(late))


def test_seeded_sampling_depends_neither_on_the_policy_nor_on_the_company(
    greedy: World, tmp_path: Path
) -> None:
    names = [
        name
        for name in CELLS
        if name.split(" seqs")[0] in ("atomic chunk 64", "split chunk 16", "mixed chunk 128", "wcpb chunk 32")
    ]
    drawn = world(tmp_path, {name: CELLS[name] for name in (*names, "wcpb, cap of 3")}, SAMPLING)
    assert drawn.expected.tokens != greedy.expected.tokens
    for name, planned in drawn.runs.items():
        assert run_on(drawn.session, tmp_path / name, planned).against(drawn.expected).is_identical, name


def test_one_flipped_bit_of_a_weight_is_noticed(greedy: World, tmp_path: Path) -> None:
    weight = greedy.session.model.weights.layers[1].o
    bits = weight.view(torch.int32)
    held = bits[3, 5].item()
    bits[3, 5] ^= 1 << 20
    try:
        found = run_on(greedy.session, tmp_path / "run").against(greedy.expected)
    finally:
        bits[3, 5] = held
    assert found.kv_differ == found.num_requests == 6
    assert found.hidden_differ == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = values.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    expected = checksum(values).item()
    for index in range(values.numel()):
        for bit in range(8 * values.element_size()):
            flip = (
                torch.tensor(1 << bit).to(bits.dtype)
                if bit < 8 * values.element_size() - 1
                else torch.iinfo(bits.dtype).min
            )
            bits[index] ^= flip
            assert checksum(values).item() != expected, (index, bit)
            bits[index] ^= flip
    assert checksum(values).item() == expected


def test_the_checksum_sees_order_length_and_the_sign_of_zero() -> None:
    values = torch.arange(6.0)
    assert checksum(values).item() != checksum(values.flip(0)).item()
    assert checksum(torch.zeros(4)).item() != checksum(torch.zeros(5)).item()
    assert checksum(torch.zeros(4)).item() != checksum(-torch.zeros(4)).item()
    assert checksum(values.reshape(2, 3)).item() == checksum(values).item()


def test_a_kv_fingerprint_covers_every_plane_of_the_request_and_nothing_else(greedy: World) -> None:
    pools = greedy.session.pools
    kv, fingerprints = pools.kv, Fingerprints(pools)
    request = RunningRequest(0, 1, torch.zeros(20, dtype=torch.int32).numpy(), (3, 1))
    size, offset = kv.block_size, 20 - kv.block_size - 1
    expected = fingerprints._kv_checksums(request, 20)
    last = (1, 1 * kv.planes, 2, offset, 7)
    for at, pool in enumerate((kv.k, kv.v)):
        for plane in range(kv.planes):
            for layer, block, head, within, dim in (
                (0, 3 * kv.planes, 0, 0, 0),
                (1, 3 * kv.planes, 3, size - 1, 15),
                last,
            ):
                bits = pool.view(torch.int32)
                bits[layer, block + plane, head, within, dim] ^= 1
                found = fingerprints._kv_checksums(request, 20)
                bits[layer, block + plane, head, within, dim] ^= 1
                assert (found != expected).nonzero().flatten().tolist() == [at * kv.planes + plane]
        for block, within in ((2 * kv.planes, 0), (1 * kv.planes, offset + 1)):
            bits = pool.view(torch.int32)
            bits[0, block, 0, within, 0] ^= 1
            assert torch.equal(fingerprints._kv_checksums(request, 20), expected)
            bits[0, block, 0, within, 0] ^= 1


def test_a_comparison_counts_what_differs_and_a_missing_request_differs_in_everything() -> None:
    expected = ({0: [1, 2], 1: [3]}, {0: Fingerprint([5], [6, 7]), 1: Fingerprint([8], [9])})
    assert compare("same", expected, expected).is_identical
    other = ({0: [1, 3], 1: [3]}, {0: Fingerprint([5], [6, 0]), 1: Fingerprint([0], [9])})
    found = compare("other", expected, other)
    assert (found.tokens_differ, found.hidden_differ, found.kv_differ, found.num_tokens) == (1, 1, 1, 3)
    missing = compare("missing", expected, ({0: [1, 2]}, {0: Fingerprint([5], [6, 7])}))
    assert (missing.tokens_differ, missing.hidden_differ, missing.kv_differ) == (1, 1, 1)


def test_a_cell_is_spelled_by_what_it_sets() -> None:
    axes = {"cache": {"num_blocks": 512, "preemption": "swap"}, "policy.name": "wcpb"}
    assert spell(axes) == "num_blocks 512, preemption swap, name wcpb"
