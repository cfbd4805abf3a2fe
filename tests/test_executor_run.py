"""Real runs on a CPU: the directory they leave, the rules their logs keep, and how they end when something
goes wrong."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from log_checker import check_log, parse_batches

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import Done, config_of, delivered, rules_of, run_on, session_of  # noqa: E402

import executor.run  # noqa: E402
import executor.sweep  # noqa: E402
import policies.assembly  # noqa: E402
from executor.checks.diagnose import diagnose  # noqa: E402
from executor.session import Session, tokens_sha256  # noqa: E402
from executor.source import kernel_sha256  # noqa: E402
from executor.sweep import run_grid  # noqa: E402
from policies.core.engine.scheduler import Scheduler  # noqa: E402
from policies.core.errors import InputError  # noqa: E402
from policies.core.models.shape import OURO_TINY  # noqa: E402
from results.load import load_run  # noqa: E402
from sim.run import simulate  # noqa: E402

POLICIES = ("atomic", "split", "mixed", "wcpb")
OPTIONS = {
    "wcpb": "policy=wcpb",
    "wcpb, decode apart": "policy={name: wcpb, mix_decode: false}",
    "wcpb, staging apart": "policy={name: wcpb, fuse_prelude: false}",
    "atomic": "policy=atomic",
    "split": "policy=split",
    "mixed": "policy=mixed",
}
ODD = {
    "synchronous": ("scheduler.inflight=1",),
    "no refill": ("scheduler.decode=no_refill",),
    "max_num_seqs no bucket": ("scheduler.max_num_seqs=7", "workload.num_requests=9"),
    "budget below max_num_seqs": (
        "scheduler.max_num_seqs=8",
        "scheduler.max_num_batched_tokens=5",
        "scheduler.prefill_chunk_size=3",
    ),
    "a chunk is the budget": ("scheduler.prefill_chunk_size=null",),
    "one row at a time": (
        "scheduler.max_num_batched_tokens=1",
        "scheduler.prefill_chunk_size=1",
        "workload.prompt_tokens=5",
    ),
    "blocks of 5 tokens": ("cache.block_size=5",),
    "a tight pool": ("cache.num_blocks=24",),
    "poisson": ("workload.arrival={process: poisson, rate: 200}",),
    "closed loop": ("workload.arrival={process: closed, concurrency: 2}", "workload.num_requests=7"),
}


@pytest.fixture(scope="module")
def session() -> Session:
    return session_of()


def checked(session: Session, done: Done, **changes: object) -> None:
    """The log keeps the nine invariants as an outside checker reads them, and every token was written
    down."""
    check_log(
        done.text("batches.csv"), done.text("requests.csv"), rules_of(session, session.runs[0], **changes)
    )
    lines = list(csv.DictReader(io.StringIO(done.text("tokens.csv"))))
    assert {
        int(line["request_id"]): list(map(int, line["token_ids"].split())) for line in lines
    } == done.tokens
    assert delivered(done) == {key: len(tokens) for key, tokens in done.tokens.items()}


@pytest.mark.parametrize("policy", OPTIONS)
def test_the_log_of_every_policy_passes_the_outside_checker(policy: str, tmp_path: Path) -> None:
    session = session_of(config_of(OPTIONS[policy]))
    done = run_on(session, tmp_path / "run")
    checked(session, done)
    assert done.summary["status"] == "complete"
    assert (done.summary["num_finished"], done.summary["num_unfinished"], done.summary["surplus_rows"]) == (
        4,
        0,
        0,
    )


@pytest.mark.parametrize("name", ODD)
def test_odd_settings_keep_the_rules(name: str, tmp_path: Path) -> None:
    session = session_of(config_of(*ODD[name]))
    done = run_on(session, tmp_path / "run")
    checked(session, done)
    assert done.summary["num_finished"] == len(session.runs[0].workload.requests)


def test_the_run_directory_is_the_simulators(tmp_path: Path) -> None:
    config = config_of()
    session = session_of(config)
    done = executor.run.execute(session, session.runs[0], tmp_path / "gpu", plots=True)
    path, simulated = simulate(config, tmp_path / "sim", plots=True)
    names = {item.relative_to(path) for item in path.rglob("*")}
    assert {item.relative_to(done[0]) for item in done[0].rglob("*")} == names | {Path("tokens.csv")}
    for name in ("batches.csv", "requests.csv"):
        assert (done[0] / name).read_text().splitlines()[0] == (path / name).read_text().splitlines()[0]
    assert list(done[1])[: len(simulated)] == list(simulated)
    assert load_run(done[0]).summary == done[1]
    assert done[1]["output_token_sha256"] == tokens_sha256(done[2])
    assert done[1]["weights"] == "random, seed 0"
    assert done[1]["kernel_sha256"] == kernel_sha256()
    assert (done[1]["world"], done[1]["device"], done[1]["dtype"], done[1]["cuda_graphs"]) == (
        "executor",
        "cpu",
        "float32",
        False,
    )


def test_two_runs_give_the_same_tokens_and_their_hash_tells_requests_apart(
    session: Session, tmp_path: Path
) -> None:
    one, two = (run_on(session, tmp_path / name, audit=False) for name in ("one", "two"))
    assert one.summary["output_token_sha256"] == two.summary["output_token_sha256"]
    assert tokens_sha256({0: [1, 2]}) != tokens_sha256({0: [1], 1: [2]}) != tokens_sha256({0: [12]})


def test_times_are_monotone_and_device_times_do_not_overlap(session: Session, tmp_path: Path) -> None:
    batches = parse_batches(run_on(session, tmp_path / "run", audit=False).text("batches.csv"))
    edges = [time for batch in batches for time in (batch.started_ns, batch.finished_ns)]
    assert edges == sorted(edges)
    assert all(
        batch.submitted_ns <= batch.started_ns <= batch.finished_ns <= batch.collected_ns for batch in batches
    )


def test_an_open_loop_keeps_the_clock_of_its_arrivals(tmp_path: Path) -> None:
    session = session_of(config_of("workload.arrival={process: constant, rate: 20}"))
    done = run_on(session, tmp_path / "run", audit=False)
    lines = list(csv.DictReader(io.StringIO(done.text("requests.csv"))))
    assert [int(line["arrival_ns"]) for line in lines] == [0, 50_000_000, 100_000_000, 150_000_000]
    assert all(int(line["first_scheduled_ns"]) >= int(line["arrival_ns"]) for line in lines)
    assert done.summary["duration_s"] >= 0.15


def test_a_closed_loop_sends_a_request_when_an_earlier_one_has_ended(tmp_path: Path) -> None:
    session = session_of(
        config_of("workload.arrival={process: closed, concurrency: 2}", "workload.num_requests=6")
    )
    lines = list(
        csv.DictReader(io.StringIO(run_on(session, tmp_path / "run", audit=False).text("requests.csv")))
    )
    arrivals, ends = ([int(line[key]) for line in lines] for key in ("arrival_ns", "finished_ns"))
    assert arrivals[:2] == [0, 0]
    for at, arrival_ns in enumerate(arrivals):
        assert sum(end_ns > arrival_ns for end_ns in ends[:at]) <= 1


def test_requests_beyond_the_context_are_refused_with_the_numbers(tmp_path: Path) -> None:
    session = session_of(config_of("workload.max_context=41"))
    done = run_on(session, tmp_path / "run")
    checked(session, done)
    assert (done.summary["num_refused"], done.summary["num_finished"]) == (1, 3)
    assert list(done.summary["refusal_reasons"]) == [
        "prompt 70 + max_tokens 5 = 75 tokens, the context holds 41"
    ]


def test_requests_beyond_the_pool_are_refused_with_the_numbers(tmp_path: Path) -> None:
    session = session_of(config_of("cache.num_blocks=12"))
    done = run_on(session, tmp_path / "run")
    checked(session, done)
    assert list(done.summary["refusal_reasons"]) == ["it needs 20 KV blocks (74 positions), the pool has 12"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "workload.max_context=1",
            "test.yaml: none of 4 requests can run; request 0: prompt 37 .* the context holds 1",
        ),
        (
            "workload.prompt_tokens=70000",
            "none of 4 requests can run; request 0: prompt 70000 .* the context holds 65536",
        ),
        (
            "cache={num_blocks: 4, block_size: 1}",
            "none of 4 requests can run; request 0: it needs 160 KV blocks",
        ),
        ("cache.num_blocks=3", "cache.num_blocks: 3 is less than one block in each of the 4 depth planes"),
    ],
)
def test_a_workload_of_which_nothing_can_run_is_wrong_input(override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        session_of(config_of(override, *(("workload.prompt_tokens=37",) if "cache={" in override else ())))


def test_nothing_is_allocated_at_the_end(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedulers: list[Scheduler] = []

    class Recorded(Scheduler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            schedulers.append(self)

    monkeypatch.setattr(policies.assembly, "Scheduler", Recorded)
    run_on(session, tmp_path / "run")
    schedulers[0].check_drained()
    assert schedulers[0].blocks.used_blocks == schedulers[0].rings.used_slots == 0


def test_early_stops_discard_surplus_work_and_leave_the_same_bits(session: Session, tmp_path: Path) -> None:
    expected = run_on(session, tmp_path / "exact")
    for inflight in (1, 2, 5):
        early = session_of(
            config_of("workload.max_tokens=30", f"scheduler.inflight={inflight}", "policy=split")
        )
        outputs = {
            item.request_id: len(expected.tokens[item.request_id]) for item in early.runs[0].workload.requests
        }
        planned = early.runs[0]
        longer = tuple(replace(request, max_tokens=30) for request in planned.workload.requests)
        early.runs[0] = replace(planned, workload=replace(planned.workload, requests=longer))
        done = run_on(early, tmp_path / f"early-{inflight}")
        checked(early, done, outputs=outputs)
        assert done.against(expected).is_identical
        assert (done.summary["surplus_rows"] > 0) == (inflight > 1)


def test_diagnosis_finds_no_difference_between_policies(tmp_path: Path) -> None:
    result = diagnose(
        config_of(), config_of("policy=atomic", "scheduler.prefill_chunk_size=null"), "cpu", tmp_path
    )
    assert result.between == [0.0] * 4
    assert result.is_identical
    assert result.num_positions == 113
    assert max(*result.from_float64[0], *result.from_float64[1]) < 1e-4


def test_a_sweep_runs_only_the_cells_that_are_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = [({"policy": policy}, config_of(f"policy={policy}")) for policy in POLICIES]
    first = run_grid(grid, "cpu", tmp_path)
    assert len({summary["output_token_sha256"] for _, _, summary in first}) == 1
    (first[2][1] / "summary.json").unlink()
    ran: list[Path] = []
    execute = executor.sweep.execute

    def counted(session: Session, run: object, out: Path, **options: object) -> object:
        ran.append(out)
        return execute(session, run, out, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(executor.sweep, "execute", counted)
    again = run_grid(grid, "cpu", tmp_path)
    assert ran == [first[2][1]]
    assert [summary["policy"] for _, _, summary in again] == list(POLICIES)
    assert again[0][2] == json.loads((first[0][1] / "summary.json").read_text())


def test_runs_that_cannot_share_a_model_are_refused_by_key() -> None:
    with pytest.raises(InputError, match=r"test.yaml: seed: 0 and 1, expected one for all runs"):
        session_of(config_of(), config_of("seed=1"))
    with pytest.raises(InputError, match=r"cache.block_size: 16 and 32"):
        session_of(config_of(), config_of("cache.block_size=32"))


def test_a_card_that_the_catalogue_does_not_know_has_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of()
    monkeypatch.setattr(Session, "facts", None)
    monkeypatch.setattr(Session, "card", "NVIDIA GeForce GTX 970")
    done = run_on(session, tmp_path / "run")
    assert done.summary["limit_fraction"] is None
    assert (
        done.summary["limit_ceilings"]
        == "none: the catalogue has no card 'NVIDIA GeForce GTX 970', so batches have no limit"
    )


def test_the_pools_of_a_session_are_no_larger_than_its_requests_can_use() -> None:
    session = session_of(config_of("workload.max_context=60"))
    assert session.pools.host_groups.shape == (4, 3)
    assert session.model.rope[0].shape[0] == 41
    assert session.runs[0].config.cache.num_blocks == 4 * 3 * OURO_TINY.num_loops
