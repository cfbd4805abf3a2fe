"""What limited a run: who waited for what while it went on, how busy the device was, and how requests came.

When a batch is formed, the scheduler lets in whom it can. Whoever has arrived and still waits afterwards does
so for one of two reasons: all places (`max_num_seqs`) are taken, or one is free and the KV pool had no room
for who comes next. The time until the next batch is formed counts for that reason (`RunLog.formed`). Four
places, three of them taken, two requests waiting, the next batch 5 ms later: 5 ms for the KV pool.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from policies.core.engine.runlog import BatchTotals, RequestRecord
from policies.core.seam.request import Status
from results.window import WHOLE, Span, run_s

FULL_SHARE, BUSY_SHARE = 0.1, 0.95
"""From which part of the time on requests waited for it, the places or the KV pool limited a run; and from
which part of the time on that it was busy, the device did."""


class Offered:
    """How fast requests came, from their records on the way."""

    def __init__(self) -> None:
        self._count, self._first_ns, self._last_ns = 0, 0, 0

    def of(self, records: Iterable[RequestRecord], span: Span = WHOLE) -> Iterator[RequestRecord]:
        """`records` as they are, each noted; who is refused or arrives outside of `span` does not count."""
        for record in records:
            if record.status is not Status.REFUSED and span.has_request(record):
                arrival_ns = record.request.arrival_ns
                self._first_ns = min(self._first_ns, arrival_ns) if self._count else arrival_ns
                self._last_ns = max(self._last_ns, arrival_ns)
                self._count += 1
            yield record

    @property
    def rate(self) -> float | None:
        """Requests a second: of n, n - 1 gaps from the first arrival to the last; None when all came at
        once."""
        span_ns = self._last_ns - self._first_ns
        return (self._count - 1) / span_ns * 1e9 if span_ns > 0 else None


def limits_of(
    summary: Mapping[str, Any], offered: Offered, totals: BatchTotals, num_devices: int = 1
) -> dict[str, Any]:
    """The keys that say it in a summary: the offered rate, the two waits (of several devices, their mean),
    and `limited_by`.

    `places` or `kv` when requests waited for it for a tenth of the time or more, the longer of the two; else
    `device` when it was busy for 95 % of the time; else `host` when more than half of its idle time was the
    host's; else `arrivals`: there was nothing more to do. None without a batch.
    """
    duration_ns, idle_s = num_devices * run_s(summary) * 1e9, summary["device_idle_s"]
    host_s = summary["device_idle_host_s"] + summary["device_idle_launch_s"]
    limited_by = None
    if summary["num_batches"]:
        longer_ns = max(totals.waited_for_places_ns, totals.waited_for_kv_ns)
        if longer_ns and longer_ns >= FULL_SHARE * duration_ns:
            limited_by = "places" if totals.waited_for_places_ns >= totals.waited_for_kv_ns else "kv"
        elif (summary["gpu_busy_fraction"] or 0.0) >= BUSY_SHARE:
            limited_by = "device"
        else:
            limited_by = "host" if host_s > idle_s / 2 else "arrivals"
    return {
        "offered_request_rate": offered.rate,
        "waited_for_places_s": totals.waited_for_places_ns / num_devices / 1e9,
        "waited_for_kv_s": totals.waited_for_kv_ns / num_devices / 1e9,
        "limited_by": limited_by,
    }
