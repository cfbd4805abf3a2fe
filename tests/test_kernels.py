"""Every Triton kernel equals its torch twin, and attention's bits do not depend on how its work is divided or
packed.

On a machine without a GPU the kernels run in Triton's interpreter in float32 (which computes bfloat16
wrongly), with products of `products.in_order`; with one they are compiled and bfloat16 is tested too.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

from products import order_interpreted_products  # noqa: E402

from executor.kernels.attention import AttentionLauncher, Workspace, attention_torch  # noqa: E402
from executor.kernels.drop_left import drop_left_torch, drop_left_triton  # noqa: E402
from executor.kernels.embed_rows import embed_rows_torch, embed_rows_triton  # noqa: E402
from executor.kernels.exit_copy import exit_copy_torch, exit_copy_triton  # noqa: E402
from executor.kernels.gate import GateRule, gate_torch, gate_triton  # noqa: E402
from executor.kernels.gather_rows import gather_rows_torch, gather_rows_triton  # noqa: E402
from executor.kernels.kv import KVPools, plane_slots  # noqa: E402
from executor.kernels.linear import linear_torch  # noqa: E402
from executor.kernels.meta import BatchMeta, HostMeta, MetaLayout  # noqa: E402
from executor.kernels.product import ProductConfig, rope_product_triton, swiglu_product_triton  # noqa: E402
from executor.kernels.residual_norms import residual_norms_torch, residual_norms_triton  # noqa: E402
from executor.kernels.rms_norm import rms_norm_torch, rms_norm_triton  # noqa: E402
from executor.kernels.rope_write import rope_table, rope_write_torch, rope_write_triton  # noqa: E402
from executor.kernels.scatter_rows import scatter_rows_torch, scatter_rows_triton  # noqa: E402
from executor.kernels.swiglu import swiglu_torch, swiglu_triton  # noqa: E402
from executor.kernels.worklist import Packer  # noqa: E402
from policies.core.models.shape import OURO_TINY  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
SHAPE = replace(OURO_TINY, num_layers=2, num_heads=4, num_kv_heads=2)
PLANES = 4
NAN = float("nan")

torch.set_num_threads(1)
if not HAS_GPU:
    order_interpreted_products()


def randn(*size: int, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def empty(*size: int, dtype=torch.float32):
    return torch.full(size, NAN, dtype=dtype, device=DEVICE)


def assert_close(actual, expected) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [63, 100, 1000])
def test_norms_swiglu_and_gate_equal_their_twins(size: int, dtype) -> None:
    x, h = randn(5, size, dtype=dtype), randn(5, size, dtype=dtype, seed=1)
    w_post, w_next = randn(size, dtype=dtype, seed=2), randn(size, dtype=dtype, seed=3)
    got, want = empty(5, size, dtype=dtype), empty(5, size, dtype=dtype)
    rms_norm_triton(x, w_post, 1e-6, got)
    rms_norm_torch(x, w_post, 1e-6, want)
    assert_close(got, want)

    pairs = []
    for function in (residual_norms_triton, residual_norms_torch):
        residual, y = h.clone(), empty(5, size, dtype=dtype)
        function(x, residual, w_post, w_next, 1e-6, residual, y)
        pairs.append((residual, y))
    assert_close(pairs[0][0], pairs[1][0])
    assert_close(pairs[0][1], pairs[1][1])

    gate_up = randn(3, 2 * size, dtype=dtype)
    got, want = empty(3, size, dtype=dtype), empty(3, size, dtype=dtype)
    swiglu_triton(gate_up, got)
    swiglu_torch(gate_up, want)
    assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [63, 100, 1000])
def test_the_gate_decides_like_its_twin_on_the_rows_that_it_is_told(size: int, dtype) -> None:
    rule = GateRule(0.6, 2, 4, 4)
    x, weight, bias = (
        randn(6, size, dtype=dtype),
        randn(1, size, dtype=dtype, seed=1) * 0.1,
        randn(1, dtype=dtype, seed=2),
    )
    gates = torch.tensor(
        [0 * 4 + 0, -1, 3 * 4 + 1, 1 * 4 + 2, 4 * 4 + 3, 2 * 4 + 1, 7], dtype=torch.int32, device=DEVICE
    )
    found = []
    for function in (gate_triton, gate_torch):
        survival, left = (
            torch.full((6,), 0.5, device=DEVICE),
            torch.full((6,), 9, dtype=torch.int32, device=DEVICE),
        )
        decisions = torch.full((7,), 5, dtype=torch.int32, device=DEVICE)
        function(x, weight, bias, gates, survival, left, decisions, 0, rule)
        found.append((survival, left, decisions))
    assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])
    survival, left, decisions = (item.tolist() for item in found[0])
    stay = (1 - torch.sigmoid((x.float() * weight.float()).sum(1) + bias.float())).tolist()
    assert survival == pytest.approx(
        [stay[0], 0.5 * stay[3], 0.5 * stay[5], 0.5 * stay[2], 0.5 * stay[4], 0.5], rel=1e-4
    )
    leaves = [0, *(int(1 - survival[ring] >= 0.6) for ring in (1, 2, 3)), 0]
    assert left == [*leaves, 9]
    assert decisions == [0, 0, leaves[3], leaves[1], 0, leaves[2], 5]


def test_rows_of_tokens_that_left_are_dropped_and_a_new_token_is_not() -> None:
    left = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    for function in (drop_left_triton, drop_left_torch):
        gates = torch.tensor(
            [0 * 4 + 1, 0 * 4 + 0, -1, 1 * 4 + 2, 2 * 4 + 3], dtype=torch.int32, device=DEVICE
        )
        slots, targets = (
            torch.arange(5, dtype=torch.int32, device=DEVICE),
            torch.arange(5, 10, dtype=torch.int32, device=DEVICE),
        )
        function(gates, left, slots, targets, 4)
        assert gates.tolist() == [-1, 0, -1, 6, -1]
        assert slots.tolist() == [-1, 1, 2, 3, -1]
        assert targets.tolist() == [-1, 6, 7, 8, -1]


@pytest.mark.parametrize("size", [1, 63, 100])
def test_rows_move_only_where_an_index_says_so(size: int) -> None:
    source, pool = randn(6, size), randn(9, size, seed=1)
    index = torch.tensor([3, -1, 0, 8, -1, 5, -1], dtype=torch.int32, device=DEVICE)
    results = []
    for gather, scatter in (
        (gather_rows_triton, scatter_rows_triton),
        (gather_rows_torch, scatter_rows_torch),
    ):
        out, target = empty(6, size), pool.clone()
        gather(pool, index, out)
        scatter(source, index, target)
        results.append((out, target))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert results[0][0][1].isnan().all()
    assert torch.equal(results[0][1][8], source[3])


def test_embedding_takes_known_tokens_then_sampled_ones_and_leaves_other_rows_alone() -> None:
    table = randn(20, 24)
    token_ids = torch.tensor([7, -1, -1, 19], dtype=torch.int32, device=DEVICE)
    sampled_rows = torch.tensor([-1, 2, -1, -1], dtype=torch.int32, device=DEVICE)
    sampled = torch.tensor([1, 2, 3], dtype=torch.int32, device=DEVICE)
    for function in (embed_rows_triton, embed_rows_torch):
        out = empty(4, 24)
        function(table, token_ids, sampled, sampled_rows, out)
        assert torch.equal(out[[0, 1, 3]], table[[7, 3, 19]])
        assert out[2].isnan().all()


class Cache:
    """Pools with scrambled, non-contiguous groups for `contexts` tokens per request; slots beyond them hold
    NaN."""

    def __init__(self, contexts: list[int], block_size: int, dtype=torch.float32, seed: int = 0) -> None:
        columns = max(-(-tokens // block_size) for tokens in contexts)
        num_groups = sum(-(-tokens // block_size) for tokens in contexts) + 3
        order = np.random.default_rng(seed).permutation(num_groups)
        self.host_groups = np.zeros((len(contexts), columns), dtype=np.int32)
        self.kv = KVPools.allocate(
            SHAPE, num_groups * PLANES, block_size, PLANES, len(contexts), columns, dtype, DEVICE
        )  # fmt: skip
        self.kv.k.fill_(NAN)
        self.kv.v.fill_(NAN)
        taken = 0
        for ring, tokens in enumerate(contexts):
            count = -(-tokens // block_size)
            self.host_groups[ring, :count] = order[taken : taken + count]
            taken += count
        self.kv.groups.copy_(torch.from_numpy(self.host_groups))
        self.block_size = block_size
        for ring, tokens in enumerate(contexts):
            for plane in range(PLANES):
                slots = plane_slots(
                    self.kv.groups[ring], torch.arange(tokens, device=DEVICE), plane, PLANES, block_size
                )
                size = (SHAPE.num_layers, tokens, SHAPE.num_kv_heads, SHAPE.head_dim)
                for pool, salt in ((self.kv.k, 0), (self.kv.v, 1)):
                    values = randn(*size, dtype=dtype, seed=1000 * ring + 10 * plane + salt)
                    for layer in range(SHAPE.num_layers):
                        pool[layer, slots // block_size, :, slots % block_size] = values[layer]

    def packer(self, slots: int, tile_classes=(16, 32, 64)) -> Packer:
        return Packer(self.host_groups, PLANES, self.block_size, SHAPE.num_heads, slots, tile_classes)


def pack(
    cache: Cache,
    segments: list[tuple[int, int, int, int]],
    max_rows: int,
    slots: int,
    tile_classes=(16, 32, 64),
):
    layout = MetaLayout.for_rows(max_rows)
    host, meta = HostMeta.allocate(layout, pin=False), BatchMeta.allocate(layout, DEVICE)
    columns = np.array([(*segment, -1, -1) for segment in segments], dtype=np.int64)
    packed = cache.packer(slots, tile_classes).pack(host, columns)
    meta.update(host, packed.num_words)
    return packed, meta


def queries(segments, dtype=torch.float32, padding: int = 0):
    """Merged qkv rows whose values follow from (ring, plane, position) alone; padding rows are NaN."""
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    rows = []
    for ring, plane, start, count in segments:
        rows += [randn(width, dtype=dtype, seed=hash((ring, plane, start + i)) % 2**31) for i in range(count)]
    return torch.stack(rows + [empty(width, dtype=dtype)] * padding)


def attend(
    cache: Cache,
    segments,
    *,
    slots: int,
    tile_classes=(16, 32, 64),
    layer: int = 1,
    padding: int = 0,
    num_sms: int = 2,
):
    dtype = cache.kv.k.dtype
    num_rows = sum(count for *_, count in segments)
    packed, meta = pack(cache, segments, num_rows + padding, slots, tile_classes)
    launcher = AttentionLauncher(Workspace.allocate(SHAPE, meta.layout.max_partials, DEVICE), num_sms)
    out = empty(num_rows + padding, SHAPE.num_heads * SHAPE.head_dim, dtype=dtype)
    launcher(queries(segments, dtype, padding), cache.kv, layer, meta, packed.tile_rows, 0, out)
    return packed, meta, out


CONTEXTS = [700, 63, 1000, 100]
MIXED = [(0, 2, 640, 37), (1, 0, 0, 63), (2, 3, 999, 1), (3, 1, 99, 1), (2, 0, 250, 16), (2, 1, 100, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 8])
def test_attention_equals_its_twin_for_mixed_segments(block_size: int, dtype) -> None:
    cache = Cache(CONTEXTS, block_size, dtype)
    packed, meta, got = attend(cache, MIXED, slots=64, padding=5)
    assert packed.tile_rows == 64
    assert int(meta.header[2]) > 0, "some tiles are split"
    want = empty(*got.shape, dtype=dtype)
    attention_torch(queries(MIXED, dtype, 5), cache.kv, 1, meta, packed.tile_rows, 0, want)
    assert not got[: packed.num_rows].isnan().any()
    assert got[packed.num_rows :].isnan().all()
    torch.testing.assert_close(
        got, want, rtol=TOLERANCE[dtype] * 10, atol=TOLERANCE[dtype] * 4, equal_nan=True
    )


def test_attention_twin_equals_dense_softmax() -> None:
    cache = Cache(CONTEXTS, 16)
    packed, meta = pack(cache, MIXED, 160, 1)
    q = queries(MIXED, padding=160 - packed.num_rows)
    got = empty(160, SHAPE.num_heads * SHAPE.head_dim)
    attention_torch(q, cache.kv, 0, meta, packed.tile_rows, 0, got)
    row = 0
    for ring, plane, start, count in MIXED:
        for position in range(start, start + count):
            slots = plane_slots(
                cache.kv.groups[ring], torch.arange(position + 1, device=DEVICE), plane, PLANES, 16
            )
            k, v = (pool[0, slots // 16, :, slots % 16].double() for pool in (cache.kv.k, cache.kv.v))
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            query = q[row, : SHAPE.num_heads * SHAPE.head_dim].view(SHAPE.num_heads, -1).double()
            weight = (torch.einsum("hd,khd->hk", query, k) * SHAPE.head_dim**-0.5).softmax(1)
            want = torch.einsum("hk,khd->hd", weight, v).reshape(-1)
            torch.testing.assert_close(got[row].double(), want, rtol=1e-5, atol=1e-5)
            row += 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_bits_do_not_depend_on_tiles_splits_neighbours_or_grid(dtype) -> None:
    cache = Cache(CONTEXTS, 16, dtype)
    _, meta, split = attend(cache, MIXED, slots=64)
    _, whole_meta, whole = attend(cache, MIXED, slots=1)
    assert int(meta.header[2]) > 0 and int(whole_meta.header[2]) == 0
    assert torch.equal(bits(split), bits(whole))
    for height in (16, 32):
        _, _, out = attend(cache, MIXED, slots=64, tile_classes=(height,))
        assert torch.equal(bits(split), bits(out))
    _, _, alone = attend(cache, [(2, 3, 999, 1)], slots=64, tile_classes=(64,), num_sms=3)
    assert torch.equal(bits(alone[0]), bits(split[100]))
    _, _, alone = attend(cache, [(0, 2, 650, 27), (0, 2, 640, 10)], slots=1, tile_classes=(64,))
    assert torch.equal(bits(alone[:27]), bits(split[10:37]))
    assert torch.equal(bits(alone[27:]), bits(split[:10]))


def test_depth_offset_reads_the_next_planes() -> None:
    cache = Cache(CONTEXTS, 16)
    segments = [(0, 1, 300, 7), (2, 0, 999, 1)]
    packed, meta = pack(cache, segments, 8, 8)
    shifted, shifted_meta = pack(cache, [(0, 3, 300, 7), (2, 2, 999, 1)], 8, 8)
    q = queries(segments)
    launcher = AttentionLauncher(Workspace.allocate(SHAPE, meta.layout.max_partials, DEVICE), 2)
    got, want, twin = (empty(8, SHAPE.num_heads * SHAPE.head_dim) for _ in range(3))
    launcher(q, cache.kv, 0, meta, packed.tile_rows, 2, got)
    launcher(q, cache.kv, 0, shifted_meta, shifted.tile_rows, 0, want)
    attention_torch(q, cache.kv, 0, meta, packed.tile_rows, 2, twin)
    assert torch.equal(got, want)
    torch.testing.assert_close(twin, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 8])
def test_rope_and_kv_write_equal_their_twin_and_padding_writes_nothing(block_size: int, dtype) -> None:
    caches = [Cache(CONTEXTS, block_size, dtype) for _ in range(2)]
    packed, meta = pack(caches[0], MIXED, 128, 1)
    rope = rope_table(SHAPE, 1024, DEVICE)
    rows = []
    for cache, function in zip(caches, (rope_write_triton, rope_write_torch), strict=True):
        before = cache.kv.k.isnan().sum()
        qkv = queries(MIXED, dtype, 128 - packed.num_rows)
        function(qkv, rope, meta.positions, meta.slots, cache.kv.k[1], cache.kv.v[1], 0)
        rows.append(qkv[: packed.num_rows])
        assert cache.kv.k.isnan().sum() == before
    assert_close(rows[0], rows[1])
    assert_close(caches[0].kv.k, caches[1].kv.k)
    assert torch.equal(bits(caches[0].kv.v), bits(caches[1].kv.v))
    slots = plane_slots(caches[0].kv.groups[2], torch.tensor([999], device=DEVICE), 3, PLANES, block_size)
    assert int(meta.slots[100]) == int(slots[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 21])
def test_fused_products_equal_the_product_and_its_separate_kernel(num_rows: int, dtype) -> None:
    """On a card the bits are equal too: that is `python -m executor.lab.tune bits`, at full size."""
    config = ProductConfig(block_m=16, block_n=16, block_k=64, num_warps=4, num_stages=3)
    x, gate_up = randn(num_rows, 128, dtype=dtype), randn(2 * 48, 128, dtype=dtype, seed=1) * 128**-0.5
    merged, want, got = (
        empty(num_rows, 96, dtype=dtype),
        empty(num_rows, 48, dtype=dtype),
        empty(num_rows + 1, 48, dtype=dtype),
    )
    torch.mm(x, gate_up.t(), out=merged)
    swiglu_triton(merged, want)
    swiglu_product_triton(x, gate_up, got[:num_rows], config)
    assert_close(got[:num_rows], want)
    assert got[num_rows:].isnan().all()

    head_dim, heads = SHAPE.head_dim, SHAPE.num_heads + 2 * SHAPE.num_kv_heads
    config = replace(config, block_n=head_dim // 2)
    weight = randn(heads * head_dim, 128, dtype=dtype, seed=2) * 128**-0.5
    caches = [Cache(CONTEXTS, 16, dtype) for _ in range(2)]
    _, meta = pack(caches[0], [(0, 2, 640, num_rows)], num_rows, 1)
    rope = rope_table(SHAPE, 1024, DEVICE)
    qkv = [empty(num_rows, heads * head_dim, dtype=dtype) for _ in range(2)]
    torch.mm(x, weight.t(), out=qkv[0])
    rope_write_triton(qkv[0], rope, meta.positions, meta.slots, caches[0].kv.k[1], caches[0].kv.v[1], 1)
    rope_product_triton(
        x, weight, rope, meta.positions, meta.slots, caches[1].kv.k[1], caches[1].kv.v[1], 1, qkv[1], config
    )
    q_size = SHAPE.num_heads * head_dim
    assert_close(qkv[1][:, :q_size], qkv[0][:, :q_size])
    assert_close(caches[1].kv.k, caches[0].kv.k)
    assert_close(caches[1].kv.v, caches[0].kv.v)


def test_exit_copy_fills_the_deeper_planes_only() -> None:
    caches = [Cache(CONTEXTS, 16) for _ in range(2)]
    untouched = caches[0].kv.k.clone()
    groups = caches[0].kv.groups
    slots = torch.stack(
        [plane_slots(groups[ring], torch.tensor(62, device=DEVICE), ring, PLANES, 16) for ring in range(4)]
    )
    slots = torch.cat((slots, torch.tensor([-1], device=DEVICE))).int()
    exit_copy_triton(caches[0].kv.k, caches[0].kv.v, slots, PLANES)
    exit_copy_torch(caches[1].kv.k, caches[1].kv.v, slots, PLANES)
    for got, want in ((caches[0].kv.k, caches[1].kv.k), (caches[0].kv.v, caches[1].kv.v)):
        assert torch.equal(bits(got), bits(want))
    slot = int(slots[1])
    for plane in (1, 2, 3):
        assert torch.equal(
            caches[0].kv.k[:, slot // 16 + plane - 1, :, slot % 16], untouched[:, slot // 16, :, slot % 16]
        )
    changed = (bits(caches[0].kv.k) != bits(untouched)).any(4).any(2).any(0).sum()  # blocks x offsets
    assert changed == 3 + 2 + 1


def test_twins_on_a_cpu_do_not_depend_on_row_grouping() -> None:
    x, weight = torch.randn(70, 64), torch.randn(176, 64)
    whole, act = torch.empty(70, 176), torch.empty(70, 88)
    linear_torch(x, weight, whole)
    swiglu_torch(whole, act)
    norm = torch.empty(70, 64)
    rms_norm_torch(x, weight[0], 1e-6, norm)
    gates = survival_of(x, weight)
    for start, end in [(0, 1), (1, 4), (5, 36), (17, 70), (69, 70)]:
        rows = end - start
        part, part_act, part_norm = torch.empty(rows, 176), torch.empty(rows, 88), torch.empty(rows, 64)
        linear_torch(x[start:end].clone(), weight, part)
        swiglu_torch(part, part_act)
        rms_norm_torch(x[start:end].clone(), weight[0], 1e-6, part_norm)
        assert torch.equal(part, whole[start:end])
        assert torch.equal(part_act, act[start:end])
        assert torch.equal(part_norm, norm[start:end])
        assert torch.equal(survival_of(x[start:end].clone(), weight), gates[start:end])


def survival_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the exit gate leaves of every row of `x` after its first loop."""
    rows = len(x)
    survival, numbers = torch.zeros(rows), torch.zeros(rows, dtype=torch.int32)
    gates = 4 * torch.arange(rows, dtype=torch.int32)
    gate_torch(
        x, weight[:1], weight[0, :1], gates, survival, numbers, numbers.clone(), 0, GateRule(0.5, 1, 4, 4)
    )
    return survival


