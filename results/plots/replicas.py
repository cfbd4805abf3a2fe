"""Load by replica of a fleet: how many requests each has over time, and what that made of its device and of
its requests' first tokens."""

from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from results.find import replicas_of
from results.frames import requests_frame
from results.load import Run
from results.plots.style import INK, MUTED, picture
from results.rundir import REQUESTS
from results.window import run_s

NUM_BINS = 240


def plot_replicas(run: Run, path: Path) -> None:
    """Draw the fleet's `run` to `path`: a row per replica, requests in it over time as colour; beside it how
    busy its device was, and p50 and p99 of TTFT."""
    fleet, folders = run.summary["fleet"], replicas_of(run.path)
    own = fleet["by_replica"]
    end_s = max(run_s(run.summary), 1e-9)
    edges_ns = run.summary["first_arrival_ns"] + np.linspace(0, end_s * 1e9, NUM_BINS + 1)
    loads = np.array([mean_requests(folder, edges_ns) for folder in folders])  # [replicas, bins]
    unit, per_unit = ("s", 1.0) if end_s > 20 else ("ms", 1e-3)
    places = np.arange(len(folders))
    with picture(path, 11.5, 1.9 + 0.42 * len(folders)) as figure:
        across, busy, first = figure.subplots(1, 3, sharey=True, width_ratios=(6, 1.5, 1.8))
        shown = across.imshow(
            loads,
            aspect="auto",
            interpolation="nearest",
            cmap="YlOrRd",
            extent=(0, end_s / per_unit, len(folders) - 0.5, -0.5),
            vmin=0,
            vmax=max(float(loads.max()), 1.0),
        )
        figure.colorbar(shown, ax=across, label="requests", pad=0.01)
        across.grid(False)
        across.set_xlabel(f"time, {unit}")
        across.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        across.set_title("requests waiting and running")
        names = [item["device"] if item["role"] == "whole" else item["role"] for item in own]
        across.set_yticks(places, [f"{at} · {name}" for at, name in enumerate(names)])
        busy.barh(places, [item["gpu_busy_fraction"] or 0.0 for item in own], color=MUTED, height=0.6)
        busy.set_xlim(0, 1)
        busy.xaxis.set_major_formatter(PercentFormatter(1.0))
        busy.set_title("device busy")
        for key, mark in (("p50", "|"), ("p99", "o")):
            values = [item["ttft_ms"][key] for item in own]
            first.plot(
                [np.nan if value is None else value for value in values], places, mark, color=INK, label=key
            )
        first.set_xlim(left=0)
        first.xaxis.set_major_locator(MaxNLocator(4))
        first.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        first.set_title("TTFT, ms")
        first.legend(loc="best")
        uneven = fleet["imbalance"].get("device_s")
        figure.suptitle(
            f"{len(folders)} replicas behind {fleet['router']} · {run.policy} on {run.workload}"
            + ("" if uneven is None else f" · the busiest device {uneven:.2f} x the mean"),
            x=0.01,
            ha="left",
            fontweight="bold",
            fontsize=11.5,
        )


def mean_requests(folder: Path, edges_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Requests of the run in `folder` that have arrived and not ended, the mean of each bin. `[bins]`"""
    frame = requests_frame(folder / REQUESTS)
    frame = frame[frame["status"] != "refused"]
    arrived = np.sort(frame["arrival_ns"].to_numpy(dtype=np.float64))
    ended = np.sort(frame["finished_ns"].to_numpy(dtype=np.float64))
    return (_area(arrived, edges_ns) - _area(ended[~np.isnan(ended)], edges_ns)) / np.diff(edges_ns)


def _area(times_ns: NDArray[np.float64], edges_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """In every bin, the integral over time of how many of the sorted `times_ns` have come."""
    sums = np.concatenate(([0.0], np.cumsum(times_ns)))
    count = np.searchsorted(times_ns, edges_ns)
    return np.diff(count * edges_ns - sums[count])  # up to an edge: the sum of (edge - time)
