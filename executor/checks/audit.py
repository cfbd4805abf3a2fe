"""The address audit: every row's addresses recomputed from first principles and compared with what the packer
wrote.

Independent of `executor.packing` and of how the work list is made: it starts from the batch, the prompts and
what was transferred, and walks token by token. Covers what a row is read from and written to, every K/V tile
that attention reads, that a reused prefix holds what it should and is never written to, and, by looking at
the pool once a batch has run, that a token that left early has its K/V in the planes that it skipped. Slow;
for tests and `--audit`.
"""

from collections.abc import Mapping

import numpy as np
import torch

from executor.checks.slots import Slot, Slots
from executor.errors import AuditError
from executor.kernels.kv import KVPools
from executor.kernels.meta import HEADER_COMBINES, HEADER_ITEMS, HEADER_ROWS, HostMeta
from executor.kernels.worklist import SPLIT_KEYS, TILE_KEYS, TILES_PER_SPLIT
from policies.core.seam.batch import PROMPT_STAGES, ScheduledRange, Stage, Transfers, Work

SCALAR_FIELDS = ("slots", "token_ids", "sampled_rows", "source_rows", "target_rows")
LOOP_FIELDS = ("positions", "gates")


class AddressAudit:
    """Checks packed batches of a model with `num_loops` depths and `planes` depth planes of K/V.

    A ring has `ring_rows` prompt rows, of which a run uses `resident_chunks` slots of `chunk_tokens`, and
    `decode_rows` rows and places for the tokens in the loop, by position. `kv` is the device's pool with its
    block-group table. With `has_gate` the exit gate is told the decode rows.
    """

    def __init__(
        self,
        num_loops: int,
        planes: int,
        block_size: int,
        chunk_tokens: int,
        resident_chunks: int,
        ring_rows: int,
        kv: KVPools,
        has_gate: bool = False,
        decode_rows: int = 1,
    ) -> None:
        self._num_loops = num_loops
        self._planes = planes
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._resident_chunks = resident_chunks
        self._ring_rows = ring_rows
        self._kv = kv
        self._has_gate = has_gate
        self._decode_rows = decode_rows
        self._slots = Slots(planes, block_size)
        self.rows_checked = 0
        self.batches_checked = 0

    def transfer(self, transfers: Transfers, prompts: Mapping[int, np.ndarray]) -> None:
        """Take note of what is transferred before the next batch; `prompts` has those of the requests that
        are let in."""
        self._slots.transfer(transfers, prompts)

    def check(
        self,
        work: Work,
        host: HostMeta,
        surplus: frozenset[int] = frozenset(),
        known: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        """Raise `AuditError` at the first address that differs; decode rows of the requests in `surplus`
        write nothing, those that embed one of the `known` tokens are given it."""
        fields = SCALAR_FIELDS + (LOOP_FIELDS if work.loop_count else ())
        found = {name: getattr(host, name).tolist() for name in fields}
        row = 0
        for item in work.ranges:
            request = self._slots.taken[item.request_id]
            for position in range(item.token_start, item.token_end):
                expected = self._expected(work, item, request, position)
                if item.stage is Stage.RECURRENT and item.request_id in surplus:
                    expected |= {"slots": -1, "target_rows": -1}
                if item.stage is Stage.RECURRENT and item.embeds:
                    expected["token_ids"] = (known or {}).get((item.request_id, position), -1)
                for name, value in expected.items():
                    if found[name][row] != value:
                        raise self._error(
                            item,
                            position,
                            f"{name} is {found[name][row]}, first principles say {value}",
                        )
                if work.loop_count and position < request.origin:
                    raise self._error(item, position, f"writes to a reused prefix of {request.origin} tokens")
                if work.loop_count and item.stage in PROMPT_STAGES:
                    self._slots.wrote(
                        item.request_id,
                        position,
                        self._plane(item),
                        work.loop_count if self._planes > 1 else 1,
                    )
                row += 1
        for name in fields:
            if name != "positions" and any(value != -1 for value in found[name][row:]):
                raise AuditError(f"batch {self.batches_checked}: a padding row has an address in {name}")
        if work.loop_count:
            if host.header[HEADER_ROWS] != row:
                raise AuditError(
                    f"batch {self.batches_checked}: its header counts {host.header[HEADER_ROWS]} rows, it "
                    f"has {row}"
                )
            self._check_reads(work, host)
        self.rows_checked += row
        self.batches_checked += 1

    def _expected(self, work: Work, item: ScheduledRange, request: Slot, position: int) -> dict[str, int]:
        expected = self._hidden_rows(work, item.stage, item.depth, item.embeds, request, position)
        has_left = bool(work.exit_depths) and item.stage is Stage.CODA
        plane = self._plane(item) if work.loop_count else item.depth - 1 if has_left else -1
        # A staged row may have no blocks yet: they come when its chunk is to run.
        expected["slots"] = self._slot(request, position, plane) if plane >= 0 else -1
        if work.loop_count:
            is_gated = self._has_gate and item.stage is Stage.RECURRENT
            expected.update(
                positions=position, gates=request.ring_id * self._num_loops + item.depth if is_gated else -1
            )
        return expected

    def check_copies(self, work: Work) -> None:
        """Raise `AuditError` unless each token of `work`, which has run, has in the planes that it skipped
        what it has in the plane of its last loop."""
        for item in work.ranges if work.exit_depths else ():
            request, position = self._slots.taken[item.request_id], item.token_start
            for plane in range(item.depth, self._planes) if item.depth else ():
                for name, pool in (("K", self._kv.k), ("V", self._kv.v)):
                    block, offset = divmod(self._slot(request, position, plane), self._block_size)
                    last = block - plane + item.depth - 1
                    if not torch.equal(pool[:, block, :, offset], pool[:, last, :, offset]):
                        sentence = f"plane {plane} has not the {name} of plane {item.depth - 1}, its last"
                        raise self._error(item, position, sentence)

    def _slot(self, request: Slot, position: int, plane: int) -> int:
        group = request.block_groups[position // self._block_size]
        return (group * self._planes + plane) * self._block_size + position % self._block_size

    def _plane(self, item: ScheduledRange) -> int:
        return item.depth if self._planes > 1 else 0

    def _hidden_rows(
        self, work: Work, stage: Stage, depth: int, embeds: bool, request: Slot, position: int
    ) -> dict[str, int]:
        first = request.ring_id * (self._ring_rows + self._decode_rows)
        decode_row = first + self._ring_rows + position % self._decode_rows
        tokens = request.ring_id * self._decode_rows
        chunk, offset = divmod(position - request.origin, self._chunk_tokens)
        ring_row = first + chunk % self._resident_chunks * self._chunk_tokens + offset
        if stage is Stage.PRELUDE:
            return {
                "token_ids": -1,
                "sampled_rows": tokens + position % self._decode_rows,
                "source_rows": -1,
                "target_rows": decode_row,
            }
        if work.stage is Stage.CODA:
            return {
                "token_ids": -1,
                "sampled_rows": tokens + (position + 1) % self._decode_rows,
                "source_rows": decode_row,
                "target_rows": -1,
            }
        if stage is Stage.RECURRENT:
            return {
                "token_ids": -1,
                "sampled_rows": tokens + position % self._decode_rows if embeds else -1,
                "source_rows": -1 if embeds else decode_row,
                "target_rows": decode_row,
            }
        is_last_token = position == len(request.prompt) - 1
        leaves_loop = depth + work.loop_count == self._num_loops
        target = ring_row if not leaves_loop else decode_row if is_last_token else -1
        token = int(request.prompt[position]) if embeds else -1
        return {
            "token_ids": token,
            "sampled_rows": -1,
            "source_rows": -1 if embeds else ring_row,
            "target_rows": target,
        }

    def _check_reads(self, work: Work, host: HostMeta) -> None:
        """Every row reads the history [0, position] of its own request and plane once, through a table that
        names its blocks."""
        pieces_of: dict[int, list[list[int]]] = {}
        for piece in host.items[: host.header[HEADER_ITEMS]].tolist():
            for row in range(piece[0], piece[0] + piece[1]):
                pieces_of.setdefault(row, []).append(piece)
        combines = {entry[0]: entry for entry in host.combines[: host.header[HEADER_COMBINES]].tolist()}
        partials: set[int] = set()
        row = 0
        for item in work.ranges:
            request = self._slots.taken[item.request_id]
            table = tuple(self._kv.groups[request.ring_id, : len(request.block_groups)].tolist())
            if table != request.block_groups:
                sentence = (
                    f"the device's table names groups {table}, the transfers gave {request.block_groups}"
                )
                raise self._error(item, item.token_start, sentence)
            for position in range(item.token_start, item.token_end):
                pieces = sorted(pieces_of.pop(row, []), key=lambda piece: piece[5])
                wrong = self._wrong_read(
                    row,
                    position,
                    request.ring_id,
                    self._plane(item),
                    pieces,
                    combines.pop(row, None),
                    partials,
                )
                if wrong is not None:
                    raise self._error(item, position, wrong)
                row += 1
        if pieces_of or combines:
            raise AuditError(f"batch {self.batches_checked}: attention pieces on rows beyond its {row}")

    def _wrong_read(
        self,
        row: int,
        position: int,
        ring: int,
        plane: int,
        pieces: list[list[int]],
        combine: list[int] | None,
        partials: set[int],
    ) -> str | None:
        """What is wrong with the attention of one row, or None.

        Position 700 needs tiles 0 to 10 of 64 keys: one item [0, 11) of all of them, or items [0, 8) and [8,
        11) whose partial results, rows that no other result uses, a combine entry of 2 splits joins.
        """
        next_tile = 0
        for first_row, _, first_position, *place, first_tile, end_tile, first_partial in pieces:
            found, expected = (
                (first_position + row - first_row, *place, first_tile),
                (position, ring, plane, next_tile),
            )
            if found != expected:
                return (
                    f"attention reads (position, ring, plane, tile) {found}, first principles say {expected}"
                )
            if combine is not None and first_tile * TILE_KEYS <= position:
                partial = first_partial + row - first_row
                joined = combine[1] + first_tile // TILES_PER_SPLIT * combine[2]
                if partial != joined or partial in partials:
                    return f"tile {first_tile} leaves partial row {partial}, the one combined is {joined}"
                partials.add(partial)
            next_tile = end_tile
        if next_tile * TILE_KEYS <= position:
            return f"attention reads no more than tiles [0, {next_tile}) of {TILE_KEYS} keys"
        if combine is None:
            return f"{len(pieces)} splits are never combined" if len(pieces) > 1 else None
        wanted = position // SPLIT_KEYS + 1
        return (
            None
            if combine[3] == wanted
            else f"{combine[3]} splits are combined, first principles say {wanted}"
        )

    def _error(self, item: ScheduledRange, position: int, sentence: str) -> AuditError:
        return AuditError(
            f"batch {self.batches_checked}, request {item.request_id}, position {position}, depth "
            f"{item.depth}: {sentence}"
        )
