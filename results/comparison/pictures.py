"""All pictures of a comparison in one folder."""

from pathlib import Path

import pandas as pd

from results.comparison.compare import Comparison
from results.identity import slug
from results.plots.agreement import plot_agreement
from results.plots.batch_errors import plot_batch_errors, plot_batch_times
from results.plots.overlay import plot_overlaid_cdfs, plot_queues

LEAST_QUEUE = 0.1
"""Requests that wait in the mean: below, a picture of the queue shows nothing."""


def write_pictures(comparison: Comparison, folder: Path) -> list[Path]:
    """Draw `agreement.png`; `batches.png` and `errors.png` where batches were predicted; per workload,
    latencies and queues.

    Returns the files. Queues that are all but empty are not drawn.
    """
    files = [folder / "agreement.png"]
    plot_agreement(comparison.cells, comparison.tolerances, files[0])
    times = [cell.times for cell in comparison.cells if cell.times is not None]
    if times:
        files += [folder / "batches.png", folder / "errors.png"]
        plot_batch_times(pd.concat(times), files[-2])
        plot_batch_errors(pd.concat(times), files[-1])
    for workload in comparison.workloads:
        logged = [cell for cell in comparison.of_workload(workload) if cell.queues is not None]
        if not logged:
            continue
        files.append(folder / f"latency-{slug(workload)}.png")
        plot_overlaid_cdfs(logged, files[-1])
        if any(queue.mean_depth >= LEAST_QUEUE for cell in logged for queue in cell.queues or ()):
            files.append(folder / f"queue-{slug(workload)}.png")
            plot_queues(logged, files[-1])
    return files
