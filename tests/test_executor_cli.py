"""`python -m executor` as a user meets it: wrong input is one line and status 2, a failed run one line and
status 1, Ctrl-C 130."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
save_file = pytest.importorskip("safetensors.torch", reason="needs safetensors to write test files").save_file

from executor import environment  # noqa: E402
from executor.cli import main  # noqa: E402
from executor.model.weights import named_tensors, random_weights  # noqa: E402
from executor.programs import Programs  # noqa: E402
from policies.core.models.shape import OURO_TINY  # noqa: E402
from results.cli import main as results_main  # noqa: E402
from sim.cli import main as sim_main  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
TINY = {
    "model_type": "ouro", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
    "total_ut_steps": 4, "max_position_embeddings": 65536, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
RUN = """
model: {model}
policy: wcpb
scheduler: {{max_num_seqs: 4, max_num_batched_tokens: 64, prefill_chunk_size: 16}}
workload: {{kind: synthetic, num_requests: 3, prompt_tokens: [20, 5, 33], output_tokens: [3, 2]}}
"""
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(model: str = "ouro-tiny") -> Path:
    path = Path("run.yaml")
    path.write_text(RUN.format(model=model))
    return path


def run(*arguments: str, model: str = "ouro-tiny", device: str = "cpu") -> int:
    """The status of `executor run` with its output in `out`."""
    return main(["run", str(write_run(model)), "--device", device, "--no-plots", "--out", "out", *arguments])


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/summary.json").read_text())
    return found


def refused(status: int, capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """Status 2, one line on stderr that has all `parts`, nothing on stdout, no run directory."""
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith("executor: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    for part in parts:
        assert part in captured.err
    assert not Path("out").exists()


def tiny_tensors() -> dict[str, torch.Tensor]:
    weights = random_weights(OURO_TINY, 0, torch.float32, torch.device("cpu"))
    return {name: tensor.clone() for name, tensor in named_tensors(OURO_TINY, weights)}


def checkpoint(tensors: dict[str, torch.Tensor] | None = None, shards: int = 1, **changes: object) -> Path:
    """A checkpoint folder `ckpt` of the weights that ouro-tiny has by seed 0."""
    folder = Path("ckpt")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    tensors = tiny_tensors() if tensors is None else tensors
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {
        name: f"model-{1 + at % shards:05d}-of-{shards:05d}.safetensors" for at, name in enumerate(tensors)
    }
    for file_name in sorted(set(weight_map.values())):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file_name}, folder / file_name
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_gives_the_tokens_of_the_same_weights_drawn_from_the_seed(shards: int) -> None:
    assert run() == 0
    expected = summary()
    checkpoint(shards=shards)
    for model in ("ckpt", "./ckpt", str(Path("ckpt").absolute())):
        assert run(model=model) == 0
        assert summary()["output_token_sha256"] == expected["output_token_sha256"]
        assert summary()["weights"].endswith("ckpt")
    assert expected["weights"] == "random, seed 0"


@pytest.mark.parametrize("model", ["ckpt", "ckpt/config.json"])
def test_a_run_is_replayed_predicted_and_compared_after_its_model_has_moved(model: str) -> None:
    checkpoint(num_hidden_layers=2)
    assert run(model=model) == 0
    Path("ckpt").rename("elsewhere")
    assert sim_main(["replay", "out"]) == 0
    assert sim_main(["predict", "out", "--device", "h200", "--out", "predicted", "--jobs", "1"]) == 0
    (cell,) = Path("predicted/cells").iterdir()
    (verdict,) = json.loads((cell / "replay.json").read_text())
    assert verdict["difference"] is None and verdict["num_batches"] > 0
    assert results_main(["compare", "predicted", "out", "--out", "compared"]) in (0, 1)


def test_other_weights_give_other_tokens() -> None:
    assert run() == 0
    expected = summary()["output_token_sha256"]
    checkpoint(tiny_tensors() | {"lm_head.weight": tiny_tensors()["model.embed_tokens.weight"].flip(0)})
    assert run(model="ckpt") == 0
    assert summary()["output_token_sha256"] != expected


def test_only_a_config_by_its_name_runs_random_weights_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint()
    Path("ckpt/model.safetensors").unlink()
    assert run(model="ckpt/config.json") == 0
    assert summary()["weights"] == "random, seed 0"
    capsys.readouterr()
    assert run(model="ckpt") == 2
    assert "holds no *.safetensors" in capsys.readouterr().err


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def garble(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:40] = b"\xff" * 20
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (
            truncate,
            (
                "model.safetensors: truncated, corrupt or no safetensors file (",
                "not fully covered",
            ),
        ),
        (
            garble,
            (
                "model.safetensors: truncated, corrupt or no safetensors file (",
                "invalid",
            ),
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b""),
            ("header too small",),
        ),
        (
            lambda folder: checkpoint({name: t for name, t in tiny_tensors().items() if name != Q}),
            (f"tensor {Q} is missing",),
        ),
        (
            lambda folder: checkpoint(tiny_tensors() | {Q: torch.zeros(64, 64).half()}),
            (f"tensor {Q} has dtype F16, expected F32",),
        ),
        (
            lambda folder: checkpoint(tiny_tensors() | {Q: torch.zeros(64, 32)}),
            (f"tensor {Q} has shape [64, 32], expected [64, 64]",),
        ),
        (
            lambda folder: checkpoint(tiny_tensors() | {"extra.weight": torch.zeros(1)}),
            ("unexpected tensor extra.weight",),
        ),
        (lambda folder: checkpoint(torch_dtype="bfloat16"), ("has dtype F32, expected BF16",)),
        (
            lambda folder: checkpoint(rope_scaling={"type": "linear"}),
            ("config.json: rope_scaling is", "expected null"),
        ),
        (lambda folder: checkpoint(use_sliding_window=True), ("config.json: use_sliding_window is true",)),
        (lambda folder: checkpoint(tie_word_embeddings=True), ("config.json: tie_word_embeddings is true",)),
        (lambda folder: checkpoint(model_type="llama"), ('config.json: model_type is "llama"',)),
        (lambda folder: (folder / "config.json").unlink(), ("ckpt/config.json: no such file",)),
    ],
)
def test_a_bad_checkpoint_is_one_line(
    break_it: Callable[[Path], object], parts: tuple[str, ...], capsys: Any
) -> None:
    break_it(checkpoint())
    refused(run(model="./ckpt"), capsys, *parts)


def test_a_missing_shard_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint(shards=2) / "model-00002-of-00002.safetensors").unlink()
    refused(run(model="./ckpt"), capsys, "model-00002-of-00002.safetensors: no such file")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("--set", "workload.prompt_tokens=70000"),
            ("run.yaml: none of 3 requests can run", "70000", "65536"),
        ),
        (
            ("--set", "workload.max_context=8", "--set", "workload.prompt_tokens=20"),
            ("none of 3 requests can run", "context holds 8"),
        ),
        (
            ("--set", "cache.num_blocks=4", "--set", "workload.prompt_tokens=20"),
            ("none of 3 requests can run", "8 KV blocks", "has 4"),
        ),
        (
            ("--set", "cache.num_blocks=2"),
            ("cache.num_blocks: 2 is less than one block in each of the 4 depth planes",),
        ),
        (("--device", "tpu"), ("--device: expected one of cuda, cpu, found 'tpu'",)),
        (("--set", "model=ouro-9b"), ("model: expected one of ouro-1.4b", "ouro-9b")),
        (("--set", "policy=fifo"), ("policy.name: unknown policy 'fifo'",)),
        (("--set", "scheduler.max_num_seqs=0"), ("scheduler.max_num_seqs: 0, expected at least 1",)),
        (("--set", "cache.layout=shared"), ("policy wcpb cannot run with cache.layout shared",)),
        (
            ("--set", "model=huginn-like"),
            ("model: huginn-like is a shape for simulations, the executor runs Ouro",),
        ),
        (
            ("--set", "policy=atomic", "--set", "cache.layout=shared"),
            ("shared runs a prompt token", "prefill_chunk_size 1, found"),
        ),
        (("--set", "exit={mode: gate, min_loops: 9}"), ("exit: min_loops 9 and max_loops 4",)),
        (("--set", "exit.mode=trace"), ("exit.mode: trace needs the loops of every token",)),
        (("--set", f"model=/folder/{'a' * 300}"), ("model: expected one of ouro-1.4b",)),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_directory(
    arguments: tuple[str, ...], parts: tuple[str, ...], capsys: Any
) -> None:
    refused(run(*arguments), capsys, *parts)


def test_a_hub_id_is_no_path_beside_the_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.model.config.find_spec", lambda name: None)
    refused(
        run(model="ByteDance/Ouro-1.4B"),
        capsys,
        "'ByteDance/Ouro-1.4B' is no local path, and a hub id needs the package",
    )


def test_cuda_without_a_card_says_what_was_found_and_what_to_do(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(
        run(device="cuda"),
        capsys,
        "--device cuda: needs a CUDA GPU",
        f"torch {torch.__version__}",
        "use --device cpu",
    )


def test_cuda_without_triton_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    refused(run(device="cuda"), capsys, "needs the Python package triton", "pip install triton")


def test_without_torch_every_command_says_what_to_install(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(run(), capsys, "the executor needs torch, which is not installed", "pip install '.[gpu]'")
    assert main(["bench"]) == 2


def test_a_directory_that_is_not_a_run_is_not_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("precious")
    assert run() == 2
    assert "holds files and is not a run directory" in capsys.readouterr().err
    assert [item.name for item in Path("out").iterdir()] == ["thesis.tex"]


def test_a_kernel_that_raises_ends_the_run_with_one_line_and_status_1(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Programs.run, []

    def broken(self: Programs, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 12:
            raise RuntimeError("CUDA error: misaligned address\nlong explanation")
        real(self, *arguments)

    monkeypatch.setattr(Programs, "run", broken)
    assert run() == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("executor: the run failed after ")
    assert captured.err.endswith(
        "what had finished is in out, marked failed: RuntimeError: CUDA error: misaligned address\n"
    )
    assert summary()["status"] == "failed"


def test_an_error_before_the_first_batch_leaves_no_summary(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(Programs, "warm_up", broken)
    assert run() == 1
    assert capsys.readouterr().err == "executor: RuntimeError: no kernel image is available\n"
    assert not Path("out/summary.json").exists()


def test_diagnose_and_preserve_find_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "diagnose",
                str(write_run()),
                "--device",
                "cpu",
                "--against",
                "atomic",
                "--out",
                "pair",
                "--audit",
            ]
        )
        == 0
    )
    assert "output tokens equal" in capsys.readouterr().out
    base = "\n".join(f"  {line}" for line in RUN.format(model="ouro-tiny").strip().splitlines())
    Path("sweep.yaml").write_text(
        f"base:\n{base}\ngrid:\n  policy.name: [atomic, split]\n  scheduler.prefill_chunk_size: [16, null]\n"
    )
    assert main(["preserve", "sweep.yaml", "--device", "cpu", "--out", "cells", "--audit"]) == 0
    assert capsys.readouterr().out.count("│ 3 ") == 4
    assert main(["sweep", "sweep.yaml", "--device", "cpu", "--out", "cells-2"]) == 0
    assert main(["sweep", "sweep.yaml", "--device", "cpu", "--out", "cells-2"]) == 0
    assert "4 of 4 cells are finished already" in capsys.readouterr().err


def process(*arguments: str, prelude: str = "pass") -> subprocess.Popen[str]:
    code = f"import sys; {prelude}; from executor.cli import main; sys.exit(main(sys.argv[1:]))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def test_ctrl_c_leaves_a_run_marked_interrupted_and_status_130() -> None:
    arrival = "workload.arrival={process: constant, rate: 20}"
    more = ("--set", arrival, "--set", "workload.num_requests=10000")
    child = process("run", str(write_run()), "--device", "cpu", "--out", "out", *more)
    deadline = time.monotonic() + 60
    while not Path("out/config.yaml").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted: writing what was run until now" in errors
    found = summary()
    assert found["status"] == "interrupted"
    assert 1 <= found["num_finished"] < 10_000
    assert len(Path("out/tokens.csv").read_text().splitlines()) >= found["num_finished"]


def test_a_cpu_needs_no_triton() -> None:
    child = process(
        "run",
        str(write_run()),
        "--device",
        "cpu",
        "--no-plots",
        "--out",
        "out",
        prelude="sys.modules['triton'] = None",
    )
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert summary()["status"] == "complete"


def test_a_small_model_runs_in_one_thread_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "CPU threads: {}; OMP_NUM_THREADS sets another number"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    try:
        assert run() == 0
        assert note.format(1) in summary()["notes"] and note.format(1) in capsys.readouterr().err
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        torch.set_num_threads(2)
        assert run() == 0
        assert note.format(2) in summary()["notes"]
    finally:
        torch.set_num_threads(1)
