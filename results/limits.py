"""What limited a run: counted from its log of batches, at every moment at which a batch was formed.

When a batch is formed, the scheduler lets in whom it can. Whoever has arrived and still waits afterwards does
so for one of two reasons, and the log says which: all places (`max_num_seqs`) are taken, or one is free and
the KV pool had no room for who comes next. The time until the next batch is formed counts for that reason.
Four places, three of them taken, two requests waiting, the next batch 5 ms later: 5 ms for the KV pool.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policies.core.engine.runlog import RequestRecord
from policies.core.seam.request import Status
from results.batchlog import COLUMNS
from results.csvlog import read_rows

FULL_SHARE, BUSY_SHARE = 0.1, 0.95
"""From which part of the time on requests waited for it, the places or the KV pool limited a run; and from
which part of the time on that it was busy, the device did."""


class Stories:
    """When requests came and went, taken from their records on the way: 25 bytes of each."""

    def __init__(self) -> None:
        self.arrivals_ns, self._ends_ns, self._ended = (array("q") for _ in range(3))
        self._has_finished = bytearray()

    def of(self, records: Iterable[RequestRecord]) -> Iterator[RequestRecord]:
        """`records` as they are, each noted."""
        for record in records:
            if record.status is not Status.REFUSED:
                self.arrivals_ns.append(record.request.arrival_ns)
                if record.finished_ns is not None:
                    self._ends_ns.append(record.finished_ns)
                    self._ended.append(record.request.request_id)
                    self._has_finished.append(record.status is Status.FINISHED)
            yield record

    def ends(self, by_finishing: bool) -> Iterator[tuple[int, int]]:
        """(time, request) of those that finished, or of those whose clients hung up, in order of time."""
        chosen = np.array(self._has_finished, dtype=bool) == by_finishing
        times, requests = (np.array(item, dtype=np.int64)[chosen] for item in (self._ends_ns, self._ended))
        order = np.argsort(times, kind="stable")
        return zip(times[order].tolist(), requests[order].tolist(), strict=True)

    @property
    def offered_rate(self) -> float | None:
        """Requests a second at which they came: of n, n - 1 gaps from the first arrival to the last; None
        when all came at once."""
        span_ns = max(self.arrivals_ns, default=0) - min(self.arrivals_ns, default=0)
        return (len(self.arrivals_ns) - 1) / span_ns * 1e9 if span_ns > 0 else None


@dataclass(frozen=True, slots=True)
class Waits:
    """For how long somebody waited because all places were taken, and because the KV pool had no room."""

    places_ns: int
    kv_ns: int


def count_waits(batches: Path, stories: Stories, places: int) -> Waits:
    """Read the log of a run with so many `places` once, as far as it goes."""
    arrivals = iter(sorted(stories.arrivals_ns))
    finished, hung_up = stories.ends(by_finishing=True), stories.ends(by_finishing=False)
    arrival, end, hang_up = next(arrivals, None), next(finished, None), next(hung_up, None)
    num_present, before_ns = 0, 0
    held: set[int] = set()
    ends_ns: dict[int, int] = {-1: -1}
    last_collected = -1
    waited_ns = {"places": 0, "kv": 0}
    reason: str | None = None
    for seq, row in enumerate(read_rows(batches, COLUMNS)):
        fields, now_ns, after_seq = row.fields, row.whole("submitted_ns"), row.whole("after_seq")
        if reason is not None:
            waited_ns[reason] += now_ns - before_ns
        ends_ns[seq] = row.whole("finished_ns")
        while last_collected < after_seq:
            ends_ns.pop(last_collected)
            last_collected += 1
        while arrival is not None and arrival <= now_ns:
            num_present, arrival = num_present + 1, next(arrivals, None)
        while end is not None and end[0] <= ends_ns[last_collected]:
            held.discard(end[1])
            num_present, end = num_present - 1, next(finished, None)
        while hang_up is not None and hang_up[0] <= now_ns:
            held.discard(hang_up[1])
            num_present, hang_up = num_present - 1, next(hung_up, None)
        for item in fields["preempted"].split():
            held.discard(int(item.partition(":")[0]))
        for item in fields["allocated"].split():
            held.add(int(item.partition(":")[0]))
        is_waiting = num_present > len(held)
        reason = None if not is_waiting else "places" if len(held) >= places else "kv"
        before_ns = now_ns
    return Waits(waited_ns["places"], waited_ns["kv"])


def limits_of(summary: Mapping[str, Any], stories: Stories, waits: Waits) -> dict[str, Any]:
    """The keys that say it in a summary: the offered rate, the two waits, and `limited_by`.

    `places` or `kv` when requests waited for it for a tenth of the time or more, the longer of the two; else
    `device` when it was busy for 95 % of the time; else `host` when more than half of its idle time was the
    host's; else `arrivals`: there was nothing more to do. None without a batch.
    """
    duration_ns, idle_s = summary["duration_s"] * 1e9, summary["device_idle_s"]
    host_s = summary["device_idle_host_s"] + summary["device_idle_launch_s"]
    limited_by = None
    if summary["num_batches"]:
        longer_ns = max(waits.places_ns, waits.kv_ns)
        if longer_ns and longer_ns >= FULL_SHARE * duration_ns:
            limited_by = "places" if waits.places_ns >= waits.kv_ns else "kv"
        elif (summary["gpu_busy_fraction"] or 0.0) >= BUSY_SHARE:
            limited_by = "device"
        else:
            limited_by = "host" if host_s > idle_s / 2 else "arrivals"
    return {
        "offered_request_rate": stories.offered_rate,
        "waited_for_places_s": waits.places_ns / 1e9,
        "waited_for_kv_s": waits.kv_ns / 1e9,
        "limited_by": limited_by,
    }
