"""The part of a run that counts, and the sums over it. A run without `measure` is measured whole.

A request counts when it arrives within the span. Throughputs count what *ended* within it, whoever had
arrived before: work that goes in at one end and comes out at the other is counted once. Goodput counts who
arrived, met and ended within it. A batch counts when the device begins it within the span.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from policies.core.engine.runlog import BatchTotals, RequestRecord, RunLog
from policies.core.seam.batch import ExecutionBatch, Stage, Work
from policies.core.seam.events import COMPONENTS, Completion
from policies.core.seam.objectives import EVERYTHING, Window
from results.batchlog import LoggedBatch


@dataclass(frozen=True, slots=True)
class Span:
    """From `from_ns` on and before `to_ns` (None: to the end), without the first `skip_requests` requests.

    32 requests skipped, of which the last arrived at 3 s and the next at 4 s: the span begins at 4 s.
    """

    skip_requests: int = 0
    from_ns: int | None = None
    to_ns: int | None = None

    @classmethod
    def of(cls, records: Iterable[RequestRecord], window: Window) -> "Span":
        """The span of a run whose `records` come in order of arrival; nothing is within when it skips them
        all."""
        if window == EVERYTHING:
            return cls()
        first_ns = from_ns = None
        for number, record in enumerate(records):
            arrival_ns = record.request.arrival_ns
            first_ns = arrival_ns if first_ns is None else first_ns
            if number >= window.skip_requests and arrival_ns >= first_ns + 1e9 * window.skip_s:
                from_ns = arrival_ns if window.skip_requests else first_ns + round(1e9 * window.skip_s)
                break
        to_ns = None if window.until_s is None else (first_ns or 0) + round(1e9 * window.until_s)
        if from_ns is None:  # nobody arrives in it
            return cls(window.skip_requests, 0, 0)
        return cls(window.skip_requests, from_ns, to_ns)

    @property
    def is_whole(self) -> bool:
        return self == WHOLE

    def has(self, at_ns: int) -> bool:
        return (self.from_ns is None or at_ns >= self.from_ns) and (self.to_ns is None or at_ns < self.to_ns)

    def has_request(self, record: RequestRecord) -> bool:
        return record.number >= self.skip_requests and self.has(record.request.arrival_ns)

    def as_summary(
        self, first_arrival_ns: int, num_left_out: int, run: BatchTotals, measured: BatchTotals
    ) -> dict[str, Any]:
        """What the summary says of it: `run` are the sums over all batches, and `run_s` what the whole run
        took."""
        return {
            "skip_requests": self.skip_requests,
            "from_ns": self.from_ns,
            "to_ns": self.to_ns,
            "run_s": max(run.last_finished_ns - first_arrival_ns, 0) / 1e9,
            "left_out_requests": num_left_out,
            "left_out_batches": run.num_batches - measured.num_batches,
        }


WHOLE = Span()


def totals_within(batches: Iterable[LoggedBatch], span: Span) -> BatchTotals:
    """The sums of a log over the batches of `span`, as the run's own log makes them."""
    log = RunLog()
    for item in batches:
        if span.has(item.started_ns):
            work = Work(Stage(item.stage), item.loop_count, (), item.rows, item.num_requests)
            batch = ExecutionBatch(item.seq, work, item.submitted_ns, item.after_seq)
            components_ns = [item.row.whole_or_none(f"{name}_ns") for name in COMPONENTS]
            log.completed(
                batch,
                Completion(
                    item.seq,
                    item.collected_ns,
                    item.started_ns,
                    item.finished_ns,
                    select_ns=item.select_ns,
                    host_ns=item.host_ns,
                    limit_ns=item.row.whole_or_none("limit_ns") or 0,
                    components_ns=tuple([value for value in components_ns if value is not None]),
                ),
            )
    return log.totals


def run_s(summary: Mapping[str, Any]) -> float:
    """What a whole run took, whatever part of it was measured."""
    return float((summary.get("measured") or {}).get("run_s", summary["duration_s"]))


def note_of(measured: Mapping[str, Any], num_requests: int) -> str:
    """What a summary's notes say of a run that was not measured whole."""
    return (
        f"measure: figures leave out {measured['left_out_requests']} of {num_requests} requests and "
        f"{measured['left_out_batches']} batches; counts, peaks and limited by are of the whole run"
    )
