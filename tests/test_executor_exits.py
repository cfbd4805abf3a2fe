"""Early exit on a CPU, bit for bit: which token leaves when, its K/V and its hidden state do not depend on
the schedule."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from cells import cells  # noqa: E402
from executor_runs import Done, config_of, rules_of, run_on, session_of  # noqa: E402
from log_checker import check_log  # noqa: E402
from worlds import on_cpu  # noqa: E402

from executor.model.reference import dense_forward  # noqa: E402
from executor.model.weights import named_tensors  # noqa: E402
from executor.prompts import prompt_ids  # noqa: E402
from executor.session import PlannedRun, Session  # noqa: E402
from policies.core.errors import InputError  # noqa: E402
from policies.registry import POLICIES  # noqa: E402
from sim.replay import replay  # noqa: E402

WORLD = (
    "scheduler.max_num_batched_tokens=96", "workload.num_requests=6",
    "workload.prompt_tokens=[37, 70, 23, 5, 48, 1]", "workload.output_tokens=[9, 2, 12, 7]",
)  # fmt: skip
MODES = {
    "gate": ("exit={mode: gate, threshold: 0.9}",),
    "gate from 2": ("exit={mode: gate, threshold: 0.8, min_loops: 2, max_loops: 3}",),
    "trace": ("exit.mode=trace", "workload.exit_loops=[1, 4, 2, 3, 1, 1, 3]"),
    "trace from 2": ("exit={mode: trace, min_loops: 2}", "workload.exit_loops=[1, 4, 2, 3, 1, 1, 3]"),
}


GRID = cells(list(MODES), list(POLICIES), (1, 2, 4))


def company(mode: str) -> dict[str, tuple[str, ...]]:
    """Overrides of every cell of `mode` by name: policies x batches in flight x chunk sizes, and other
    company."""
    found = {}
    for at, (policy, inflight) in enumerate(cell for name, *cell in GRID if name == mode):
        chunk, seqs = ((16, 4), (64, 3), ("null", 6))[(at + inflight) % 3]
        found[f"{policy} {chunk} {seqs} {inflight}"] = (
            on_cpu(policy), f"scheduler.prefill_chunk_size={chunk}", f"scheduler.max_num_seqs={seqs}",
            f"scheduler.inflight={inflight}",
        )  # fmt: skip
    found["no refill"] = ("policy=split", "scheduler.decode=no_refill", "scheduler.max_num_seqs=4")
    found["a tight budget"] = ("scheduler.max_num_batched_tokens=19", "scheduler.max_num_seqs=6")
    found["a tight pool"] = ("cache.num_blocks=44", "policy=mixed", "scheduler.max_num_seqs=6")
    return found


def world(mode: str) -> tuple[Session, dict[str, PlannedRun]]:
    """The first run is alone, atomic and synchronous: no surplus work, no neighbour."""
    alone = (
        "policy=atomic",
        "scheduler.prefill_chunk_size=null",
        "scheduler.max_num_seqs=1",
        "scheduler.inflight=1",
    )
    named = {"alone": alone} | company(mode)
    session = session_of(*(config_of(*WORLD, *MODES[mode], *cell) for cell in named.values()))
    return session, dict(zip(named, session.runs, strict=True))


def check(done: Done, session: Session, run: PlannedRun) -> None:
    """The log keeps every invariant and is decided again, exit by exit."""
    exits = run.config.exit
    rules = rules_of(session, run, min_loops=exits.min_loops, max_loops=exits.max_loops)
    replayed = check_log(done.text("batches.csv"), done.text("requests.csv"), rules)
    assert replayed.surplus_rows == done.summary["surplus_rows"]
    outcome = replay(done.path)
    assert outcome.difference is None, str(outcome)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_states_kv_and_depths_are_the_same_bits_under_every_schedule(
    mode: str, tmp_path: Path
) -> None:
    session, runs = world(mode)
    alone = runs.pop("alone")
    expected = run_on(session, tmp_path / "alone", alone)
    check(expected, session, alone)
    assert len(expected.summary["tokens_by_loops"]) >= 2
    assert expected.summary["surplus_rows"] == 0
    surplus = 0
    for name, run in runs.items():
        done = run_on(session, tmp_path / name, run)
        assert done.against(expected).is_identical, name
        assert done.summary["tokens_by_loops"] == expected.summary["tokens_by_loops"], name
        check(done, session, run)
        surplus += done.summary["surplus_rows"]
    assert surplus > 0


def test_threshold_1_and_full_depth_traces_are_fixed_depth_bit_for_bit(tmp_path: Path) -> None:
    fixed = session_of(config_of(*WORLD))
    expected = run_on(fixed, tmp_path / "fixed")
    for at, extra in enumerate((("exit={mode: gate}",), ("exit.mode=trace", "workload.exit_loops=4"))):
        done = run_on(session_of(config_of(*WORLD, *extra)), tmp_path / str(at))
        assert done.against(expected).is_identical
        assert done.summary["tokens_by_loops"] == expected.summary["tokens_by_loops"] == {"4": 41 - 6}


def test_the_gate_says_what_the_float64_rule_says_of_the_first_decoded_token(tmp_path: Path) -> None:
    """The K/V before it is full depth, so a dense forward of prompt and token is what it saw."""
    threshold = 0.9
    session = session_of(
        config_of(*WORLD, "workload.output_tokens=2", f"exit={{mode: gate, threshold: {threshold}}}")
    )
    done = run_on(session, tmp_path / "run")
    shape = session.shape
    tensors = dict(named_tensors(shape, session.model.weights))
    expected: dict[str, int] = {}
    for request in session.runs[0].workload.requests:
        prompt = torch.from_numpy(prompt_ids(0, request, shape.vocab_size))
        tokens = torch.cat((prompt.long(), torch.tensor(done.tokens[request.request_id][:1])))
        leaving = 1 - (1 - dense_forward(shape, tensors, tokens).gate[:, -1]).cumprod(0)
        loops = next((loop for loop in (1, 2, 3) if leaving[loop - 1] >= threshold), 4)
        expected[str(loops)] = expected.get(str(loops), 0) + 1
    assert done.summary["tokens_by_loops"] == dict(sorted(expected.items()))


def test_a_workload_without_exit_loops_is_refused_by_trace() -> None:

    with pytest.raises(InputError, match=r"exit.mode: trace needs the loops of every token"):
        session_of(config_of("exit.mode=trace"))
    session_of(config_of("exit={mode: trace, min_loops: 2, max_loops: 2}"))
