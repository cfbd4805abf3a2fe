"""Latency samples of a run in integer nanoseconds, from live records or from `requests.csv`. No statistics here.

Of a request with n tokens delivered at t[0] ... t[n-1]:

    TTFT = first token - arrival                  one for every request that got a token
    ITL  = t[i] - t[i-1]                          one for every gap; a request with one token has none
    TPOT = (t[n-1] - t[0]) / (n - 1)              one for every finished request with n > 1 tokens
    E2E  = t[n-1] - arrival = TTFT + sum of ITL   one for every finished request; exact, because all are integers
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Status
from policies.core.runlog import RequestRecord

if TYPE_CHECKING:
    import pandas as pd

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Samples in arrival order of their requests: `[requests with a token]`, `[gaps]`, `[finished, n > 1]`, `[finished]`."""

    ttft_ns: Int64
    itl_ns: Int64
    tpot_ns: NDArray[np.float64]
    e2e_ns: Int64

    @classmethod
    def of_records(cls, records: Iterable[RequestRecord]) -> "Latencies":
        """Samples of a run that is still in memory. Token times are read in place: no Python object per token."""
        told = [record for record in records if record.token_ns]
        return cls._of(
            [record.request.arrival_ns for record in told],
            [np.frombuffer(record.token_ns, dtype=np.int64) for record in told],
            [record.status is Status.FINISHED for record in told],
        )

    @classmethod
    def of_frame(cls, requests: "pd.DataFrame") -> "Latencies":
        """Samples of a run read back from `requests.csv` (see `results.load.Run.requests`)."""
        told = requests[requests["first_token_ns"].notna()]
        return cls._of(
            told["arrival_ns"].tolist(),
            [np.fromstring(text, dtype=np.int64, sep=" ") for text in told["token_ns"]],
            (told["status"] == Status.FINISHED.value).tolist(),
        )

    @classmethod
    def _of(cls, arrivals_ns: Sequence[int], tokens_ns: Sequence[Int64], has_finished: Sequence[bool]) -> "Latencies":
        arrival_ns = np.array(arrivals_ns, dtype=np.int64)
        first_ns = np.array([times[0] for times in tokens_ns], dtype=np.int64)
        last_ns = np.array([times[-1] for times in tokens_ns], dtype=np.int64)
        gaps = np.array([len(times) - 1 for times in tokens_ns], dtype=np.int64)
        itl_ns = np.empty(int(gaps.sum()), dtype=np.int64)
        at = 0
        for times in tokens_ns:
            end = at + len(times) - 1
            np.subtract(times[1:], times[:-1], out=itl_ns[at:end])
            at = end
        finished = np.array(has_finished, dtype=bool)
        several = finished & (gaps > 0)
        return cls(
            ttft_ns=first_ns - arrival_ns,
            itl_ns=itl_ns,
            tpot_ns=(last_ns - first_ns)[several] / gaps[several],
            e2e_ns=(last_ns - arrival_ns)[finished],
        )
