"""Paged causal attention over ragged segments (request, depth plane, query rows, context): prefill ranges and
decode rows alike.

A work item is a tile of query rows of one segment times all or one of the splits of its history
(`executor.kernels.worklist`); heads are the other dimension of the work. A fixed grid walks the list, whose
length it reads from the device, so one captured graph serves any composition. Items of two tile heights share
a launch: SHORT_ROWS for decode rows and short remainders, the batch's class for the rest.

**Bits.** A row's result depends on its position, its query and the K/V before it, on nothing else. History is
walked in TILE_KEYS tiles at absolute positions; a tile that is masked for a row changes none of its numbers
(max unchanged, factor exp2(0) = 1, weights 0). Tensor-core products run over K in one order whatever the tile
height. The row sum of weights would not: its order follows the register layout, so weights are summed as
integers, multiples of 2^-24, which is exact in any order.
"""

from dataclasses import dataclass

import torch

from executor.kernels.combine import combine_triton
from executor.kernels.exact import exact_mixture, exact_product
from executor.kernels.fold import fold
from executor.kernels.kv import KVPools
from executor.kernels.lang import OVERLAP, allow_next, jit, tl, wait_for_inputs
from executor.kernels.meta import HEADER_COMBINES, HEADER_ITEMS, ITEM_WORDS, BatchMeta
from executor.kernels.worklist import SHORT_ROWS, TILE_KEYS, TILES_PER_SPLIT
from policies.core.models.shape import ModelShape

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Launch constants of one (dtype, tile height); `programs_per_sm` sizes the grid.

    The block-table load takes every second pipeline stage: 5 stages keep two K and V tiles in flight.
    """

    num_warps: int
    num_stages: int
    programs_per_sm: int
    is_flat: bool = True


CONFIGS = {
    (torch.bfloat16, 16): AttentionConfig(num_warps=4, num_stages=5, programs_per_sm=2),
    (torch.bfloat16, 32): AttentionConfig(num_warps=4, num_stages=5, programs_per_sm=2),
    (torch.bfloat16, 64): AttentionConfig(num_warps=4, num_stages=5, programs_per_sm=2, is_flat=False),
    (torch.bfloat16, 128): AttentionConfig(num_warps=8, num_stages=5, programs_per_sm=1, is_flat=False),
    (torch.float32, 16): AttentionConfig(num_warps=4, num_stages=1, programs_per_sm=2),
    (torch.float32, 32): AttentionConfig(num_warps=4, num_stages=1, programs_per_sm=2),
    (torch.float32, 64): AttentionConfig(num_warps=8, num_stages=1, programs_per_sm=1, is_flat=False),
}
TILE_CLASSES = {torch.bfloat16: (16, 32, 64, 128), torch.float32: (16,)}
"""Query-tile heights to pack for. In float32 taller tiles than 16 spill registers at head_dim 128."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results of split tiles, one row per (query row, split): softmax maximum and sum, and the
    unnormalised output."""

    acc: torch.Tensor  # [max_partials, heads, head_dim] float32
    stats: torch.Tensor  # [max_partials, heads, 2] float32

    @classmethod
    def allocate(cls, shape: ModelShape, max_partials: int, device: torch.device) -> "Workspace":
        size = (max_partials, shape.num_heads)
        return cls(
            torch.zeros((*size, shape.head_dim), device=device), torch.zeros((*size, 2), device=device)
        )


@jit
def load_tile(
    p_k, p_v, p_ring_groups, i_tile, key_limit, plane, planes, o_kv_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys of one history tile and its K and V [BLOCK_N, HEAD_DIM].

    Past `key_limit` the last key is read again: its weight is 0, it holds no NaN, and loads need no mask.
    """
    o_key = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_read = tl.minimum(o_key, key_limit - 1)
    b_group = tl.load(p_ring_groups + o_read // BLOCK_SIZE).to(tl.int64)
    o_block = (b_group * planes + plane) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    o_kv = (o_block + o_kv_head + o_read % BLOCK_SIZE * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    return o_key, tl.load(p_k + o_kv), tl.load(p_v + o_kv)


@jit
def attend_tile(b_q, o_position, o_key, b_k, b_v, b_max, b_sum, b_acc, scale_log2, IS_OPEN: tl.constexpr):
    """Softmax state of the current split after one more tile. In an open tile every row sees every key.

    A weight w in [0, 1] becomes the integer w * 2^22 as the low bits of the float 2^23 + w * 2^22, and the
    bits are summed: the sum is exact in any order, without a conversion. Each of 64 float patterns carries
    0x4B000000 more, in all 3 << 30.
    """
    b_dot = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if not IS_OPEN:
        b_dot = tl.where(o_key[None, :] <= o_position[:, None], b_dot, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_dot, 1))
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_factor = tl.exp2((b_max - b_base) * scale_log2)
    b_offset = tl.broadcast_to((-b_base * scale_log2)[:, None], b_dot.shape)
    b_weight = tl.exp2(tl.fma(b_dot, tl.full(b_dot.shape, scale_log2, tl.float32), b_offset))
    b_bits = tl.fma(
        b_weight, tl.full(b_dot.shape, 4194304.0, tl.float32), tl.full(b_dot.shape, 8388608.0, tl.float32)
    )
    b_count = tl.sum(b_bits.to(tl.int32, bitcast=True), 1) + 1073741824
    b_sum = tl.fma(b_sum, b_factor, b_count.to(tl.float32) * (1.0 / 4194304.0))
    b_acc = tl.dot(b_weight.to(b_v.dtype), b_v, b_acc * b_factor[:, None], input_precision="ieee")
    return b_new_max, b_sum, b_acc


@jit
def walk_tiles(
    p_k, p_v, p_ring_groups, first_tile, end_tile, b_q, o_position, b_max, b_sum, b_acc, scale_log2,
    key_limit, plane, planes, o_kv_head, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, IS_OPEN: tl.constexpr,
):  # fmt: skip
    """Softmax state of one split after the history tiles [first_tile, end_tile)."""
    for i_tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        o_key, b_k, b_v = load_tile(
            p_k, p_v, p_ring_groups, i_tile, key_limit, plane, planes, o_kv_head, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        b_max, b_sum, b_acc = attend_tile(
            b_q, o_position, o_key, b_k, b_v, b_max, b_sum, b_acc, scale_log2, IS_OPEN
        )
    return b_max, b_sum, b_acc


@jit
def attend_item(
    p_q, p_k, p_v, p_groups, p_item, p_out, p_acc, p_stats, i_head, depth_offset, stride_q, stride_groups,
    planes, scale_log2, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES_PER_SPLIT: tl.constexpr,
    NUM_STAGES: tl.constexpr, IS_FLAT: tl.constexpr,
):  # fmt: skip
    """One head of one item of up to BLOCK_M rows.

    A flat walk is one loop over an item's tiles, one pipeline from end to end: best where loads are the
    limit. Splits begin and end in it without a branch (a branch between tensor-core products makes ptxas
    serialise them): at a split's first tile the running maximum is -inf, which scales what came before by 0;
    before its last tile the fold joins weight 0. Otherwise a loop over splits holds one over open tiles and,
    where the diagonal crosses it, one over the rest: no masks and no fold in the steady state.
    """
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, HEAD_DIM)
    first_row = tl.load(p_item).to(tl.int64)
    num_rows = tl.load(p_item + 1)
    position = tl.load(p_item + 2)
    ring = tl.load(p_item + 3).to(tl.int64)
    plane = tl.load(p_item + 4) + depth_offset
    first_tile = tl.load(p_item + 5)
    end_tile = tl.load(p_item + 6)
    first_partial = tl.load(p_item + 7).to(tl.int64)

    m_m = o_m < num_rows
    o_row = first_row + o_m
    o_position = position + o_m
    wait_for_inputs()
    o_q = o_row[:, None] * stride_q + i_head * HEAD_DIM + o_d[None, :]
    b_q = tl.load(p_q + o_q, mask=m_m[:, None], other=0.0)
    key_limit = position + num_rows
    o_kv_head = (i_head // (NUM_HEADS // NUM_KV_HEADS)) * BLOCK_SIZE * HEAD_DIM
    p_ring_groups = p_groups + ring * stride_groups

    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    if IS_FLAT:
        b_split_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        b_split_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        b_split_acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
        for i_tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
            o_key, b_k, b_v = load_tile(
                p_k, p_v, p_ring_groups, i_tile, key_limit, plane, planes, o_kv_head, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
            b_split_max = tl.where(i_tile % TILES_PER_SPLIT == 0, float("-inf"), b_split_max)
            b_split_max, b_split_sum, b_split_acc = attend_tile(
                b_q, o_position, o_key, b_k, b_v, b_split_max, b_split_sum, b_split_acc, scale_log2, False
            )
            is_end = ((i_tile + 1) % TILES_PER_SPLIT == 0) | (i_tile + 1 == end_tile)
            b_folded_max = tl.where(is_end, b_split_max, float("-inf"))
            b_max, b_sum, b_acc = fold(
                b_max, b_sum, b_acc, b_folded_max, b_split_sum, b_split_acc, scale_log2
            )
    else:
        end_open = (position + 1) // BLOCK_N
        first_split = first_tile // TILES_PER_SPLIT
        for i_split in range(first_split, (end_tile + TILES_PER_SPLIT - 1) // TILES_PER_SPLIT):
            begin = i_split * TILES_PER_SPLIT
            end = tl.minimum(begin + TILES_PER_SPLIT, end_tile)
            middle = tl.maximum(begin, tl.minimum(end, end_open))
            b_split_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
            b_split_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
            b_split_acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
            b_split_max, b_split_sum, b_split_acc = walk_tiles(
                p_k, p_v, p_ring_groups, begin, middle, b_q, o_position, b_split_max, b_split_sum,
                b_split_acc, scale_log2, key_limit, plane, planes, o_kv_head, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, BLOCK_N, NUM_STAGES, True,
            )  # fmt: skip
            if middle < end:
                b_split_max, b_split_sum, b_split_acc = walk_tiles(
                    p_k, p_v, p_ring_groups, middle, end, b_q, o_position, b_split_max, b_split_sum,
                    b_split_acc, scale_log2, key_limit, plane, planes, o_kv_head, NUM_KV_HEADS, HEAD_DIM,
                    BLOCK_SIZE, BLOCK_N, NUM_STAGES, False,
                )  # fmt: skip
            b_max, b_sum, b_acc = fold(b_max, b_sum, b_acc, b_split_max, b_split_sum, b_split_acc, scale_log2)

    is_whole = (first_tile == 0) & (end_tile * BLOCK_N >= key_limit)
    if is_whole:
        o_out = (o_row * NUM_HEADS + i_head)[:, None] * HEAD_DIM + o_d[None, :]
        b_out = b_acc * (1.0 / b_sum)[:, None]
        tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None])
    else:
        o_partial = (first_partial + o_m) * NUM_HEADS + i_head
        tl.store(p_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=m_m[:, None])
        tl.store(p_stats + o_partial * 2, b_max, mask=m_m)
        tl.store(p_stats + o_partial * 2 + 1, b_sum, mask=m_m)


@jit(do_not_specialize=["depth_offset"])
def attention_kernel(
    p_q, p_k, p_v, p_groups, p_items, p_num_items, p_out, p_acc, p_stats, depth_offset, stride_q,
    stride_groups, planes, scale_log2, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHORT_ROWS: tl.constexpr, TILES_PER_SPLIT: tl.constexpr, ITEM_WORDS: tl.constexpr,
    NUM_STAGES: tl.constexpr, IS_FLAT: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs share (item, head) units; layouts as in `AttentionLauncher.__call__`.

    Items of up to SHORT_ROWS rows are walked flat in a tile of that height, so that a decode row beside a
    prompt chunk costs what it costs alone. Units are dealt out there and back, wave by wave: they come
    dearest first, and who has the dearest of one wave gets the cheapest of the next.
    """
    allow_next()
    i_program = tl.program_id(0)
    programs = tl.num_programs(0)
    num_units = tl.load(p_num_items) * NUM_HEADS
    for first_unit in range(0, num_units, programs):
        is_way_back = first_unit // programs % 2
        i_unit = first_unit + (programs - 1 - i_program if is_way_back else i_program)
        if i_unit < num_units:
            i_head = i_unit % NUM_HEADS
            p_item = p_items + i_unit // NUM_HEADS * ITEM_WORDS
            if BLOCK_M == SHORT_ROWS:
                attend_item(
                    p_q, p_k, p_v, p_groups, p_item, p_out, p_acc, p_stats, i_head, depth_offset, stride_q,
                    stride_groups, planes, scale_log2, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                    BLOCK_M, BLOCK_N, TILES_PER_SPLIT, NUM_STAGES, IS_FLAT,
                )  # fmt: skip
            elif tl.load(p_item + 1) <= SHORT_ROWS:
                attend_item(
                    p_q, p_k, p_v, p_groups, p_item, p_out, p_acc, p_stats, i_head, depth_offset, stride_q,
                    stride_groups, planes, scale_log2, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                    SHORT_ROWS, BLOCK_N, TILES_PER_SPLIT, NUM_STAGES, True,
                )  # fmt: skip
            else:
                attend_item(
                    p_q, p_k, p_v, p_groups, p_item, p_out, p_acc, p_stats, i_head, depth_offset, stride_q,
                    stride_groups, planes, scale_log2, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                    BLOCK_M, BLOCK_N, TILES_PER_SPLIT, NUM_STAGES, IS_FLAT,
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionLauncher:
    """Launches attention and its combine with a grid fixed by the device: `num_sms` multiprocessors."""

    workspace: Workspace
    num_sms: int

    def __call__(
        self,
        q: torch.Tensor,
        kv: KVPools,
        layer: int,
        meta: BatchMeta,
        tile_rows: int,
        depth_offset: int,
        out: torch.Tensor,
    ) -> None:
        """q [rows, >= heads * head_dim] rows of any stride, out [rows, heads * head_dim]; rows that no item
        covers keep what they hold. `meta` must have been packed with `tile_rows`; items name the plane of
        depth offset 0."""
        _, _, num_kv_heads, block_size, head_dim = kv.k.shape
        num_heads = out.shape[1] // head_dim
        config = CONFIGS[q.dtype, tile_rows]
        scale_log2 = head_dim**-0.5 * LOG2_E
        workspace = self.workspace
        attention_kernel[(self.num_sms * config.programs_per_sm,)](
            q, kv.k[layer], kv.v[layer], kv.groups, meta.items, meta.header[HEADER_ITEMS:], out,
            workspace.acc, workspace.stats, depth_offset, q.stride(0), kv.groups.stride(0), kv.planes,
            scale_log2, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size, BLOCK_M=tile_rows, BLOCK_N=TILE_KEYS, SHORT_ROWS=SHORT_ROWS,
            TILES_PER_SPLIT=TILES_PER_SPLIT, ITEM_WORDS=ITEM_WORDS, NUM_STAGES=config.num_stages,
            IS_FLAT=config.is_flat, num_warps=config.num_warps, **OVERLAP,
        )  # fmt: skip
        num_combines = meta.header[HEADER_COMBINES:]
        combine_triton(
            workspace.acc, workspace.stats, meta.combines, num_combines, self.num_sms, scale_log2, out
        )


def attention_torch(
    q: torch.Tensor,
    kv: KVPools,
    layer: int,
    meta: BatchMeta,
    tile_rows: int,
    depth_offset: int,
    out: torch.Tensor,
) -> None:
    """Twin of `AttentionLauncher.__call__` in float32, bit-invariant too: tiles of `tile_rows` x TILE_KEYS
    are padded to full size, and products are exact.

    Takes every tile once, by its first item, and walks all of its history. Tiles of equal history length run
    side by side.
    """
    items = meta.items[: int(meta.header[HEADER_ITEMS])].long().cpu()
    items = items[items[:, 5] == 0]
    if not len(items):
        return
    items = items[torch.argsort(items[:, 2] + items[:, 1], descending=True, stable=True)].to(q.device)
    first_row, num_rows, position, ring, depth = (column[:, None] for column in items[:, :5].T)
    key_limit = position + num_rows
    _, _, num_kv_heads, block_size, head_dim = kv.k.shape
    num_heads = out.shape[1] // head_dim
    o_m = torch.arange(tile_rows, device=q.device)[None]
    m_m = o_m < num_rows  # [tiles, tile_rows]
    queries = q.new_zeros((len(items), tile_rows, num_heads * head_dim), dtype=torch.float32)
    queries[m_m] = q[(first_row + o_m)[m_m], : num_heads * head_dim].float()
    queries = queries.view(len(items), tile_rows, num_heads, head_dim).transpose(1, 2) * head_dim**-0.5
    maximum = queries.new_full((*queries.shape[:3], 1), float("-inf"))
    total = torch.zeros_like(maximum)
    acc = torch.zeros_like(queries)  # [tiles, heads, tile_rows, head_dim]
    for start in range(0, int(key_limit.max()), TILE_KEYS):
        n = int((key_limit > start).sum())
        o_key = torch.arange(start, start + TILE_KEYS, device=q.device)[None]
        m_key = o_key < key_limit[:n]  # [n, TILE_KEYS]
        column = (o_key // block_size).clamp(max=kv.groups.shape[1] - 1)
        block = (kv.groups[ring[:n], column].long() * kv.planes + depth[:n] + depth_offset) * m_key
        offset = (o_key % block_size).expand_as(block)
        keys, values = (
            pool[layer][block, :, offset].float().masked_fill(~m_key[:, :, None, None], 0.0).transpose(1, 2)
            .repeat_interleave(num_heads // num_kv_heads, dim=1) for pool in (kv.k, kv.v)
        )  # fmt: skip
        scores = exact_product(queries[:n], keys).float()  # [n, heads, tile_rows, TILE_KEYS]
        scores.masked_fill_((o_key[:, None] > (position[:n] + o_m)[:, :, None])[:, None], float("-inf"))
        new_maximum = torch.maximum(maximum[:n], scores.amax(3, keepdim=True))
        factor = torch.exp(maximum[:n] - new_maximum)
        weight = torch.exp(scores - new_maximum)
        total[:n] = total[:n] * factor + weight.sum(3, keepdim=True)
        acc[:n] = acc[:n] * factor + exact_mixture(weight, values).float()
        maximum[:n] = new_maximum
    result = (acc / total).transpose(1, 2).reshape(len(items), tile_rows, -1)
    out[(first_row + o_m)[m_m]] = result[m_m].to(out.dtype)
