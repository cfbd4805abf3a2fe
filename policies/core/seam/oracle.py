"""What backends ask the future: whom a CODA batch ends, which rows leave early. Policies and the scheduler
never import this."""

from collections.abc import Iterator, Mapping

from policies.core.engine.runlog import RequestRecord
from policies.core.seam.batch import ExecutionBatch, ScheduledRange, Stage
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import ExitOracle, Oracle


def last_tokens(
    batch: ExecutionBatch, records: Mapping[int, RequestRecord], oracle: Oracle
) -> frozenset[int]:
    """Requests whose token made by `batch` is their last: position p of a prompt of P tokens makes token p -
    P + 2.

    `records` are those of requests that have not ended. A deep queue may hold a CODA of one that has:
    surplus, which ends nothing.
    """
    if batch.stage is not Stage.CODA:
        return frozenset()
    return frozenset(
        [
            request_id
            for request_id, _, _, position, _, _, _, _ in batch.ranges
            if (record := records.get(request_id)) is not None
            and position - record.request.prompt_tokens + 2 == oracle.output_tokens(request_id)
        ]
    )


def early_exits(batch: ExecutionBatch, rule: ExitRule, oracle: ExitOracle) -> frozenset[int]:
    """Requests whose decode row in `batch` leaves after the depths it runs, as `Completion.exits` wants
    them."""
    return frozenset(
        item.request_id
        for item, loops in _leaving(batch, rule, oracle)
        if item.depth < loops <= item.depth + batch.loop_count
    )


def surplus_rows(batch: ExecutionBatch, rule: ExitRule, oracle: ExitOracle) -> frozenset[int]:
    """Requests whose decode row in `batch` is surplus: its token leaves before the depths that the batch
    runs."""
    return frozenset(item.request_id for item, loops in _leaving(batch, rule, oracle) if loops <= item.depth)


def _leaving(
    batch: ExecutionBatch, rule: ExitRule, oracle: ExitOracle
) -> Iterator[tuple[ScheduledRange, int]]:
    """Decode rows of `batch` whose token leaves before `rule.max_loops`, and the loops it runs."""
    if not rule.has_decisions:
        return
    for item in batch.ranges:
        if item.stage is Stage.RECURRENT:
            loops = max(oracle.exit_loops(item.request_id, item.token_start), rule.min_loops)
            if loops < rule.max_loops:
                yield item, loops
