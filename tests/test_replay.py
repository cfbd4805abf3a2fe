"""Replays: both worlds' runs are decided again exactly, and a log that was changed is caught at the first
difference."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cells import cells
from worlds import spelled

from policies.config.runconfig import parse_config
from policies.core.engine.batchlines import BATCH_COLUMNS
from policies.registry import POLICIES
from sim import recorded as recorded_module
from sim.cli import main
from sim.recorded import RecordedRun
from sim.replay import Outcome, replay
from sim.run import simulate

OPEN = {"arrival": {"process": "poisson", "rate": 300}}
CLOSED = {"arrival": {"process": "closed", "concurrency": 2}}
CAPPED = {"arrival": {"process": "poisson", "rate": 300, "concurrency": 3}}
HASTY = {**OPEN, "patience_ms": [1000, 4, 30]}
LOOPS = {"open": OPEN, "closed": CLOSED, "capped": CAPPED, "hasty": HASTY}
EXECUTED = cells(list(POLICIES), (1, 2, 4), list(LOOPS))
COLUMNS = len(BATCH_COLUMNS)
Lines = list[list[str]]


def config_of(policy: Any, inflight: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "model": "ouro-tiny",
        "device": changes.pop("device", "h200"),
        "policy": policy,
        "scheduler": {
            "max_num_seqs": 3, "max_num_batched_tokens": 32, "prefill_chunk_size": 16, "inflight": inflight,
            **changes.pop("scheduler", {}),
        },
        "cache": changes.pop("cache", {}),
        "workload": {
            "kind": "synthetic", "num_requests": 7, "prompt_tokens": [37, 20, 5, 60], "output_tokens": [4, 1,
            3], "max_tokens": 5,
            **changes.pop("workload", {}),
        },
        "exit": changes.pop("exit", {}),
        "seed": changes.pop("seed", 0),
    }  # fmt: skip


def simulated(out: Path, raw: dict[str, Any]) -> Path:
    return simulate(parse_config(raw, out.parent, "test"), out, plots=False)[0]


def assert_equal(outcome: Outcome) -> None:
    assert outcome.difference is None, str(outcome)
    with open(outcome.run.path / "batches.csv") as file:
        assert outcome.num_batches == sum(1 for _ in file) - 1 > 0


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of the executor on this CPU, those of EXECUTED."""
    torch = pytest.importorskip("torch", reason="the executor's runs need torch")
    from executor.run import execute
    from executor.session import Session

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("executed")
    names, configs = [], []
    for policy, inflight, loop in EXECUTED:
        names.append(f"{policy}-{inflight}-{loop}")
        raw = config_of(spelled(policy, "roofline:cpu"), inflight, workload=LOOPS[loop])
        configs.append(parse_config(raw, folder, "test"))
    session = Session(configs, "cpu")
    return {
        name: execute(session, run, folder / name, plots=False)[0]
        for name, run in zip(names, session.runs, strict=True)
    }


@pytest.mark.parametrize(("policy", "inflight", "loop"), EXECUTED)
def test_every_batch_of_an_executor_run_is_decided_again_from_its_measured_times(
    executed: dict[str, Path], policy: str, inflight: int, loop: str
) -> None:
    assert_equal(replay(executed[f"{policy}-{inflight}-{loop}"]))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("inflight", [1, 2, 4])
