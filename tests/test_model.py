"""The fast path on a CPU against the float64 oracle, its bits under regrouping, and sampling."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor.environment import CUBLAS_ENVIRONMENT, prepare_environment, resolve_device  # noqa: E402
from executor.kernels.attention import Workspace  # noqa: E402
from executor.kernels.gate import GateRule  # noqa: E402
from executor.kernels.kv import KVPools  # noqa: E402
from executor.kernels.lang import HAS_TRITON  # noqa: E402
from executor.kernels.meta import BatchMeta, HostMeta, MetaLayout  # noqa: E402
from executor.kernels.ops import Ops, torch_ops, triton_ops  # noqa: E402
from executor.kernels.worklist import Packer  # noqa: E402
from executor.model.config import resolve_model  # noqa: E402
from executor.model.forward import LoopedModel, Scratch, lm_head, load_rows, recurrent, store_rows  # noqa: E402
from executor.model.reference import dense_forward  # noqa: E402
from executor.model.sampling import SamplingRows, greedy, row_seed, sample  # noqa: E402
from executor.model.weights import named_tensors, random_weights, weight_bytes  # noqa: E402
from policies.core.errors import InputError  # noqa: E402
from policies.core.models.shape import OURO_TINY, ModelShape  # noqa: E402

CPU = torch.device("cpu")
BLOCK_SIZE = 16
torch.set_num_threads(1)


@dataclass(frozen=True)
class Step:
    """One range: a request's tokens [start, start + count) at one depth; depth 0 embeds."""

    ring: int
    depth: int
    start: int
    count: int


