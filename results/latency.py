"""Latency samples of a run in integer nanoseconds, taken from one request after another. No statistics here.

Of a request with n tokens delivered at t[0] ... t[n-1]:

    TTFT = first token - arrival                  one for every request that got a token
    ITL  = t[i] - t[i-1]                          one for every gap; a request with one token has none
    TPOT = (t[n-1] - t[0]) / (n - 1)              one for every finished request with n > 1 tokens
    E2E  = t[n-1] - arrival = TTFT + sum of ITL   one for every finished request; exact: all are integers
    own ITL = mean and p99 of its own t[i] - t[i-1]   one each for every request with n > 1 tokens
"""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.core.seam.request import Status

if TYPE_CHECKING:
    import pandas as pd

Int64 = NDArray[np.int64]


class Samples:
    """Takes what latencies come from, one request after another: 8 bytes for every gap between tokens, some
    40 for a request."""

    def __init__(self) -> None:
        self._arrival_ns, self._first_ns, self._last_ns, self._gaps, self._itl_ns = (
            array("q") for _ in range(5)
        )
        self._own_mean_ns, self._own_p99_ns = array("d"), array("d")
        self._has_finished = bytearray()

    def add(self, arrival_ns: int, token_ns: Int64, has_finished: bool) -> None:
        """A request and the times of its tokens; one that got none gives no sample."""
        if len(token_ns):
            self._arrival_ns.append(arrival_ns)
            self._first_ns.append(int(token_ns[0]))
            self._last_ns.append(int(token_ns[-1]))
            self._gaps.append(len(token_ns) - 1)
            self._itl_ns.frombytes((token_ns[1:] - token_ns[:-1]).tobytes())
            if len(token_ns) > 1:
                mean_ns, p99_ns = own_gaps_ns(token_ns)
                self._own_mean_ns.append(mean_ns)
                self._own_p99_ns.append(p99_ns)
            self._has_finished.append(has_finished)

    def latencies(self) -> "Latencies":
        """Of all requests until now."""
        arrival_ns, first_ns, last_ns, gaps, itl_ns = (
            np.array(times, dtype=np.int64)
            for times in (self._arrival_ns, self._first_ns, self._last_ns, self._gaps, self._itl_ns)
        )
        finished = np.array(self._has_finished, dtype=bool)
        several = finished & (gaps > 0)
        return Latencies(
            ttft_ns=first_ns - arrival_ns,
            itl_ns=itl_ns,
            tpot_ns=(last_ns - first_ns)[several] / gaps[several],
            e2e_ns=(last_ns - arrival_ns)[finished],
            own_itl_mean_ns=np.array(self._own_mean_ns),
            own_itl_p99_ns=np.array(self._own_p99_ns),
        )


@dataclass(frozen=True, slots=True)
class Latencies:
    """Samples in the order of their requests: `[requests with a token]`, `[gaps]`, `[finished, n > 1]`,
    `[finished]`, and of each request's own gaps `[n > 1]`."""

    ttft_ns: Int64
    itl_ns: Int64
    tpot_ns: NDArray[np.float64]
    e2e_ns: Int64
    own_itl_mean_ns: NDArray[np.float64]
    own_itl_p99_ns: NDArray[np.float64]

    @classmethod
    def of_frame(cls, requests: "pd.DataFrame") -> "Latencies":
        """Samples of the table of a run's requests (see `results.load.Run.requests`)."""
        samples = Samples()
        for arrival_ns, text, status in requests[["arrival_ns", "token_ns", "status"]].itertuples(
            index=False
        ):
            samples.add(
                arrival_ns, np.fromstring(text, dtype=np.int64, sep=" "), status == Status.FINISHED.value
            )
        return samples.latencies()


def own_gaps_ns(token_ns: "Int64 | array[int]") -> tuple[float, float]:
    """Mean and p99 of the gaps of one request with several tokens, as `numpy.percentile` interpolates, whose
    call takes twenty times as long. Gaps of 1, 2, 3, 4 have mean 2.5 and p99 3.97."""
    gaps_ns = np.sort(np.diff(token_ns))
    rank, part = divmod(99 * (len(gaps_ns) - 1), 100)
    low, high = int(gaps_ns[rank]), int(gaps_ns[min(rank + 1, len(gaps_ns) - 1)])
    return (token_ns[-1] - token_ns[0]) / len(gaps_ns), low + (high - low) * part / 100
