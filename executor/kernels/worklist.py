"""Packs a batch's segments into its metadata: rows, slots, and attention's work list. Host only, numpy, no
device.

History is cut at two fixed grids of absolute positions: tiles of TILE_KEYS and splits of SPLIT_KEYS. What is
added to what in which order follows from a row's position alone. How the *work* is divided is free: an item
is either all splits of a tile of query rows (folded in registers) or one split of it (folded by the combine
kernel, same operations, same order), whichever fills the device.
"""

from dataclasses import dataclass

import numpy as np

from executor.kernels.meta import HEADER_COMBINES, HEADER_ITEMS, HEADER_ROWS, ITEM_WORDS, HostMeta

TILE_KEYS = 64
SPLIT_KEYS = 512
TILES_PER_SPLIT = SPLIT_KEYS // TILE_KEYS
SHORT_ROWS = 16
"""Items of up to so many query rows run in tiles of this height, whatever the class of their batch."""
SHORT_COST, TALL_COST = 2, 3
"""Of a history tile of a short item and of any other: 1.3 and 1.7 to 2.0 us on an H200."""
CUT_MARGIN = 1.25
"""A tile is cut into splits when it has more of them than this many times an even share of the work."""
SLOT_ROWS = 64
"""Query rows of a work unit that takes one slot; a taller one takes the room of several."""

