"""Guessed tokens on real kernels, ouro-tiny on a CPU: no token, hidden state or K/V element differs from the
same requests without guesses, whoever is right, and every address is audited."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import CountingTimeline, config_of, rules_of, run_on, session_of  # noqa: E402
from log_checker import check_log  # noqa: E402

from executor.lab.speculate import QUIET_GAIN, quieten  # noqa: E402
from sim.replay import replay  # noqa: E402

SMALL = ("scheduler.inflight=4", "workload.output_tokens=[9, 4, 12]", "workload.prompt_tokens=[17, 5, 30]")
GUESSES = [
    ("speculation={mode: loops, draft_loops: 2, max_tokens: 3}",),
    ("speculation={mode: loops, draft_loops: 1, max_tokens: 2}", "policy=atomic", "scheduler.inflight=8"),
    (
        "speculation={mode: loops, draft_loops: 3, max_tokens: 1}",
        "cache={block_size: 4, num_blocks: 64, allocation: incremental, preemption: swap}",
    ),
]


@pytest.mark.parametrize(("is_quiet", "temperature"), [(False, 0.0), (True, 0.0), (True, 0.8)])
def test_no_bit_differs_from_running_without_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_quiet: bool, temperature: float
) -> None:
    monkeypatch.setattr("executor.run.make_timeline", lambda device: CountingTimeline())
    sampled = f"sampling.temperature={temperature}"
    block = "cache.block_size=4"
    session = session_of(
        config_of(*SMALL, sampled, block), *[config_of(*SMALL, sampled, block, *item) for item in GUESSES]
    )
    if is_quiet:
        quieten(session, QUIET_GAIN)
    expected = run_on(session, tmp_path / "without")
    for at, run in enumerate(session.runs[1:]):
        done = run_on(session, tmp_path / str(at), run)
        assert done.against(expected).is_identical
        guesses = run.config.speculation
        rules = rules_of(session, run, draft_loops=guesses.draft_loops, max_guesses=guesses.max_tokens)
        check_log(done.text("batches.csv"), done.text("requests.csv"), rules)
        assert replay(done.path).difference is None
        assert done.summary["speculation"]["checked"] > 0
        assert not is_quiet or done.summary["speculation"]["acceptance"] > 0.3
