"""What a batch's device time depends on, as numbers: row bucket, attention work and its critical path. Fit
and prediction share it.

The executor pads rows to buckets and cuts attention into work items (`executor/kernels/worklist.py`); where
those cuts lie is data of the profile (`Cutting`), what they mean is here. A test holds the two to the same
items.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from policies.core.seam.batch import ScheduledRange

SPLIT_MARGIN = 1.25
"""A tile is cut into splits when it has more of them than this many times an even share of the work."""
SLOT_ROWS = 64
"""Query rows of a work unit that takes one slot; a taller one takes the room of several."""
SHORT_COST, TALL_COST = 2, 3
"""Of a history tile of a short item and of any other, by which the executor orders items."""


Key = tuple[int | tuple[int, int], ...]
"""A batch's ranges as far as time depends on them: the history tile of a single row, (start, count) of a
longer range."""


class Features(NamedTuple):
    """Features of one recurrent invocation.

    Attention's grid has a fixed number of programs, which are dealt the units of a list in waves, dearest
    first; every item is one unit per head. `path_tiles` are the history tiles that the busiest program runs
    over all `waves`, the critical path. `tiles` are the history tiles of all items together, the total work.
    `light_tiles` and `light_path_tiles` are those of the two that belong to light items, which cost what
    items in tiles of `light_rows` do, whatever `tile_rows`, the height of the others. `partials` are rows of
    partial results of items that were cut, `joined_splits` the most that one row is joined from, one after
    another.
    `is_few` says that other kernels attend, those for few rows.
    """

    bucket: int
    tile_rows: int
    items: int
    waves: int
    tiles: int
    path_tiles: int
    light_rows: int
    light_tiles: int
    light_path_tiles: int
    joined_splits: int
    partials: int
    is_few: bool


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the executor cuts batches: row counts of its programs and query-tile heights (both ascending), keys
    of a history tile and of a split, attention work units that run at once, rows of partial results and items
    beyond one per bucket row that there is room for, and units per item.

    Items of up to `short_rows` rows run in the lowest tiles beside taller ones; buckets of up to `few_rows`
    rows have attention kernels of their own. 0: there is no such thing. `tall_margin` is SPLIT_MARGIN of
    tiles of more than a slot. Where taller tiles than a slot are and tiles of one slot are not, the tall ones
    have two sides of a slot each, and items of one side are light.
    """

    row_buckets: tuple[int, ...]
    tile_rows: tuple[int, ...]
    tile_keys: int
    split_keys: int
    attention_slots: int
    attention_partials: int
    attention_spare_items: int
    num_heads: int
    short_rows: int = 0
    few_rows: int = 0
    tall_margin: float = SPLIT_MARGIN

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
        return self.attended(tuple(ranges))[0]

    def attended(self, ranges: Sequence[ScheduledRange]) -> tuple[Key, int, int]:
        """The key of `ranges`, and what `Work.attention_work` says of them."""
        tile_keys = self.tile_keys
        _, _, _, starts, counts, *_ = zip(*ranges, strict=True)
        rows = sum(counts)
        if rows == len(starts):
            kv_tokens = sum(starts) + rows
            return tuple([start // tile_keys for start in starts]), kv_tokens, kv_tokens
        key, kv_tokens, pairs = [], sum(starts) + rows, 0
        for start, count in zip(starts, counts, strict=True):
            if count == 1:
                key.append(start // tile_keys)
                pairs += start + 1
            else:
                key.append((start, count))
                pairs += count * start + count * (count + 1) // 2
        return tuple(key), kv_tokens, pairs

    def features(self, key: Key) -> Features:
        """The features of a batch of `key`. 40 rows from 280 in tiles of 64 are one item of 319 // 64 + 1 = 5
        history tiles."""
        tile_keys, height = self.tile_keys, self._height(key)
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
        rows = sum(heights)
        programs = max(1, self.attention_slots * SLOT_ROWS // max(SLOT_ROWS, height))
        per_split = self.split_keys // tile_keys
        num_splits = sum([end // per_split for end in ends]) + len(ends)
        margin = self.tall_margin if height > SLOT_ROWS else SPLIT_MARGIN
        most_splits = margin * max(1, -(-num_splits * self.num_heads // programs))
        joined_splits = partials = 0
        lengths, cut_heights = [end + 1 for end in ends], heights
        if max(ends) // per_split + 1 > most_splits:
            lengths, cut_heights = [], []
            spare_items = self.bucket(rows) + self.attention_spare_items - len(ends)
            spare_partials = self.attention_partials
            for end, tile in zip(ends, heights, strict=True):
                splits = end // per_split + 1
                if splits > most_splits:
                    spare_items -= splits - 1
                    spare_partials -= tile * splits
                if splits > most_splits and min(spare_items, spare_partials) >= 0:
                    lengths += [per_split] * (splits - 1) + [end + 1 - per_split * (splits - 1)]
                    cut_heights += [tile] * splits
                    joined_splits = max(joined_splits, splits)
                    partials += tile * splits
                else:
                    lengths.append(end + 1)
                    cut_heights.append(tile)
        has_sides = height > SLOT_ROWS and SLOT_ROWS not in self.tile_rows
        most_rows = SLOT_ROWS if has_sides else self.short_rows
        cut = list(zip(lengths, cut_heights, strict=True))
        lights = [length if tile <= most_rows else 0 for length, tile in cut]
        path, light_path = self._path(cut, lights, programs)
        bucket, waves = self.bucket(rows), -(-len(lengths) * self.num_heads // programs)
        return Features(
            bucket, height, len(lengths), waves, sum(lengths), path,
            SLOT_ROWS if has_sides else self.tile_rows[0], sum(lights), light_path, joined_splits, partials,
            bucket <= self.few_rows,
        )  # fmt: skip

    def _height(self, key: Key) -> int:
        """Tile height of the items that are not short, as `executor.kernels.worklist.Packer.tile_class`."""
        longest = max([1 if isinstance(item, int) else item[1] for item in key])
        height = next((tile for tile in self.tile_rows if tile >= longest), self.tile_rows[-1])
        if self.short_rows and height > SLOT_ROWS and SLOT_ROWS in self.tile_rows:
            ranges = [(item * self.tile_keys, 1) if isinstance(item, int) else item for item in key]
            short_tiles = tall_tiles = 0
            for start, count in ranges:
                end_tile = (start + count - 1) // self.tile_keys + 1
                if count <= self.short_rows:
                    short_tiles += end_tile
                else:
                    tall_tiles += end_tile * -(-count // height)
            if 2 * short_tiles > tall_tiles:
                height = SLOT_ROWS
        return height

    def _path(self, cut: Sequence[tuple[int, int]], lights: Sequence[int], programs: int) -> tuple[int, int]:
        """History tiles of the busiest program of items of (history tiles, rows), and those of them that
        belong to light items.

        Without short items program p runs units p, p + programs, ...: the first runs the longest of every
        wave. With them every other wave is dealt out backwards.
        """
        lengths = [length for length, _ in cut]
        num_heads, num_units = self.num_heads, len(lengths) * self.num_heads
        if not self.short_rows:
            if num_units <= programs:
                return max(lengths), 0
            ordered = sorted(lengths, reverse=True)
            return sum([ordered[unit // num_heads] for unit in range(0, num_units, programs)]), 0
        costs = [(SHORT_COST if rows <= self.short_rows else TALL_COST) * length for length, rows in cut]
        if num_units <= programs:
            busiest = costs.index(max(costs))
            return lengths[busiest], lights[busiest]
        order = sorted(range(len(costs)), key=lambda item: -costs[item])
        busiest_cost, busiest_items = -1, [0]
        for program in range(0, programs, gcd(programs, num_heads)):  # those between run the same items
            units = [
                first + (programs - 1 - program if first // programs % 2 else program)
                for first in range(0, num_units, programs)
            ]
            mine = [order[unit // num_heads] for unit in units if unit < num_units]
            cost = sum([costs[item] for item in mine])
            if cost > busiest_cost:
                busiest_cost, busiest_items = cost, mine
        return sum([lengths[item] for item in busiest_items]), sum([lights[item] for item in busiest_items])