@pytest.mark.parametrize("device", ["h200", "a100-seed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_batch_of_a_simulated_run_is_decided_again(
    tmp_path: Path, policy: str, device: str, inflight: int, loop: str
) -> None:
    assert_equal(
        replay(
            simulated(
                tmp_path / "run", config_of(spelled(policy), inflight, device=device, workload=LOOPS[loop])
            )
        )
    )


@pytest.mark.parametrize("inflight", [3, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_clients_that_hang_up_while_a_batch_is_handed_over_are_gone_in_the_replay_too(
    tmp_path: Path, policy: str, inflight: int
) -> None:
    """A host slower than the device, one place, and clients that wait 3 ms: almost every one hangs up at such
    a time."""
    hasty = {
        "num_requests": 30,
        "arrival": {"process": "poisson", "rate": 2000},
        "patience_ms": 3,
        "max_tokens": 30,
    }
    raw = config_of(
        spelled(policy), inflight, device="roofline:h200", workload=hasty, scheduler={"max_num_seqs": 1}
    )
    raw["workload"]["output_tokens"] = [1, 30, 7]
    assert_equal(replay(simulated(tmp_path / "run", raw)))


@pytest.mark.parametrize("world", range(60))
def test_random_worlds_with_refusals_priorities_tight_pools_and_ties_are_decided_again(
    tmp_path: Path, world: int
) -> None:
    """A trace out of order, so that ids and arrivals disagree, times on a coarse grid, so that many things
    happen at once."""
    draw = random.Random(world)
    rows = ["arrival_ms,prompt_tokens,output_tokens,max_tokens,priority,exit_loops"]
    for _ in range(draw.randint(1, 25)):
        output = draw.randint(1, 6)
        prompt, asked = draw.choice([1, 5, 16, 17, 40, 90]), output + draw.randint(0, 3)
        rows.append(f"{25 * draw.randint(0, 12)},{prompt},{output},{asked},{draw.randint(0, 2)},"
                    f"{' '.join(str(draw.randint(1, 4)) for _ in range(draw.randint(0, 5)))}")  # fmt: skip
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    policy = draw.choice(list(POLICIES))
    found = spelled(policy)
    named = {"name": found} if isinstance(found, str) else found
    options = (
        {"mix_decode": draw.random() < 0.5, "fuse_prelude": draw.random() < 0.5} if policy == "wcpb" else {}
    )
    concurrency, max_context = draw.choice([None, 1, 2, 4]), draw.choice([None, 60])
    chunk, inflight = draw.choice([4, 16, None]), draw.choice([1, 2, 2, 4, 8])
    raw = {
        "model": draw.choice(["ouro-tiny", "ouro-1.4b"]),
        "device": draw.choice(["a100-seed", "h200", "roofline:l4"]),
        "policy": {**named, **options},
        "scheduler": {
            "max_num_seqs": draw.randint(1, 5), "max_num_batched_tokens": 16 if chunk else draw.choice([3,
            64]),
            "prefill_chunk_size": chunk, "inflight": inflight, "decode": draw.choice(["refill", "no_refill"]),
            "admission": draw.choice(["fcfs", "priority"]), "admission_scan_limit": draw.randint(1, 4),
            "max_admission_bypasses": draw.randint(0, 2), "min_coda_batch_size": draw.randint(1, 3),
            "max_prefill_batches_before_decode": draw.randint(1, 3),
        },
        "cache": {"block_size": 16, "num_blocks": draw.choice([20, 28, 60, None])},
        "workload": {"kind": "trace", "path": "t.csv", "concurrency": concurrency,
        "max_context": max_context},
        "exit": draw.choice([{}, {"mode": "trace"}, {"mode": "trace", "min_loops": 2, "max_loops": 3}]),
    }  # fmt: skip
    path = simulated(tmp_path / "run", raw)
    outcome = replay(path)
    assert outcome.difference is None, str(outcome)


def test_a_closed_loop_cannot_be_replayed_by_its_logged_arrivals_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that take no time are formed at the instant at which a request ends, before that end is
    collected."""
    path = simulated(tmp_path / "run", config_of("mixed", 2, device="a100-seed", workload=CLOSED))
    assert_equal(replay(path))
    clients = recorded_module.LoggedClients
    monkeypatch.setattr(
        recorded_module,
        "LoggedClients",
        lambda requests, concurrency, patience_ns: clients(requests, None, patience_ns),
    )
    assert replay(path).difference is not None


def test_the_presets_closed_and_capped_loops_are_found_in_the_preset(tmp_path: Path) -> None:
    for name, concurrency in (("seed-serial-fixed", 1), ("seed-concurrent-fixed", 8), ("seed-4x8064", None)):
        workload = {
            "kind": "preset",
            "name": name,
            "num_requests": 2,
            "prompt_tokens": 40,
            "output_tokens": 2,
        }
        path = simulated(tmp_path / name, {**config_of("wcpb"), "workload": workload})
        assert RecordedRun.read(path).concurrency == concurrency
        assert_equal(replay(path))


def test_a_run_that_refused_everything_replays_with_no_batch(tmp_path: Path) -> None:
    outcome = replay(simulated(tmp_path / "run", config_of("wcpb", workload={**OPEN, "max_context": 4})))
    assert (outcome.num_batches, outcome.difference) == (0, None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small wavefront; batch 2 is formed with two ranges of request 0."""
    return simulated(tmp_path / "run", config_of("wcpb", workload=OPEN))


def change(path: Path, name: str, edit: Callable[[Lines], object]) -> None:
    """Edit the fields of a CSV file; line 0 is the header, so that line n+1 is batch n."""
    with open(path / name, newline="") as file:
        lines = list(csv.reader(file))
    edit(lines)
    with open(path / name, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def setter(column: str, batch: int, text: Callable[[str], str]) -> Callable[[Lines], None]:
    def edit(lines: Lines) -> None:
        at = lines[0].index(column)
        lines[batch + 1][at] = text(lines[batch + 1][at])

    return edit


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("stage", lambda stage: "PREFILL" if stage != "PREFILL" else "RECURRENT"),
        ("loop_count", lambda loops: str(int(loops) + 1)),
        ("num_requests", lambda count: str(int(count) + 1)),
        ("rows", lambda rows: str(int(rows) + 1)),
        ("ranges", lambda ranges: ranges.replace(":16:", ":17:", 1)),
        ("ranges", lambda ranges: " ".join(reversed(ranges.split(" ")))),
        ("allocated", lambda allocated: "9:0-2"),
    ],
    ids=["stage", "loop_count", "num_requests", "rows", "range", "order-of-ranges", "blocks"],
)
def test_a_changed_decision_is_the_first_difference_with_both_lines(
    run: Path, capsys: pytest.CaptureFixture[str], column: str, text: Callable[[str], str]
) -> None:
    true = (run / "batches.csv").read_text().splitlines()[3]
    change(run, "batches.csv", setter(column, 2, text))
    changed = (run / "batches.csv").read_text().splitlines()[3]
    assert changed != true
    outcome = replay(run)
    assert outcome.num_batches == 2 and outcome.difference is not None
    assert outcome.difference.sentence.startswith(f"batch 2 differs in {column}: ")
    assert (outcome.difference.logged, outcome.difference.replayed) == (changed, true)
    assert main(["replay", str(run)]) == 1
    printed = capsys.readouterr().out
    assert f"  log:    {changed}\n  replay: {true}\n" in printed


def test_a_batch_formed_at_another_time_differs(run: Path) -> None:
    change(run, "batches.csv", setter("submitted_ns", 1, lambda text: str(int(text) + 1)))
    change(run, "batches.csv", setter("submitted_ns", 6, lambda text: str(int(text) + 1)))
    outcome = replay(run)
    assert outcome.difference is not None and outcome.num_batches == 6
    assert "batch 6 differs in submitted_ns" in outcome.difference.sentence


def test_a_batch_formed_before_a_completion_that_its_line_claims_to_know_of_differs(run: Path) -> None:
    change(run, "batches.csv", setter("after_seq", 2, lambda text: "1"))
    change(run, "batches.csv", setter("after_seq", 3, lambda text: "1"))
    outcome = replay(run)
    assert outcome.num_batches == 2 and outcome.difference is not None
    assert outcome.difference.sentence == "batch 2 differs in after_seq: '1' in the log, '0' in the replay"


def test_a_batch_formed_after_a_completion_that_its_line_denies_cannot_be_formed(run: Path) -> None:
    change(run, "batches.csv", setter("after_seq", 2, lambda text: "-1"))
    outcome = replay(run)
    assert outcome.num_batches == 2 and outcome.difference is not None
    assert outcome.difference.sentence.startswith("batch 2 is in the log, the replay forms none at ")
    assert outcome.difference.replayed is None


def test_a_batch_missing_at_the_end_is_named(run: Path) -> None:
    num_batches = len((run / "batches.csv").read_text().splitlines()) - 1
    last = (run / "batches.csv").read_text().splitlines()[-1]
    change(run, "batches.csv", lambda lines: lines.pop())
    outcome = replay(run)
    assert outcome.difference is not None and outcome.num_batches == num_batches - 1
    assert outcome.difference.sentence == f"batch {num_batches - 1} is not in the log, which has ended"
    assert outcome.difference.logged is None
    assert outcome.difference.replayed is not None and outcome.difference.replayed.split(",")[6] in last


def test_a_batch_too_many_is_named(run: Path) -> None:
    def repeat(lines: Lines) -> None:
        last, seq = [*lines[-1]], len(lines) - 1
        last[0] = str(seq)
        last[lines[0].index("after_seq")] = str(seq - 1)
        for name in ("submitted_ns", "started_ns", "finished_ns"):
            last[lines[0].index(name)] = last[lines[0].index("collected_ns")]
        lines.append(last)

    change(run, "batches.csv", repeat)
    outcome = replay(run)
    assert outcome.difference is not None and outcome.difference.replayed is None
    assert outcome.difference.sentence.startswith(
        f"batch {outcome.num_batches} is in the log, the replay forms none at "
    )


def test_a_changed_output_length_moves_the_decisions(run: Path) -> None:
    change(run, "requests.csv", setter("output_tokens", 0, lambda text: str(int(text) - 1)))
    assert main(["replay", str(run)]) == 1


def test_a_changed_story_of_a_request_is_found_when_all_batches_are_equal(run: Path) -> None:
    change(run, "requests.csv", setter("first_scheduled_ns", 3, lambda text: str(int(text) + 1)))
    outcome = replay(run)
    assert outcome.difference is not None
    assert outcome.difference.sentence == "request 3 differs in first_scheduled_ns"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_num_seqs: 3", "max_num_seqs: 1"),
        ("fuse_prelude: true", "fuse_prelude: false"),
        ("chunk_size: 16", "chunk_size: 8"),
    ],
)
def test_settings_other_than_the_logs_make_other_decisions(run: Path, old: str, new: str) -> None:
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new))
    assert main(["replay", str(run)]) == 1