class Driver:
    """The smallest thing that can run ranges: hidden rows of every token are kept, nothing is scheduled."""

    def __init__(self, shape: ModelShape, prompts: list[torch.Tensor], ops: Ops, max_rows: int = 256) -> None:
        self.shape, self.prompts, self.max_rows = shape, prompts, max_rows
        self.weights = random_weights(shape, 11, torch.float32, CPU)
        self.tokens_per_ring = max(len(prompt) for prompt in prompts)
        columns = -(-self.tokens_per_ring // BLOCK_SIZE)
        self.model = LoopedModel.assemble(shape, self.weights, ops, self.tokens_per_ring)
        planes, rings = shape.num_loops, len(prompts)
        self.kv = KVPools.allocate(
            shape, rings * columns * planes, BLOCK_SIZE, planes, rings, columns, torch.float32, CPU
        )
        self.kv.k.fill_(float("nan"))
        self.kv.v.fill_(float("nan"))
        groups = (
            np.random.default_rng(3).permutation(rings * columns).reshape(rings, columns).astype(np.int32)
        )
        self.kv.groups.copy_(torch.from_numpy(groups))
        self.packer = Packer(
            groups, planes, BLOCK_SIZE, shape.num_heads, ops.attention_slots, ops.tile_classes
        )
        layout = MetaLayout.for_rows(max_rows)
        self.host, self.meta = HostMeta.allocate(layout, pin=False), BatchMeta.allocate(layout, CPU)
        self.scratch = Scratch.allocate(shape, max_rows, torch.float32, CPU)
        self.pool = torch.full((rings * self.tokens_per_ring, shape.hidden_size), float("nan"))
        self.hidden = torch.full(
            (shape.num_loops, rings, self.tokens_per_ring, shape.hidden_size), float("nan")
        )
        self.sampled = torch.zeros(rings, dtype=torch.int32)

    def run(self, steps: list[Step], loop_count: int = 1, bucket: int | None = None) -> None:
        """One submission: every step's range at its depth, then the following depths."""
        segments = []
        for step in steps:
            pool_row = step.ring * self.tokens_per_ring + step.start
            segments.append(
                (step.ring, step.depth, step.start, step.count, -1 if step.depth == 0 else pool_row, pool_row)
            )
        packed = self.packer.pack(self.host, np.array(segments))
        tokens = [
            self.prompts[step.ring][step.start : step.start + step.count]
            if step.depth == 0
            else torch.full((step.count,), -1)
            for step in steps
        ]
        self.host.token_ids[: packed.num_rows] = torch.cat(tokens).numpy()
        self.meta.update(self.host, packed.num_words)
        scratch = self.scratch.rows(bucket or packed.num_rows)
        load_rows(self.model, self.meta, self.pool, self.sampled, scratch)
        for loop in range(loop_count):
            recurrent(self.model, self.kv, self.meta, packed.tile_rows, scratch, loop)
            row = 0
            for step in steps:
                rows = scratch.hidden[row : row + step.count]
                self.hidden[step.depth + loop, step.ring, step.start : step.start + step.count] = rows
                row += step.count
        store_rows(self.model, self.meta, scratch, self.pool)

    def logits(self, ring: int) -> torch.Tensor:
        hidden = self.hidden[-1, ring, : len(self.prompts[ring])].contiguous()
        out = torch.empty(len(hidden), self.shape.vocab_size)
        lm_head(self.model, hidden, out)
        return out


def make_prompt(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(0, OURO_TINY.vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def wavefront(ring: int, tokens: int, chunk: int, loops: int) -> list[list[Step]]:
    """Invocations of one request: chunk c runs depth d in invocation c + d."""
    starts = range(0, tokens, chunk)
    invocations: list[list[Step]] = [[] for _ in range(len(starts) + loops - 1)]
    for c, start in enumerate(starts):
        for depth in range(loops):
            invocations[c + depth].insert(0, Step(ring, depth, start, min(chunk, tokens - start)))
    return invocations


@pytest.mark.parametrize("tokens", [1, 63, 131])
def test_hidden_states_gates_and_logits_equal_float64_at_every_depth(tokens: int) -> None:
    driver = Driver(OURO_TINY, [make_prompt(tokens, tokens)], torch_ops())
    for depth in range(4):
        driver.run([Step(0, depth, 0, tokens)])
    want = dense_forward(OURO_TINY, dict(named_tensors(OURO_TINY, driver.weights)), driver.prompts[0])
    survival, left, decisions = torch.zeros(tokens), torch.zeros(tokens).int(), torch.zeros(tokens).int()
    gates = 4 * torch.arange(tokens, dtype=torch.int32)
    weights = driver.model.weights
    for depth in range(4):
        assert relative_error(driver.hidden[depth, 0], want.hidden[depth]) < 1e-5
        hidden, rule = driver.hidden[depth, 0], GateRule(0.5, 1, 4, 4)
        torch_ops().gate(
            hidden, weights.gate_weight, weights.gate_bias, gates + depth, survival, left, decisions, 0, rule
        )
        leaving = 1 - (1 - want.gate[: depth + 1]).prod(0)
        assert relative_error(1 - survival, leaving) < 1e-5
        assert decisions.tolist() == ((leaving >= 0.5) & (depth < 3)).int().tolist()
    assert relative_error(driver.logits(0), want.logits) < 1e-5


def test_grouped_query_heads_equal_float64() -> None:
    shape = replace(OURO_TINY, num_kv_heads=2, num_loops=2)
    driver = Driver(shape, [make_prompt(41, 5)], torch_ops())
    driver.run([Step(0, 0, 0, 41)], loop_count=2)
    want = dense_forward(shape, dict(named_tensors(shape, driver.weights)), driver.prompts[0])
    assert relative_error(driver.logits(0), want.logits) < 1e-5


def test_no_bit_depends_on_chunks_depth_order_decode_rows_neighbours_or_padding() -> None:
    prompts = [make_prompt(131, 1), make_prompt(77, 2)]
    whole = Driver(OURO_TINY, prompts, torch_ops())
    for ring in range(2):
        for depth in range(4):
            whole.run([Step(ring, depth, 0, len(prompts[ring]))])

    atomic = Driver(OURO_TINY, prompts, torch_ops())
    for ring in range(2):
        for start in range(0, len(prompts[ring]), 32):
            count = min(32, len(prompts[ring]) - start)
            atomic.run([Step(ring, 0, start, count)], loop_count=4)

    mixed = Driver(OURO_TINY, prompts, torch_ops())
    first, second = wavefront(0, 131, 16, 4), wavefront(1, 60, 16, 4)
    for invocation in range(len(first)):
        neighbours = second[invocation] if invocation < len(second) else []
        mixed.run(neighbours + first[invocation], bucket=160)
    for position in range(60, 77):  # the rest of request 1 as decode rows, one token at a time
        for depth in range(4):
            mixed.run([Step(1, depth, position, 1)])

    for other in (atomic, mixed):
        for ring in range(2):
            tokens = len(prompts[ring])
            assert torch.equal(other.hidden[:, ring, :tokens], whole.hidden[:, ring, :tokens])
            assert torch.equal(other.logits(ring), whole.logits(ring))
        for pool, expected in ((other.kv.k, whole.kv.k), (other.kv.v, whole.kv.v)):
            assert torch.equal(pool.view(torch.int32), expected.view(torch.int32))


@pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter, on a CPU"
)
def test_a_whole_loop_of_kernels_equals_the_twins() -> None:
    prompt = make_prompt(21, 9)
    kernels = triton_ops(Workspace.allocate(OURO_TINY, 1024, CPU), 2, torch.float32)
    drivers = [Driver(OURO_TINY, [prompt], ops) for ops in (kernels, torch_ops())]
    for driver in drivers:
        driver.run([Step(0, 0, 0, 20)], loop_count=2, bucket=24)
        driver.run([Step(0, 0, 20, 1)], loop_count=2)
    got, want = (driver.hidden[:2, 0] for driver in drivers)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_weights_are_seeded_by_name_and_keep_states_of_unit_size() -> None:
    first = dict(named_tensors(OURO_TINY, random_weights(OURO_TINY, 3, torch.float32, CPU)))
    again = dict(named_tensors(OURO_TINY, random_weights(OURO_TINY, 3, torch.float32, CPU)))
    deeper_shape = replace(OURO_TINY, num_layers=3)
    deeper = dict(named_tensors(deeper_shape, random_weights(deeper_shape, 3, torch.float32, CPU)))
    other = dict(named_tensors(OURO_TINY, random_weights(OURO_TINY, 4, torch.float32, CPU)))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, deeper[name])
        assert not torch.equal(tensor, other[name])
    assert weight_bytes(OURO_TINY, torch.float32) == 4 * sum(tensor.numel() for tensor in first.values())


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    out = torch.empty(2, dtype=torch.int32)
    greedy(logits, out)
    assert out.tolist() == [1, 0]


def sampling_rows(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
) -> SamplingRows:
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.tensor([row_seed(seed, 1, position) for position in range(count)]),
    )


