"""Who was served as promised: every request held against the objectives of a run (`slo`).

    ttft_ms   first token - arrival
    itl_ms    p99 of the request's own gaps, percentiles as in `results.metrics`; none with one token
    tpot_ms   (last - first token) / (n - 1); none with one token
    e2e_ms    last token - arrival

A finished request meets when it keeps every objective that it has a figure for. A refused one does not. A
client that hung up is judged by what it had waited for until then: not met when something was overdue (its
first token, the gap that it hung up in, all of it); else it is left out, for nobody knows what it would have
got. One that a run which was cut short did not finish is left out too.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from policies.core.engine.runlog import RequestRecord
from policies.core.seam.objectives import Objectives
from policies.core.seam.request import Status
from results.latency import own_gaps_ns


@dataclass(slots=True)
class Goodput:
    """Counts over requests that are measured; `ended_met` of those that met ended within the span too."""

    objectives: Objectives
    met: int = 0
    missed: int = 0
    left_out: int = 0
    ended_met: int = 0
    missed_by: Counter[str] = field(default_factory=Counter)

    def add(self, record: RequestRecord, is_measured: bool, has_ended: bool) -> None:
        """`is_measured` and `has_ended`: it arrived, and ended, within the span that counts."""
        if not is_measured:
            return
        late = lateness(record, self.objectives)
        if late is None:
            self.left_out += 1
        elif late:
            self.missed += 1
            self.missed_by.update(late)
        else:
            self.met += 1
            self.ended_met += has_ended

    def as_summary(self, duration_s: float) -> dict[str, Any]:
        """Under `slo` in a summary. `share_met` is None where nobody could be judged."""
        judged = self.met + self.missed
        share_met = self.met / judged if judged else None
        return {
            **self.objectives.limits_ms,
            "share": self.objectives.share,
            "met": self.met,
            "missed": self.missed,
            "left_out": self.left_out,
            "missed_by": dict(sorted(self.missed_by.items())),
            "share_met": share_met,
            "holds": share_met is not None and share_met >= self.objectives.share,
            "goodput": self.ended_met / duration_s if duration_s > 0 else None,
        }


def lateness(record: RequestRecord, objectives: Objectives) -> tuple[str, ...] | None:
    """Names of the objectives that a request did not keep, `refused` of one that was; None of one that cannot
    be judged."""
    if record.status is Status.REFUSED:
        return ("refused",)
    times, arrival_ns = record.token_ns, record.request.arrival_ns
    if record.status is Status.CANCELLED:
        assert record.finished_ns is not None
        # What it waited for when it hung up had not come by then.
        times = array("q", [*times, record.finished_ns])
    elif record.status is not Status.FINISHED:
        return None
    several = len(times) > 1
    found_ns = {
        "ttft_ms": times[0] - arrival_ns,
        "itl_ms": own_gaps_ns(times)[1] if several else 0.0,
        "tpot_ms": (times[-1] - times[0]) / (len(times) - 1) if several else 0.0,
        "e2e_ms": times[-1] - arrival_ns,
    }
    late = tuple(name for name, limit in objectives.limits_ms.items() if found_ns[name] > 1e6 * limit)
    return late if late or record.status is Status.FINISHED else None