SEGMENT_FIELDS = ("ring", "plane", "token_start", "token_count", "source_start", "target_start")
"""Columns of a segment: one range at one depth. `plane` is the one of its K/V, `source_start` and
`target_start` are the first rows in the hidden pool that it is read from and written to; -1 means not at
all."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What the launcher must know on the host: real rows, the query-tile class, and the words to copy."""

    num_rows: int
    tile_rows: int
    num_words: int


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs batches for one model and device.

    `host_groups` is the host's copy of the block-group table [num_rings, groups_per_ring]; `tile_classes` are
    the query-tile heights that the device has kernels for, ascending; `slots` is how many work units of up to
    64 rows run at once (programs of the attention grid; a taller one takes the room of several); `num_heads`
    units come of every item. `tall_margin` is CUT_MARGIN of tiles of more than a slot.
    """

    host_groups: np.ndarray
    planes: int
    block_size: int
    num_heads: int
    slots: int
    tile_classes: tuple[int, ...]
    tall_margin: float = CUT_MARGIN

    def pack(self, host: HostMeta, segments: np.ndarray) -> PackedBatch:
        """Write `segments` [n, 6] (columns SEGMENT_FIELDS, in batch order) into `host`.

        Fills header, positions, slots, source_rows, target_rows, combines and items; sets token_ids,
        sampled_rows and gates to -1 for the caller to overwrite. Raises `ValueError` when the rows do not fit
        the bucket.

        40 rows from position 280 in tiles of 16 make tiles of 16, 16 and 8 rows; the first needs keys [0,
        296): 2 splits.
        """
        ring, depth, start, count, source, target = segments.T
        num_rows = int(count.sum())
        if num_rows > host.layout.max_rows:
            raise ValueError(f"{num_rows} rows do not fit a bucket of {host.layout.max_rows}")
        first_row = count.cumsum() - count
        by_row = np.array((start, source, target, ring, depth)).repeat(count, axis=1)  # [5, num_rows]
        is_none = by_row[1:3] < 0
        by_row[:3] += np.arange(num_rows) - first_row.repeat(count)
        by_row[1:3][is_none] = -1
        group, within_block = np.divmod(by_row[0], self.block_size)
        block = self.host_groups[by_row[3], group].astype(np.int64) * self.planes + by_row[4]
        fields = host.row_fields
        fields[0, :num_rows] = by_row[0]
        fields[0, num_rows:] = 0
        fields[1, :num_rows] = block * self.block_size + within_block
        fields[2:4] = -1
        fields[4:6, :num_rows] = by_row[1:3]
        fields[6] = -1
        fields[1:, num_rows:] = -1

        tile_rows = self.tile_class(start, count)
        num_items, num_combines = self._pack_items(host, segments, first_row, tile_rows)
        host.header[HEADER_ROWS] = num_rows
        host.header[HEADER_ITEMS] = num_items
        host.header[HEADER_COMBINES] = num_combines
        return PackedBatch(num_rows, tile_rows, host.layout.item_offset + ITEM_WORDS * num_items)

    def tile_class(self, start: np.ndarray, count: np.ndarray) -> int:
        """The query-tile height of the batch's items that are not short; graphs are kept per class.

        The smallest class that holds the longest range, or the largest one. Tiles of more than a slot halve
        the programs, and short items pay for it: where those have more than half as many history tiles as
        the rest, the class of one slot if there is one. A chunk of 128 rows ending at 1200 beside 60 decode
        rows at 1200 (19 history tiles and 1,140): 64. Beside 2 decode rows at 100 (4 history tiles): 128.
        """
        classes, longest = self.tile_classes, int(count.max(initial=1))
        tile_rows = next((rows for rows in classes if rows >= longest), classes[-1])
        if tile_rows > SLOT_ROWS and SLOT_ROWS in classes:
            end_tile = (start + count - 1) // TILE_KEYS + 1
            is_short = count <= SHORT_ROWS
            tall_tiles = (end_tile * -(-count // tile_rows))[~is_short].sum()
            if 2 * end_tile[is_short].sum() > tall_tiles:
                tile_rows = SLOT_ROWS
        return tile_rows

    def _pack_items(
        self, host: HostMeta, segments: np.ndarray, first_row: np.ndarray, tile_rows: int
    ) -> tuple[int, int]:
        count = segments[:, 3]
        tiles_of = -(-count // tile_rows)
        segment = np.arange(len(segments)).repeat(tiles_of)
        offset = (np.arange(len(segment)) - (tiles_of.cumsum() - tiles_of)[segment]) * tile_rows
        tiles = np.empty((len(segment), 5), dtype=np.int64)  # an item's first five words
        tiles[:, 0] = first_row[segment] + offset
        tiles[:, 1] = rows = np.minimum(tile_rows, count[segment] - offset)
        tiles[:, 2] = position = segments[segment, 2] + offset
        tiles[:, 3:] = segments[segment, :2]
        last = position + rows - 1
        num_splits = last // SPLIT_KEYS + 1
        programs = max(1, self.slots * SLOT_ROWS // max(SLOT_ROWS, tile_rows))
        margin = self.tall_margin if tile_rows > SLOT_ROWS else CUT_MARGIN
        is_split = self._choose_split(host, rows, num_splits, programs, margin)

        partials = np.where(is_split, rows * num_splits, 0)
        first_partial = partials.cumsum() - partials
        items_of = np.where(is_split, num_splits, 1)
        tile = np.arange(len(tiles)).repeat(items_of)
        split = np.arange(len(tile)) - (items_of.cumsum() - items_of)[tile]
        end_tile = (last // TILE_KEYS + 1)[tile]
        items = np.empty((len(tile), ITEM_WORDS), dtype=np.int32)
        items[:, :5] = tiles[tile]
        items[:, 5] = begin_tile = split * TILES_PER_SPLIT
        items[:, 6] = end_tile = np.where(
            is_split[tile], np.minimum(begin_tile + TILES_PER_SPLIT, end_tile), end_tile
        )
        items[:, 7] = first_partial[tile] + split * rows[tile]
        cost = (end_tile - begin_tile) * np.where(rows[tile] <= SHORT_ROWS, SHORT_COST, TALL_COST)
        host.items[: len(tile)] = items[np.argsort(-cost, kind="stable")]
        if len(items) == len(tiles):
            return len(items), 0

        split_rows = np.where(is_split, rows, 0)
        tile = np.arange(len(tiles)).repeat(split_rows)
        within = np.arange(len(tile)) - (split_rows.cumsum() - split_rows)[tile]
        combines = host.combines[: len(tile)]
        combines[:, 0] = tiles[tile, 0] + within
        combines[:, 1] = first_partial[tile] + within
        combines[:, 2] = rows[tile]
        combines[:, 3] = (position[tile] + within) // SPLIT_KEYS + 1
        return len(items), len(tile)

    def _choose_split(
        self, host: HostMeta, rows: np.ndarray, num_splits: np.ndarray, slots: int, margin: float
    ) -> np.ndarray:
        """Which tiles are cut into one item per split: those well above an even share of `slots`, while
        capacities last.

        Partial results cost traffic, so a tile that is a split longer than its equals stays whole.
        """
        even_share = -(-int(num_splits.sum()) * self.num_heads // slots)
        is_split = num_splits > margin * max(1, even_share)
        if not is_split.any():
            return is_split
        spare_items = host.layout.max_items - len(rows)
        extra_items = np.where(is_split, num_splits - 1, 0).cumsum()
        partials = np.where(is_split, rows * num_splits, 0).cumsum()
        return is_split & (extra_items <= spare_items) & (partials <= host.layout.max_partials)
