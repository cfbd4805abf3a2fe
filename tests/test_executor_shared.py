"""SHARED K/V on a CPU: against an independent dense float64 model of its semantics, and bit for bit over
neighbours."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import Done, config_of, rules_of, run_on, session_of  # noqa: E402
from log_checker import check_log, parse_batches  # noqa: E402

from executor.model.weights import named_tensors  # noqa: E402
from executor.prompts import prompt_ids  # noqa: E402
from executor.session import Session  # noqa: E402
from policies.core.errors import InputError  # noqa: E402
from policies.core.models.shape import ModelShape  # noqa: E402
from sim.replay import replay  # noqa: E402

SHARED = (
    "policy=atomic", "cache.layout=shared", "scheduler.prefill_chunk_size=1", "workload.num_requests=5",
    "workload.prompt_tokens=[37, 70, 23, 5, 1]", "workload.output_tokens=[6, 2, 8]",
)  # fmt: skip
EXITS = {
    "fixed": (),
    "trace": ("exit.mode=trace", "workload.exit_loops=[1, 4, 2, 3, 1]"),
    "gate": ("exit={mode: gate, threshold: 0.9}",),
}
COMPANY = [(1, 1, 96), (5, 1, 96), (3, 2, 96), (5, 4, 96), (4, 2, 3)]


def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """x [heads, head_dim] turned by angle [head_dim / 2], split halves."""
    low, high = x.chunk(2, 1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), 1)


def dense_shared(
    shape: ModelShape, tensors: Mapping[str, torch.Tensor], token_ids: list[int], loops_of: Mapping[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [tokens, hidden] after each token's last loop, K and V [layers, tokens, kv_heads, head_dim] as
    they are left).

    One position after the other, each through all of its loops; position p runs `loops_of[p]`, all where it
    is not named. A query reads what earlier tokens left in the one plane, and its own K/V of the present
    loop.
    """

    def get(name: str) -> torch.Tensor:
        return tensors[name].double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return get(name) * x / (x.square().mean() + shape.rms_norm_eps).sqrt()

    heads, kv_heads, size, half = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    keys = torch.zeros(shape.num_layers, len(token_ids), kv_heads, size, dtype=torch.float64)
    values = torch.zeros_like(keys)
    states = []
    for position, token in enumerate(token_ids):
        angle = position * frequency
        hidden = get("model.embed_tokens.weight")[token]
        for _ in range(loops_of.get(position, shape.num_loops)):
            for layer in range(shape.num_layers):
                at = f"model.layers.{layer}."
                x = norm(hidden, at + "input_layernorm.weight")
                query = rotate((get(at + "self_attn.q_proj.weight") @ x).reshape(heads, size), angle)
                keys[layer, position] = rotate(
                    (get(at + "self_attn.k_proj.weight") @ x).reshape(kv_heads, size), angle
                )
                values[layer, position] = (get(at + "self_attn.v_proj.weight") @ x).reshape(kv_heads, size)
                seen = slice(0, position + 1)
                k = keys[layer, seen].repeat_interleave(heads // kv_heads, 1)
                v = values[layer, seen].repeat_interleave(heads // kv_heads, 1)
                weight = (torch.einsum("hd,thd->ht", query, k) / size**0.5).softmax(1)
                branch = get(at + "self_attn.o_proj.weight") @ torch.einsum("ht,thd->hd", weight, v).reshape(
                    -1
                )
                hidden = hidden + norm(branch, at + "input_layernorm_2.weight")
                x = norm(hidden, at + "post_attention_layernorm.weight")
                gate = get(at + "mlp.gate_proj.weight") @ x
                branch = get(at + "mlp.down_proj.weight") @ (
                    gate * gate.sigmoid() * (get(at + "mlp.up_proj.weight") @ x)
                )
                hidden = hidden + norm(branch, at + "post_attention_layernorm_2.weight")
            hidden = norm(hidden, "model.norm.weight")
        states.append(hidden)
    return torch.stack(states), keys, values


def loops_run(done: Done, request_id: int, num_loops: int) -> dict[int, int]:
    """Loops of every decoded position, by the depth that its CODA row names."""
    return {
        item.start: item.depth or num_loops
        for batch in parse_batches(done.text("batches.csv"))
        for item in batch.ranges
        if item.stage == "CODA" and item.request_id == request_id
    }


def groups_of(done: Done) -> dict[int, tuple[int, ...]]:
    return {
        key: groups
        for batch in parse_batches(done.text("batches.csv"))
        for key, groups in batch.allocated.items()
    }


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """float32 rounding feeds back: what a token leaves, later ones read at every depth. LAST_EXITED planes
    would be off by 1."""
    return float((actual.double() - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("exits", EXITS)
def test_tokens_and_kv_equal_a_dense_float64_model_of_the_semantics(exits: str, tmp_path: Path) -> None:
    session = session_of(config_of(*SHARED, *EXITS[exits], "scheduler.max_num_seqs=5"))
    done = run_on(session, tmp_path / "run")
    shape, kv = session.shape, session.pools.kv
    assert kv.planes == 1
    tensors = dict(named_tensors(shape, session.model.weights))
    for request in session.runs[0].workload.requests:
        key, prompt_tokens = request.request_id, request.prompt_tokens
        prompt = prompt_ids(0, request, shape.vocab_size).tolist()
        made = done.tokens[key]
        hidden, keys, values = dense_shared(
            shape, tensors, prompt + made[:-1], loops_run(done, key, shape.num_loops)
        )
        logits = hidden[prompt_tokens - 1 :] @ tensors["lm_head.weight"].double().T
        assert logits.argmax(1).tolist() == made
        positions = torch.arange(len(prompt) + len(made) - 1)
        blocks = torch.tensor(groups_of(done)[key])[positions // kv.block_size]
        assert close(kv.k[:, blocks, :, positions % kv.block_size].transpose(0, 1), keys)
        assert close(kv.v[:, blocks, :, positions % kv.block_size].transpose(0, 1), values)


@pytest.mark.parametrize("exits", EXITS)
def test_no_bit_depends_on_neighbours_budget_or_batches_in_flight(exits: str, tmp_path: Path) -> None:
    cells = [
        (
            f"scheduler.max_num_seqs={seqs}",
            f"scheduler.inflight={inflight}",
            f"scheduler.max_num_batched_tokens={budget}",
        )
        for seqs, inflight, budget in COMPANY
    ]
    session = session_of(*(config_of(*SHARED, *EXITS[exits], *cell) for cell in cells))
    first, *others = (run_on(session, tmp_path / str(at), planned) for at, planned in enumerate(session.runs))
    for done, planned in zip((first, *others), session.runs, strict=True):
        assert done.against(first).is_identical
        assert done.summary["tokens_by_loops"] == first.summary["tokens_by_loops"]
        settings = planned.config.exit
        limits = (
            {} if exits == "fixed" else {"min_loops": settings.min_loops, "max_loops": settings.max_loops}
        )
        check_log(done.text("batches.csv"), done.text("requests.csv"), rules_of(session, planned, **limits))
        assert replay(done.path).difference is None


def test_layouts_cannot_share_a_loaded_model() -> None:
    with pytest.raises(
        InputError, match=r"cache.layout: shared and last_exited, expected one for all runs on a loaded model"
    ):
        Session([config_of(*SHARED), config_of("policy=atomic")], "cpu")


def test_a_prompt_of_one_plane_differs_from_one_of_many(tmp_path: Path) -> None:
    shared = run_on(session_of(config_of(*SHARED)), tmp_path / "shared")
    planes = run_on(session_of(config_of(*SHARED, "cache.layout=last_exited")), tmp_path / "planes")
    assert shared.tokens != planes.tokens
    assert len(list(csv.reader(io.StringIO(shared.text("requests.csv"))))) == 6
