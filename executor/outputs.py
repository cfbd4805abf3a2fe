"""Output token ids of a run, by request: what was delivered, and nothing that a deep queue sampled beyond
it."""

from collections.abc import Iterable

from policies.core.engine.runlog import RequestRecord


class Outputs:
    """Takes tokens as CODA batches are collected, and learns from a request's record how many were delivered.

    With several batches in flight a request that ends may have been sampled from again: surplus.
    """

    def __init__(self) -> None:
        self.by_request: dict[int, list[int]] = {}
        self._ended: set[int] = set()

    def of(self, request_id: int) -> list[int]:
        """The tokens of a request that runs, those kept over a preemption included."""
        return self.by_request[request_id]

    def unended(self, request_ids: Iterable[int]) -> frozenset[int]:
        """Those of `request_ids` whose client still waits for tokens."""
        return frozenset(request_ids) - self._ended

    def sampled(self, request_id: int, token: int) -> None:
        """A CODA row of the request has made `token`."""
        if request_id not in self._ended:
            self.by_request.setdefault(request_id, []).append(token)

    def ended(self, record: RequestRecord) -> None:
        """The request has ended, or its run has: it keeps what was delivered."""
        request_id = record.request.request_id
        self._ended.add(request_id)
        tokens = self.by_request.get(request_id)
        if tokens is not None:
            del tokens[record.output_tokens :]
