"""What backends ask the future: which requests a CODA batch ends. Policies and the scheduler never import this."""

from collections.abc import Mapping

from policies.core.batch import ExecutionBatch, Stage
from policies.core.request import Oracle
from policies.core.runlog import RequestRecord


def last_tokens(batch: ExecutionBatch, records: Mapping[int, RequestRecord], oracle: Oracle) -> frozenset[int]:
    """Requests whose token made by `batch` is their last: position p of a prompt of P tokens makes token p - P + 2."""
    if batch.stage is not Stage.CODA:
        return frozenset()
    return frozenset(
        item.request_id
        for item in batch.ranges
        if item.token_start - records[item.request_id].request.prompt_tokens + 2 >= oracle.output_tokens(item.request_id)
    )
