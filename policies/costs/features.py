"""What a batch's device time depends on, as numbers: row bucket, attention work and its critical path. Fit
and prediction share it.

The executor pads rows to buckets and cuts attention into work items (`executor/kernels/worklist.py`); where
those cuts lie is data of the profile (`Cutting`), what they mean is here. A test holds the two to the same
items.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from policies.core.seam.batch import ScheduledRange

SPLIT_MARGIN = 1.25
"""A tile is cut into splits when it has more of them than this many times an even share of the work."""
SLOT_ROWS = 64
"""Query rows of a work unit that takes one slot; a taller one takes the room of several."""


Key = tuple[int | tuple[int, int], ...]
"""A batch's ranges as far as time depends on them: the history tile of a single row, (start, count) of a
longer range."""


class Features(NamedTuple):
    """Features of one recurrent invocation.

    Attention's grid has a fixed number of programs; program p runs units p, p + programs, ... of a list
    sorted by length, and every item is one unit per head. So the first program runs the longest unit of every
    wave: `path_tiles` are its history tiles over all waves, the critical path. `tiles` are the history tiles
    of all items together, the total work. `partials` are rows of partial results of items that were cut,
    `combined_rows` the rows joined from them.
    """

    bucket: int
    tile_rows: int
    items: int
    tiles: int
    path_tiles: int
    combined_rows: int
    partials: int


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the executor cuts batches: row counts of its programs and query-tile heights (both ascending), keys
    of a history tile and of a split, attention work units that run at once, rows of partial results and items
    beyond one per bucket row that there is room for, and units per item."""

    row_buckets: tuple[int, ...]
    tile_rows: tuple[int, ...]
    tile_keys: int
    split_keys: int
    attention_slots: int
    attention_partials: int
    attention_spare_items: int
    num_heads: int

    def bucket(self, rows: int) -> int:
        """The row count that `rows` are padded to; beyond the largest bucket `rows` itself."""
        at = bisect_left(self.row_buckets, rows)
        return self.row_buckets[at] if at < len(self.row_buckets) else rows

    def key(self, ranges: Iterable[ScheduledRange]) -> Key:
        """Equal for batches of equal rows and attention work, whatever their requests and depths: what
        `features` is a function of.

        Of a range of one row only the history tile it ends in matters, so a decoding batch keeps its key for
        some tokens.
        """
        tile_keys = self.tile_keys
        return tuple(
            [
                item.token_start // tile_keys
                if item.token_count == 1
                else (item.token_start, item.token_count)
                for item in ranges
            ]
        )

    def features(self, key: Key) -> Features:
        """The features of a batch of `key`. 40 rows from 280 in tiles of 64 are one item of 319 // 64 + 1 = 5
        history tiles."""
        tile_keys = self.tile_keys
        rows, longest = 0, 1
        for item in key:
            if isinstance(item, int):
                rows += 1
            else:
                rows += item[1]
                longest = max(longest, item[1])
        height = next((tile for tile in self.tile_rows if tile >= longest), self.tile_rows[-1])
        ends: list[int] = []  # history tile that an item of query rows ends in
        heights: list[int] = []
        for item in key:
            if isinstance(item, int):
                ends.append(item)
                heights.append(1)
            else:
                end = item[0] + item[1]
                firsts = range(item[0], end, height)
                ends += [(min(first + height, end) - 1) // tile_keys for first in firsts]
                heights += [min(height, end - first) for first in firsts]
        programs = max(1, self.attention_slots * SLOT_ROWS // max(SLOT_ROWS, height))
        per_split = self.split_keys // tile_keys
        num_splits = sum([end // per_split for end in ends]) + len(ends)
        most_splits = SPLIT_MARGIN * max(1, -(-num_splits * self.num_heads // programs))
        combined_rows = partials = 0
        if max(ends) // per_split + 1 <= most_splits:
            lengths = [end + 1 for end in ends]
        else:
            lengths = []
            spare_items = self.bucket(rows) + self.attention_spare_items - len(ends)
            spare_partials = self.attention_partials
            for end, tile in zip(ends, heights, strict=True):
                splits = end // per_split + 1
                if splits > most_splits:
                    spare_items -= splits - 1
                    spare_partials -= tile * splits
                if splits > most_splits and min(spare_items, spare_partials) >= 0:
                    lengths += [per_split] * (splits - 1) + [end + 1 - per_split * (splits - 1)]
                    combined_rows += tile
                    partials += tile * splits
                else:
                    lengths.append(end + 1)
        lengths.sort(reverse=True)
        path = [lengths[unit // self.num_heads] for unit in range(0, len(lengths) * self.num_heads, programs)]
        return Features(
            self.bucket(rows), height, len(lengths), sum(lengths), sum(path), combined_rows, partials
        )
