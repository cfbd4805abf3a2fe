"""What the kernels read about a batch: one int32 buffer with fixed offsets, so that one copy updates
everything a graph reads.

A buffer belongs to a row bucket. Fields in order (words): header, the row fields (`max_rows` each), combine
entries, work items. Items come last and only their used prefix is copied. `executor.kernels.worklist` fills
the host side.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

HEADER_WORDS = 4
HEADER_ROWS, HEADER_ITEMS, HEADER_COMBINES = 0, 1, 2
ROW_FIELDS = ("positions", "slots", "token_ids", "sampled_rows", "source_rows", "target_rows", "gates")
"""Order matters: `Packer.pack` fills neighbours together."""
COMBINE_WORDS = 4
"""Of one row whose history was split: its row, its first partial row, the distance to the next split's, the
number of splits."""
ITEM_WORDS = 8
"""Of one work item: first row, number of rows, position of the first row, ring, depth plane, first history
tile, end history tile, first partial row."""
MAX_PARTIALS = 32768
"""Rows of the attention workspace: 512 query rows over 32,768 tokens of history, every 512 of them apart.
With 8,192 one of four tiles of 128 rows over 8,192 tokens stayed whole and took the batch from 5 to 11 ms."""


@dataclass(frozen=True, slots=True)
class MetaLayout:
    """Capacities of one metadata buffer: rows of the bucket, attention work items, and rows of partial
    results.

    `max_partials` is the height of the attention workspace; the planner falls back to unsplit items when it
    is full.
    """

    max_rows: int
    max_items: int
    max_partials: int

    @classmethod
    def for_rows(cls, max_rows: int, max_partials: int = MAX_PARTIALS) -> "MetaLayout":
        """Capacities that any batch of `max_rows` rows fits: every row may be a tile of its own, splits come
        on top."""
        return cls(max_rows, max_rows + 1024, max_partials)

    @property
    def combine_offset(self) -> int:
        return HEADER_WORDS + len(ROW_FIELDS) * self.max_rows

    @property
    def item_offset(self) -> int:
        return self.combine_offset + COMBINE_WORDS * self.max_rows

    @property
    def num_words(self) -> int:
        return self.item_offset + ITEM_WORDS * self.max_items

    def views(self, buffer: Any) -> dict[str, Any]:
        """Named views of an int32 `buffer` (numpy or torch) of `num_words`."""
        rows = {
            name: buffer[HEADER_WORDS + i * self.max_rows : HEADER_WORDS + (i + 1) * self.max_rows]
            for i, name in enumerate(ROW_FIELDS)
        }
        return {
            "header": buffer[:HEADER_WORDS],
            "row_fields": buffer[HEADER_WORDS : self.combine_offset].reshape(len(ROW_FIELDS), self.max_rows),
            **rows,
            "combines": buffer[self.combine_offset : self.item_offset].reshape(self.max_rows, COMBINE_WORDS),
            "items": buffer[self.item_offset : self.num_words].reshape(self.max_items, ITEM_WORDS),
        }


@dataclass(frozen=True, slots=True)
class HostMeta:
    """The host side: a (pinned) torch buffer and numpy views of the same memory. Not to be rewritten before
    its copy has run."""

    layout: MetaLayout
    buffer: torch.Tensor  # [num_words] int32
    header: np.ndarray
    row_fields: np.ndarray  # [len(ROW_FIELDS), max_rows]: the seven below, one under another
    positions: np.ndarray
    slots: np.ndarray
    token_ids: np.ndarray
    sampled_rows: np.ndarray
    source_rows: np.ndarray
    target_rows: np.ndarray
    gates: np.ndarray
    combines: np.ndarray  # [max_rows, COMBINE_WORDS]
    items: np.ndarray  # [max_items, ITEM_WORDS]

    @classmethod
    def allocate(cls, layout: MetaLayout, pin: bool) -> "HostMeta":
        buffer = torch.zeros(layout.num_words, dtype=torch.int32, pin_memory=pin)
        return cls(layout=layout, buffer=buffer, **layout.views(buffer.numpy()))


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """The device side: static tensors whose addresses a captured graph may keep.

    Padding rows have slot -1 (nothing is written), position 0, and -1 in every row index. In `token_ids` -1
    means that the row's token is `sampled[sampled_rows]`; where both are -1 the row is not embedded but
    gathered from hidden row `source_rows`.
    """

    layout: MetaLayout
    buffer: torch.Tensor  # [num_words] int32
    header: torch.Tensor  # [HEADER_WORDS]
    row_fields: torch.Tensor  # [len(ROW_FIELDS), max_rows]: the seven below, one under another
    positions: torch.Tensor  # [max_rows]
    slots: torch.Tensor  # [max_rows], block * block_size + offset of the first loop's plane
    token_ids: torch.Tensor  # [max_rows]
    sampled_rows: torch.Tensor  # [max_rows]
    source_rows: torch.Tensor  # [max_rows]
    target_rows: torch.Tensor  # [max_rows]
    gates: torch.Tensor  # [max_rows], ring * num_loops + depth of a decode row that an exit gate decides on
    combines: torch.Tensor  # [max_rows, COMBINE_WORDS]
    items: torch.Tensor  # [max_items, ITEM_WORDS]

    @classmethod
    def allocate(cls, layout: MetaLayout, device: torch.device) -> "BatchMeta":
        buffer = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        return cls(layout=layout, buffer=buffer, **layout.views(buffer))

    def update(self, host: HostMeta, num_words: int) -> None:
        """Enqueue the one copy that brings a packed batch to the device."""
        self.buffer[:num_words].copy_(host.buffer[:num_words], non_blocking=True)
