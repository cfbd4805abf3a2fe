"""The packed words of a batch, whole, against the same rules written as plain loops."""

import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="metadata buffers are torch's")

from executor.kernels.meta import COMBINE_WORDS, HEADER_WORDS, ITEM_WORDS, ROW_FIELDS, HostMeta, MetaLayout
from executor.kernels.worklist import SHORT_ROWS, SPLIT_KEYS, TILE_KEYS, TILES_PER_SPLIT, Packer

RINGS, GROUPS, PLANES, BLOCK_SIZE, HEADS = 8, 640, 4, 16, 16
Segment = tuple[int, int, int, int, int, int]


def plain_class(classes: tuple[int, ...], spans: list[tuple[int, int]]) -> int:
    """The height of tiles that are not short: in (16, 64, 128) 100 rows take 128, and 64 beside so many
    single rows that those have more than half as many history tiles."""
    longest = max(count for _, count in spans)
    height = min([rows for rows in classes if rows >= longest], default=classes[-1])
    short = tall = 0
    for start, count in spans:
        tiles = (start + count - 1) // TILE_KEYS + 1
        if count <= SHORT_ROWS:
            short += tiles
        else:
            tall += tiles * -(-count // height)
    if height > 64 and 64 in classes and 2 * short > tall:
        height = 64
    return height


def plain_words(packer: Packer, layout: MetaLayout, segments: list[Segment]) -> list[int]:
    """What `Packer.pack` writes, up to the last work item; combine entries that are not used are 0."""
    rows: list[list[int]] = []
    tiles: list[tuple[int, ...]] = []
    tile_rows = plain_class(packer.tile_classes, [segment[2:4] for segment in segments])
    for ring, depth, start, count, source, target in segments:
        for at in range(0, count, tile_rows):
            end = min(at + tile_rows, count)
            tiles.append(
                (len(rows) + at, end - at, start + at, ring, depth, (start + end - 1) // SPLIT_KEYS + 1)
            )
        for at in range(count):
            group, within = divmod(start + at, BLOCK_SIZE)
            slot = (int(packer.host_groups[ring, group]) * PLANES + depth) * BLOCK_SIZE + within
            rows.append(
                [
                    start + at,
                    slot,
                    -1,
                    -1,
                    source + at if source >= 0 else -1,
                    target + at if target >= 0 else -1,
                    -1,
                ]
            )
    padding = [0, -1, -1, -1, -1, -1, -1]
    rows += [padding] * (layout.max_rows - len(rows))

    slots = max(1, packer.slots * 64 // max(64, tile_rows))
    even_share = -(-sum(tile[5] for tile in tiles) * HEADS // slots)
    items: list[list[int]] = []
    combines: list[list[int]] = []
    used = extra_items = partials = 0
    for first, count, position, ring, depth, splits in tiles:
        end_tile = (position + count - 1) // TILE_KEYS + 1
        is_split = splits > (packer.tall_margin if tile_rows > 64 else 1.25) * max(1, even_share)
        if is_split:
            extra_items += splits - 1
            partials += splits * count
            is_split = extra_items <= layout.max_items - len(tiles) and partials <= layout.max_partials
        if not is_split:
            items.append([first, count, position, ring, depth, 0, end_tile, used])
            continue
        for split in range(splits):
            begin = split * TILES_PER_SPLIT
            items.append(
                [
                    first,
                    count,
                    position,
                    ring,
                    depth,
                    begin,
                    min(begin + TILES_PER_SPLIT, end_tile),
                    used + split * count,
                ]
            )
        combines += [[first + at, used + at, count, (position + at) // SPLIT_KEYS + 1] for at in range(count)]
        used += splits * count
    items.sort(key=lambda item: (item[5] - item[6]) * (2 if item[1] <= SHORT_ROWS else 3))
    num_rows = sum(segment[3] for segment in segments)
    header = [num_rows, len(items), len(combines), 0]
    combines += [[0] * COMBINE_WORDS] * (layout.max_rows - len(combines))
    by_field = [row[at] for at in range(len(ROW_FIELDS)) for row in rows]
    assert len(header) == HEADER_WORDS and all(len(item) == ITEM_WORDS for item in items)
    return header + by_field + [word for entry in combines + items for word in entry]


@pytest.mark.parametrize("tile_classes", [(16,), (16, 64), (16, 32, 64, 128), (16, 32, 128)])
def test_every_word_is_what_plain_loops_write(tile_classes: tuple[int, ...]) -> None:
    draw = random.Random(len(tile_classes))
    groups = np.array([draw.sample(range(RINGS * GROUPS), GROUPS) for _ in range(RINGS)], dtype=np.int32)
    num_split = 0
    classes = set()
    for _ in range(150):
        longest = draw.choice([1, 1, 40, 300])
        segments = [
            (
                draw.randrange(RINGS), draw.randrange(PLANES), draw.randrange(draw.choice([600, 9000])),
                draw.choice([1, draw.randint(1, longest)]),
                draw.choice([-1, draw.randrange(4000)]), draw.choice([-1, draw.randrange(4000)]),
            )
            for _ in range(draw.randint(1, 24))
        ]  # fmt: skip
        num_rows = sum(segment[3] for segment in segments)
        layout = MetaLayout.for_rows(num_rows + draw.randrange(20), max_partials=draw.choice([64, 8192]))
        packer = Packer(
            groups,
            PLANES,
            BLOCK_SIZE,
            HEADS,
            draw.choice([1, 64, 264]),
            tile_classes,
            draw.choice([1.25, 2.5]),
        )
        host = HostMeta.allocate(layout, False)
        packed = packer.pack(host, np.array(segments, dtype=np.int64))
        assert host.buffer[: packed.num_words].tolist() == plain_words(packer, layout, segments)
        num_split += bool(host.header[2])
        classes.add(packed.tile_rows)
    assert num_split > 15
    assert classes == set(tile_classes)


def test_a_decode_row_beside_a_chunk_of_65_rows_has_the_tiles_it_has_beside_one_of_64() -> None:
    """The 65th row is one short item more; everything else is the same list in the same order."""
    groups = np.arange(61 * GROUPS, dtype=np.int32).reshape(61, GROUPS)
    packer = Packer(groups, PLANES, BLOCK_SIZE, HEADS, 264, (16, 32, 64, 128))
    items = []
    for chunk in (64, 65):
        host = HostMeta.allocate(MetaLayout.for_rows(128), False)
        spans = [(1199, 1)] * 60 + [(1200, chunk)]
        segments = [(ring, 0, start, count, -1, -1) for ring, (start, count) in enumerate(spans)]
        packed = packer.pack(host, np.array(segments, dtype=np.int64))
        assert packed.tile_rows == 64
        items.append(host.items[: host.header[1]].tolist())
    assert items[0] == [item for item in items[1] if item[2] != 1264]
    assert len(items[1]) == len(items[0]) + 1