def test_a_field_longer_than_csv_likes_is_read(run: Path) -> None:
    change(run, "requests.csv", setter("reason", 0, lambda _: "x" * 200_000))
    outcome = replay(run)
    assert outcome.difference is not None and outcome.difference.sentence == "request 0 differs in reason"


def test_a_run_that_was_cut_off_is_replayed_as_far_as_it_goes_and_that_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Ctrl-C leaves: batches that were collected, requests that had arrived, and the tokens they had
    been given."""
    with open(run / "batches.csv", newline="") as file:
        kept = list(csv.DictReader(file))[:30]
    change(run, "batches.csv", lambda lines: lines.__delitem__(slice(31, None)))
    end_ns = int(kept[-1]["collected_ns"])

    def forget(lines: Lines) -> None:
        column = {name: at for at, name in enumerate(lines[0])}
        lines[1:] = [line for line in lines[1:] if int(line[column["arrival_ns"]]) <= end_ns]
        for line in lines[1:]:
            times = [
                time for time in line[column["token_ns"]].split() if int(time) <= int(kept[-1]["finished_ns"])
            ]
            if len(times) < int(line[column["output_tokens"]]):
                line[column["status"]], line[column["finished_ns"]] = "running" if times else "waiting", ""
            line[column["output_tokens"]], line[column["token_ns"]] = str(len(times)), " ".join(times)

    change(run, "requests.csv", forget)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    assert main(["replay", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run}: 30 batches of ")
    assert str(replay(run)).endswith(
        "all equal; the run was interrupted or broke off, and this is what it had logged"
    )
    change(run, "batches.csv", setter("rows", 20, lambda text: "1"))
    assert main(["replay", str(run)]) == 1


def drop(number: int) -> Callable[[Lines], object]:
    return lambda lines: lines.pop(number)


@pytest.mark.parametrize(
    ("name", "edit", "sentence"),
    [
        ("batches.csv", drop(0), "batches.csv line 1: column seq is missing, expected "),
        (
            "batches.csv",
            drop(5),
            "batches.csv line 6: batch 5 after batch 3 was collected, expected batch 4 after one from ",
        ),
        (
            "batches.csv",
            setter("started_ns", 3, lambda _: ""),
            "batches.csv line 5: started_ns: '', expected a whole number",
        ),
        (
            "batches.csv",
            setter("finished_ns", 3, lambda _: "1"),
            "batches.csv line 5: submitted, started, finished, collected at ",
        ),
        (
            "batches.csv",
            setter("after_seq", 3, lambda _: "3"),
            "batches.csv line 5: batch 3 after batch 3 was collected, expected ",
        ),
        (
            "batches.csv",
            lambda lines: lines[4].pop(),
            f"batches.csv line 5: {COLUMNS - 1} fields, expected {COLUMNS}",
        ),
        (
            "requests.csv",
            setter("prompt_tokens", 2, lambda _: "0"),
            "requests.csv line 4: 0 prompt tokens and ",
        ),
        (
            "requests.csv",
            setter("arrival_ns", 1, lambda _: "-5"),
            "requests.csv line 3: arrival_ns: -5, expected at least 0",
        ),
        (
            "requests.csv",
            setter("max_tokens", 2, lambda _: "x"),
            "requests.csv line 4: max_tokens: 'x', expected a whole number",
        ),
        (
            "requests.csv",
            setter("request_id", 2, lambda _: "1"),
            "requests.csv line 4: request 1 has a line already",
        ),
    ],
)
def test_a_log_that_no_run_can_have_written_is_one_line_and_status_2(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, edit: Callable[[Lines], object], sentence: str
) -> None:
    change(run, name, edit)
    status = main(["replay", str(run)])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_a_directory_that_is_no_whole_run_is_one_line_and_status_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        assert main(["replay", str(path)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    assert "nowhere: no such directory, expected a run directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "not a run directory" in refused(tmp_path / "empty")
    (run / "batches.csv").rename(run / "elsewhere.csv")
    assert "batches.csv: no such file, expected a log" in refused(run)
    (run / "elsewhere.csv").rename(run / "batches.csv")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("name: wcpb", "name: wcbp"))
    assert "config.yaml: policy.name: unknown policy 'wcbp'" in refused(run)
    (run / "config.yaml").write_text(text.replace("num_blocks: ", "num_blocks: null  # "))
    assert "config.yaml: cache.num_blocks: null, expected the number of blocks that the run had" in refused(
        run
    )
    (run / "config.yaml").write_text(text)
    assert main(["replay", str(run)]) == 0
    capsys.readouterr()
    (run / "summary.json").unlink()
    assert "has no summary.json, so the run there did not end" in refused(run)
