"""The address audit on whole runs: it passes every valid one, and sees what no address tells."""

from pathlib import Path

import pytest
from cells import cells

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import config_of, run_on, session_of  # noqa: E402

from executor.errors import RunError  # noqa: E402
from executor.kernels import exit_copy  # noqa: E402

EARLY = ("exit={mode: trace}", "workload.exit_loops=[1, 4, 2, 3, 1]", "workload.output_tokens=10")


def test_exit_copies_that_are_left_out_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_on(session_of(config_of(*EARLY)), tmp_path / "whole").summary["loops_saved"] > 0
    monkeypatch.setattr(exit_copy, "exit_copy_torch", lambda k, v, slots, planes: None)
    with pytest.raises(RunError, match=r"plane [0-9] has not the K of plane [0-9], its last"):
        run_on(session_of(config_of(*EARLY)), tmp_path / "without")


@pytest.mark.parametrize(
    ("policy", "preemption", "admit"),
    cells(
        ["{name: wcpb, fuse_prelude: false}", "split", "mixed"],
        ["recompute", "swap"],
        ["whole_context", "first_chunk"],
    ),
)
def test_a_row_that_is_staged_before_it_has_blocks_is_valid(
    tmp_path: Path, policy: str, preemption: str, admit: str
) -> None:
    """A wavefront stages a chunk whose K/V blocks come when it is to run."""
    run = (
        f"policy={policy}", "scheduler={max_num_seqs: 4, max_num_batched_tokens: 16, prefill_chunk_size: 16}",
        "cache={block_size: 16, num_blocks: 60, allocation: incremental}", f"cache.preemption={preemption}",
        f"cache.admit={admit}", "workload.num_requests=6", "workload.prompt_tokens=40",
        "workload.output_tokens=30", "workload.arrival={process: burst}",
    )  # fmt: skip
    done = run_on(session_of(config_of(*run)), tmp_path / "run")
    assert done.summary["num_finished"] == 6
    assert done.summary["audited_rows"] > 0
