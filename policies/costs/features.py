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
    `short_tiles` and `short_path_tiles` are those of the two that belong to short items, which run in the
    lowest query tiles whatever `tile_rows`, the height of the others. `partials` are rows of partial results
    of items that were cut, `joined_splits` the most that one row is joined from, one after another.
    `is_few` says that other kernels attend, those for few rows.
    """

    bucket: int
    tile_rows: int
    items: int
    waves: int
    tiles: int
    path_tiles: int
    short_tiles: int
    short_path_tiles: int
    joined_splits: int
    partials: int
    is_few: bool


class Common(NamedTuple):
    """Single rows and longer `ranges` that many batches begin with: history tiles of each row and of all,
    the last tile that a row ends in, and into how many splits rows might be cut."""

    key: Key
    ranges: tuple[tuple[int, int], ...]
    lengths: list[int]
    tiles: int
    last_end: int
    splits: int


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the executor cuts batches: row counts of its programs and query-tile heights (both ascending), keys
    of a history tile and of a split, attention work units that run at once, rows of partial results and items
    beyond one per bucket row that there is room for, and units per item.

    Items of up to `short_rows` rows run in the lowest tiles beside taller ones; buckets of up to `few_rows`
    rows have attention kernels of their own. 0: there is no such thing. `tall_margin` is SPLIT_MARGIN of
    tiles of more than a slot.
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
        shorts: Sequence[int] = ()
        if self.short_rows:
            shorts = [
                length if tile <= self.short_rows else 0
                for length, tile in zip(lengths, cut_heights, strict=True)
            ]
        path, short_path = self._path(lengths, shorts, programs)
        bucket, waves = self.bucket(rows), -(-len(lengths) * self.num_heads // programs)
        return Features(
            bucket, height, len(lengths), waves, sum(lengths), path, sum(shorts), short_path, joined_splits,
            partials, bucket <= self.few_rows,
        )  # fmt: skip

    def common(self, key: Key) -> Common:
        """What batches have in common that begin with `key`."""
        ends = [item for item in key if isinstance(item, int)]
        per_split = self.split_keys // self.tile_keys
        return Common(
            key,
            tuple([item for item in key if not isinstance(item, int)]),
            [end + 1 for end in ends],
            sum(ends) + len(ends),
            max(ends, default=0),
            sum([end // per_split for end in ends]) + len(ends),
        )

    def beside(self, common: Common, key: Key) -> Features:
        """`features` of a batch of `common` and then `key`. Where nothing is cut and items are of one kind,
        only the ranges of several rows are looked at again."""
        ranges = [*common.ranges, *[item for item in key if not isinstance(item, int)]]
        whole = (*common.key, *key)
        if self.short_rows or not ranges or len(ranges) < len(common.ranges) + len(key):
            return self.features(whole)
        tile_keys, per_split = self.tile_keys, self.split_keys // self.tile_keys
        longest = max([count for _, count in ranges])
        height = next((tile for tile in self.tile_rows if tile >= longest), self.tile_rows[-1])
        ends: list[int] = []
        rows = len(common.lengths)
        for start, count in ranges:
            end = start + count
            rows += count
            ends += [(min(first + height, end) - 1) // tile_keys for first in range(start, end, height)]
        programs = max(1, self.attention_slots * SLOT_ROWS // max(SLOT_ROWS, height))
        num_splits = common.splits + sum([end // per_split for end in ends]) + len(ends)
        margin = self.tall_margin if height > SLOT_ROWS else SPLIT_MARGIN
        most_splits = margin * max(1, -(-num_splits * self.num_heads // programs))
        if max(common.last_end, *ends) // per_split + 1 > most_splits:
            return self.features(whole)
        lengths = [end + 1 for end in ends]
        path, _ = self._path([*common.lengths, *lengths], (), programs)
        items, bucket = len(common.lengths) + len(ends), self.bucket(rows)
        waves = -(-items * self.num_heads // programs)
        tiles = common.tiles + sum(lengths)
        return Features(bucket, height, items, waves, tiles, path, 0, 0, 0, 0, bucket <= self.few_rows)

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

    def _path(self, lengths: Sequence[int], shorts: Sequence[int], programs: int) -> tuple[int, int]:
        """History tiles of the busiest program, and those of them that belong to short items.

        Without short items program p runs units p, p + programs, ...: the first runs the longest of every
        wave. With them every other wave is dealt out backwards.
        """
        num_heads, num_units = self.num_heads, len(lengths) * self.num_heads
        if not self.short_rows:
            if num_units <= programs:
                return max(lengths), 0
            ordered = sorted(lengths, reverse=True)
            return sum([ordered[unit // num_heads] for unit in range(0, num_units, programs)]), 0
        costs = [
            SHORT_COST * length if short else TALL_COST * length
            for length, short in zip(lengths, shorts, strict=True)
        ]
        if num_units <= programs:
            busiest = costs.index(max(costs))
            return lengths[busiest], shorts[busiest]
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
        return sum([lengths[item] for item in busiest_items]), sum([shorts[item] for item in busiest_items])
