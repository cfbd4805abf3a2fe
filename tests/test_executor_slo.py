"""The slo policy on a real device: the same tokens as wcpb, bit for bit, and decisions that replay."""

from pathlib import Path

import pytest
from log_checker import check_log

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import config_of, rules_of, run_on, session_of  # noqa: E402

from policies.core.errors import InputError  # noqa: E402
from sim.replay import replay  # noqa: E402

LONG = (
    "workload.prompt_tokens=[90, 5, 70, 33]",
    "workload.output_tokens=[6, 2, 9]",
    "workload.num_requests=7",
)


@pytest.mark.parametrize("options", ["itl_ms: 4000", "itl_ms: 8, gaps: banked", "itl_ms: 0.001"])
def test_output_tokens_equal_those_of_wcpb_bit_for_bit_and_the_run_replays(
    tmp_path: Path, options: str
) -> None:
    slo = f"policy={{name: slo, ttft_ms: 50, {options}, model: 'roofline:cpu'}}"
    configs = [
        config_of("policy=wcpb", *LONG),
        config_of(slo, "scheduler.prefill_chunk_size=48", *LONG),
    ]
    session = session_of(*configs)
    fixed, sized = (run_on(session, tmp_path / str(at), run) for at, run in enumerate(session.runs))
    assert sized.tokens == fixed.tokens and sized.against(fixed).is_identical
    assert sized.summary["output_token_sha256"] == fixed.summary["output_token_sha256"]
    assert any("believes a roofline" in note for note in sized.summary["notes"])
    check_log(sized.text("batches.csv"), sized.text("requests.csv"), rules_of(session, session.runs[1]))
    assert replay(sized.path).difference is None


def test_a_card_without_a_fitted_model_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    session = session_of(config_of("policy={name: slo, ttft_ms: 50, itl_ms: 5}"))
    with pytest.raises(InputError, match=r"not fitted on this card, cpu: .*executor profile"):
        run_on(session, tmp_path / "run")