def test_work_list_covers_every_query_row_and_key_exactly_once() -> None:
    rng = np.random.default_rng(7)
    cache = Cache([2000] * 6, 16)
    for slots in (1, 8, 64, 1000):
        segments = []
        for ring in range(6):
            start = int(rng.integers(0, 1900))
            segments.append((ring, int(rng.integers(0, 4)), start, int(rng.integers(1, 100))))
        packed, meta = pack(cache, segments, 600, slots)
        header, items = meta.header.tolist(), meta.items.tolist()[: int(meta.header[1])]
        assert header[0] == packed.num_rows == sum(segment[3] for segment in segments)
        covered: dict[int, list[tuple[int, int]]] = {}
        for first_row, num_rows, position, ring, depth, begin, end, _ in items:
            for i in range(num_rows):
                covered.setdefault(first_row + i, []).append((begin, end))
                assert int(meta.positions[first_row + i]) == position + i
                slot = plane_slots(
                    cache.kv.groups[ring], torch.tensor(position + i, device=DEVICE), depth, PLANES, 16
                )
                assert int(meta.slots[first_row + i]) == int(slot)
        assert sorted(covered) == list(range(packed.num_rows))
        for row, spans in covered.items():
            spans.sort()
            assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans))
            assert spans[-1][1] * 64 > int(meta.positions[row])
        combines = meta.combines.tolist()[: header[2]]
        assert sorted(entry[0] for entry in combines) == sorted(
            row for row, spans in covered.items() if len(spans) > 1
        )


def test_a_full_workspace_means_unsplit_items_not_an_overflow() -> None:
    cache = Cache([2000] * 6, 16)
    segments = [(ring, 0, 1900, 40) for ring in range(6)]
    layout = MetaLayout(256, 300, 700)
    host = HostMeta.allocate(layout, pin=False)
    cache.packer(1000).pack(host, np.array([(*segment, -1, -1) for segment in segments]))
    combines = host.combines[: host.header[2]]
    assert 0 < len(combines) < 240
    assert (combines[:, 1] + (combines[:, 3] - 1) * combines[:, 2]).max() < 700


def test_a_batch_larger_than_its_bucket_is_refused() -> None:
    cache = Cache([100], 16)
    with pytest.raises(ValueError, match="40 rows do not fit a bucket of 32"):
        pack(cache, [(0, 0, 0, 40)], 32, 1)