def draw(logits: torch.Tensor, rows: SamplingRows) -> list[int]:
    out = torch.empty(len(logits), dtype=torch.int32)
    sample(logits, rows, out)
    return out.tolist()


def test_sampling_follows_the_distribution_and_its_cuts() -> None:
    probability = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = probability.log().expand(20000, 4)
    counts = np.bincount(draw(logits, sampling_rows(20000)), minlength=4) / 20000
    assert np.abs(counts - probability.numpy()).max() < 0.015
    assert set(draw(logits[:2000], sampling_rows(2000, top_k=2))) == {0, 1}
    assert set(draw(logits[:2000], sampling_rows(2000, top_p=0.8))) == {0, 1, 2}
    assert set(draw(logits[:200], sampling_rows(200, top_p=0.3))) == {0}
    assert set(draw(logits[:200], sampling_rows(200, temperature=0.0))) == {0}
    assert set(draw(logits[:200], sampling_rows(200, temperature=0.01))) == {0}


def test_a_sampled_token_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))
    rows = sampling_rows(9, temperature=0.9, top_k=50, top_p=0.9)
    together = draw(logits, rows)
    assert len(set(together)) > 3
    for i in reversed(range(9)):
        alone = SamplingRows(
            rows.temperature[i : i + 1], rows.top_k[i : i + 1], rows.top_p[i : i + 1], rows.seeds[i : i + 1]
        )
        assert draw(logits[i : i + 1], alone) == together[i : i + 1]
    assert (
        len(
            {
                row_seed(seed, request, position)
                for seed in range(5)
                for request in range(5)
                for position in range(5)
            }
        )
        == 125
    )


def test_the_environment_is_set_and_a_replaced_value_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_initialized():
        pytest.skip("CUDA has started in this process")
    for key in CUBLAS_ENVIRONMENT:
        monkeypatch.delenv(key, raising=False)
    assert prepare_environment() == ()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    (sentence,) = prepare_environment()
    assert "CUBLAS_WORKSPACE_CONFIG was :4096:8 and is now :0:0" in sentence
    assert prepare_environment() == ()


def test_an_unknown_or_absent_device_is_one_sentence() -> None:
    assert resolve_device("cpu") == CPU
    with pytest.raises(InputError, match="expected one of cuda, cpu, found 'tpu'"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="needs a CUDA GPU"):
            resolve_device("cuda")


def test_a_model_name_resolves_and_an_unknown_one_is_refused() -> None:
    assert resolve_model("ouro-tiny").shape is OURO_TINY
    with pytest.raises(InputError, match="found 'ouro-9b', which is none"):
        resolve_model("ouro-9b")
