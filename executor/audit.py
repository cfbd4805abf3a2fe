"""The address audit: every row's addresses recomputed from first principles and compared with what the packer wrote.

Independent of `executor.packing` and the work list: it starts from the batch, the block groups that admission gave and the prompt,
and walks token by token. Slow; for tests and `--audit`.
"""

from collections.abc import Mapping

from executor.kernels.meta import HostMeta
from executor.packing import RunningRequest
from policies.core.batch import ExecutionBatch, Stage


class AuditError(Exception):
    """An address is not what the design says. Names batch, request, position, depth, and both values."""


class AddressAudit:
    """Checks packed batches of a model with `planes` depths.

    A ring has `ring_rows` prompt rows, of which a run uses `resident_chunks` slots of `chunk_tokens`, and one decode row.
    """

    def __init__(self, planes: int, block_size: int, chunk_tokens: int, resident_chunks: int, ring_rows: int) -> None:
        self._planes = planes
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._resident_chunks = resident_chunks
        self._ring_rows = ring_rows
        self.rows_checked = 0

    def check(self, batch: ExecutionBatch, host: HostMeta, requests: Mapping[int, RunningRequest]) -> None:
        """Raise `AuditError` at the first row whose position, slot, token, source or target differs."""
        row = 0
        for item in batch.ranges:
            request = requests[item.request_id]
            for position in range(item.token_start, item.token_start + item.token_count):
                expected = {
                    "positions": position,
                    "slots": self._slot(request, position, item.depth),
                    **self._hidden_rows(batch, item.stage, item.depth, item.embeds, request, position),
                }
                for name, value in expected.items():
                    found = int(getattr(host, name)[row])
                    if found != value:
                        raise AuditError(
                            f"batch {batch.seq}, request {item.request_id}, position {position}, depth {item.depth}: {name} is {found}, "
                            f"first principles say {value}"
                        )
                row += 1
        for name in ("slots", "token_ids", "sampled_rows", "source_rows", "target_rows"):
            if (getattr(host, name)[row:] != -1).any():
                raise AuditError(f"batch {batch.seq}: a padding row has an address in {name}")
        self.rows_checked += row

    def _slot(self, request: RunningRequest, position: int, depth: int) -> int:
        group = request.block_groups[position // self._block_size]
        return (group * self._planes + depth) * self._block_size + position % self._block_size

    def _hidden_rows(
        self, batch: ExecutionBatch, stage: Stage, depth: int, embeds: bool, request: RunningRequest, position: int
    ) -> dict[str, int]:
        first = request.ring_id * (self._ring_rows + 1)
        decode_row = first + self._ring_rows
        chunk, offset = divmod(position, self._chunk_tokens)
        ring_row = first + chunk % self._resident_chunks * self._chunk_tokens + offset
        if stage is Stage.PRELUDE:
            return {"token_ids": -1, "sampled_rows": request.ring_id, "source_rows": -1, "target_rows": decode_row}
        if stage is Stage.CODA:
            return {"token_ids": -1, "sampled_rows": request.ring_id, "source_rows": decode_row, "target_rows": -1}
        if stage is Stage.RECURRENT:
            return {"token_ids": -1, "sampled_rows": -1, "source_rows": decode_row, "target_rows": decode_row}
        if depth + batch.loop_count < self._planes:
            target = ring_row
        else:
            target = decode_row if position == len(request.prompt) - 1 else -1
        token = int(request.prompt[position]) if embeds else -1
        return {"token_ids": token, "sampled_rows": -1, "source_rows": -1 if embeds else ring_row, "target_rows": target}
