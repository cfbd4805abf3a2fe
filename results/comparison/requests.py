"""Two runs of the same requests, request by request: latency errors, queue depth, and whether the load was
more than was served."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

SATURATED_GROWTH = 0.05
"""A wait that grows by more than this part of the time that passes: requests come at least 5 % faster than
they are served."""
MIN_REQUESTS = 10
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestErrors:
    """Predicted minus measured over requests: mean absolute error and bias in ms, Pearson's correlation (None
    of constants)."""

    num_requests: int
    mean_absolute_ms: float
    bias_ms: float
    correlation: float | None


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that had arrived and were not scheduled yet: their mean number over the run, the largest, and
    how the wait grew.

    `wait_growth` is the slope of (first scheduled - arrival) over arrival, by least squares: 0.3 when
    requests come 30 % faster than they are served, about 0 when the device keeps up. None when there are few
    requests or all came at once.
    """

    mean_depth: float
    max_depth: int
    wait_growth: float | None

    @property
    def verdict(self) -> str:
        if self.wait_growth is None:
            return "no arrivals over time"
        return "saturated" if self.wait_growth > SATURATED_GROWTH else "not saturated"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def request_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """TTFT, TPOT and E2E in ms of every finished request, by request id; TPOT is NaN of a single token."""
    done = requests[requests["status"] == "finished"].set_index("request_id")
    times = done[["arrival_ns", "first_token_ns", "finished_ns", "output_tokens"]].astype("float64")
    gaps = (times["output_tokens"] - 1).where(times["output_tokens"] > 1)
    return pd.DataFrame(
        {
            "TTFT": (times["first_token_ns"] - times["arrival_ns"]) / 1e6,
            "TPOT": (times["finished_ns"] - times["first_token_ns"]) / gaps / 1e6,
            "E2E": (times["finished_ns"] - times["arrival_ns"]) / 1e6,
        }
    ).sort_index()


def request_errors(predicted: pd.DataFrame, measured: pd.DataFrame) -> dict[str, RequestErrors]:
    """Errors by latency, of two `requests.csv` with the same requests; a latency that no request has is left
    out."""
    left, right = request_latencies(predicted), request_latencies(measured)
    found = {}
    for name in left.columns:
        both = pd.concat([left[name], right[name]], axis=1).dropna().to_numpy()
        if len(both):
            difference = both[:, 0] - both[:, 1]
            varies = len(both) > 1 and bool((both.std(axis=0) > 0).all())
            correlation = float(np.corrcoef(both.T)[0, 1]) if varies else None
            found[name] = RequestErrors(
                len(both), float(np.abs(difference).mean()), float(difference.mean()), correlation
            )
    return found


def queue_steps(requests: pd.DataFrame) -> tuple[Floats, NDArray[np.int64]]:
    """Times in s from the first arrival at which the number of waiting requests changes, and the number from
    then on.

    A request that is scheduled as it arrives never waits.
    """
    waited = requests[
        requests["first_scheduled_ns"].notna() & (requests["first_scheduled_ns"] > requests["arrival_ns"])
    ]
    arrival, start = (
        waited[name].to_numpy(dtype=np.float64) for name in ("arrival_ns", "first_scheduled_ns")
    )
    times = np.concatenate((arrival, start))
    steps = np.repeat([1, -1], len(arrival))
    order = np.lexsort((steps, times))
    return (times[order] - float(requests["arrival_ns"].min())) / 1e9, np.cumsum(steps[order])


def queue_of(requests: pd.DataFrame, duration_s: float) -> Queue:
    """The queue of a run that took `duration_s`."""
    times, depth = queue_steps(requests)
    held_s = float((depth[:-1] * np.diff(times)).sum()) if len(times) > 1 else 0.0
    scheduled = requests[requests["first_scheduled_ns"].notna()]
    arrival = scheduled["arrival_ns"].to_numpy(dtype=np.float64)
    wait = scheduled["first_scheduled_ns"].to_numpy(dtype=np.float64) - arrival
    growth = None
    if len(arrival) >= MIN_REQUESTS and np.ptp(arrival) > 0:
        growth = float(np.polyfit((arrival - arrival.mean()) / 1e9, wait / 1e9, 1)[0])
    return Queue(held_s / duration_s if duration_s > 0 else 0.0, int(depth.max(initial=0)), growth)
