"""Features of a batch: the work items that the executor makes of it, and their critical path."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.kernels.meta import HEADER_COMBINES, HEADER_ITEMS, HostMeta, MetaLayout
from executor.kernels.worklist import CUT_MARGIN, SHORT_ROWS, SPLIT_KEYS, TILE_KEYS, Packer
from policies.core.seam.batch import ScheduledRange, Stage
from policies.costs.features import Cutting

HEADS = 16
SPANS = st.lists(
    st.tuples(st.integers(0, 9000), st.one_of(st.just(1), st.integers(1, 300))), min_size=1, max_size=12
)


LAYOUT = MetaLayout.for_rows(4096, max_partials=8192)


def cutting(
    slots: int = 264, heights: tuple[int, ...] = (16, 32, 64, 128), tall_margin: float = CUT_MARGIN
) -> Cutting:
    """One bucket of 4096 rows, so that all batches are packed with the same room."""
    return Cutting(
        (4096,),
        heights,
        TILE_KEYS,
        SPLIT_KEYS,
        slots,
        LAYOUT.max_partials,
        LAYOUT.max_items - LAYOUT.max_rows,
        HEADS,
        SHORT_ROWS,
        tall_margin=tall_margin,
    )


def ranges(spans: list[tuple[int, int]]) -> list[ScheduledRange]:
    return [
        ScheduledRange(at, Stage.PREFILLING_RECURRENT, 0, start, count)
        for at, (start, count) in enumerate(spans)
    ]


def packed_items(
    spans: list[tuple[int, int]], slots: int, heights: tuple[int, ...], margin: float = CUT_MARGIN
) -> tuple[int, np.ndarray, np.ndarray]:
    """Tile height, items and combine entries that the executor's packer makes of `spans`."""
    groups = np.zeros((len(spans), 600), dtype=np.int32)
    segments = np.array(
        [(at, 0, start, count, -1, -1) for at, (start, count) in enumerate(spans)], dtype=np.int64
    )
    host = HostMeta.allocate(LAYOUT, pin=False)
    tile_rows = Packer(groups, 4, 16, HEADS, slots, heights, margin).pack(host, segments).tile_rows
    return tile_rows, host.items[: host.header[HEADER_ITEMS]], host.combines[: host.header[HEADER_COMBINES]]


@given(
    SPANS,
    st.sampled_from([1, 40, 264]),
    st.sampled_from([(16,), (16, 32, 64, 128), (16, 32, 128)]),
    st.sampled_from([CUT_MARGIN, 2.5]),
)
def test_features_count_the_items_that_the_executor_packs(
    spans: list[tuple[int, int]], slots: int, heights: tuple[int, ...], margin: float
) -> None:
    cuts = cutting(slots, heights, margin)
    work = cuts.features(cuts.key(ranges(spans)))
    tile_rows, items, combines = packed_items(spans, slots, heights, margin)
    lengths = (items[:, 6] - items[:, 5]).tolist()
    programs = max(1, slots * 64 // max(64, tile_rows))
    is_short = items[:, 1] <= SHORT_ROWS
    has_sides = tile_rows == 128 and 64 not in heights
    is_light = items[:, 1] <= (64 if has_sides else SHORT_ROWS)
    dealt: list[list[int]] = [[0, 0, 0] for _ in range(programs)]  # cost, tiles, light tiles of each program
    units = [item for item in zip(lengths, is_short, is_light, strict=True) for _ in range(HEADS)]
    for at, (length, short, light) in enumerate(units):
        wave, program = divmod(at, programs)
        mine = dealt[programs - 1 - program if wave % 2 else program]
        mine[:] = mine[0] + length * (2 if short else 3), mine[1] + length, mine[2] + length * light
    busiest = max(dealt, key=lambda sums: sums[0])
    whole = (items[:, 5] == 0) & (items[:, 6] * TILE_KEYS >= items[:, 2] + items[:, 1])
    assert (work.tile_rows, work.items, work.tiles) == (tile_rows, len(items), sum(lengths))
    assert (work.path_tiles, work.light_path_tiles) == tuple(busiest[1:])
    assert work.light_tiles == sum(length for length, light in zip(lengths, is_light, strict=True) if light)
    assert work.light_rows == (64 if has_sides else heights[0])
    assert work.waves == -(-len(units) // programs)
    joined_splits = max(combines[:, 3], default=0)
    assert (work.joined_splits, work.partials) == (joined_splits, int(items[~whole, 1].sum()))


def test_rows_are_padded_to_the_next_bucket_and_beyond_the_last_to_none() -> None:
    cuts = dataclasses.replace(cutting(), row_buckets=(1, 8, 64, 4096))
    assert [cuts.bucket(rows) for rows in (1, 2, 8, 9, 4096, 5000)] == [1, 8, 8, 64, 4096, 5000]


def test_a_batch_without_room_for_all_its_splits_keeps_the_last_tiles_whole() -> None:
    """Each tile of 128 rows before 16384 has 32 splits, so 4,096 rows of partial results: two of the four
    find room in 8,192."""
    cuts = cutting()
    work = cuts.features(cuts.key(ranges([(16384 - 512, 512)])))
    assert (work.partials, work.joined_splits, work.items) == (2 * 128 * 32, 32, 2 * 32 + 2)


def test_a_decoding_batch_keeps_its_key_until_it_comes_to_another_history_tile() -> None:
    cuts = cutting()
    keys = [
        cuts.key([ScheduledRange(7, Stage.RECURRENT, depth, at, 1)])
        for depth, at in ((0, 64), (3, 127), (0, 128))
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(("rows", "path"), [(16, 8), (17, 8), (33, 9), (34, 10)])
def test_the_critical_path_is_the_busiest_program_and_waves_are_dealt_there_and_back(
    rows: int, path: int
) -> None:
    """16 heads and 264 programs: 17 items are 8 units more than a wave, which go to the last 8 programs, and
    those had none of the long ones. In a third wave the first programs are first again."""
    cuts = cutting()
    spans = [(8 * 64 - 1, 1)] * min(rows, 16) + [(63, 1)] * (rows - 16)
    assert cuts.features(cuts.key(ranges(spans))).path_tiles == path


@pytest.mark.parametrize(("rows", "path"), [(16, 8), (17, 9), (34, 10)])
def test_where_one_height_served_a_batch_the_path_is_the_longest_unit_of_every_wave(
    rows: int, path: int
) -> None:
    """Items 0, 16 and 33 of the list hold the units 0, 264 and 528."""
    cuts = dataclasses.replace(cutting(), short_rows=0)
    spans = [(8 * 64 - 1, 1)] * min(rows, 16) + [(63, 1)] * (rows - 16)
    assert cuts.features(cuts.key(ranges(spans))).path_tiles == path


def test_decode_rows_beside_a_chunk_are_priced_as_short_items() -> None:
    """60 rows at 1200 beside a chunk of 64: 60 x 19 history tiles are short, the chunk's 20 are not."""
    cuts = cutting()
    features = cuts.features(cuts.key(ranges([(1199, 1)] * 60 + [(1200, 64)])))
    assert (features.tile_rows, features.tiles, features.light_tiles) == (64, 60 * 19 + 20, 60 * 19)


def test_a_batch_is_of_few_rows_by_what_it_is_padded_to() -> None:
    cuts = dataclasses.replace(cutting(), row_buckets=(1, 2, 4, 8, 4096), few_rows=4)
    few = [cuts.features(cuts.key(ranges([(99, 1)] * rows))).is_few for rows in (1, 3, 4, 5)]
    assert few == [True, True, True, False]
