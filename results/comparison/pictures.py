"""All pictures of a comparison in one folder."""

from functools import partial
from pathlib import Path

import pandas as pd

from results.comparison.compare import Comparison
from results.plots.agreement import plot_agreement
from results.plots.batch_errors import plot_batch_errors, plot_batch_times
from results.plots.gallery import Picture, draw_pictures, names_of
from results.plots.overlay import plot_overlaid_cdfs, plot_queues

LEAST_QUEUE = 0.1
"""Requests that wait in the mean: below, a picture of the queue shows nothing."""


def write_pictures(comparison: Comparison, folder: Path) -> tuple[int, list[str]]:
    """Draw `agreement.png`; `batches.png` and `errors.png` where batches were predicted; per workload,
    latencies and queues.

    Returns how many there are, and a sentence for each that could not be drawn. Queues that are all but empty
    are not drawn.
    """
    pictures = [
        Picture("agreement.png", partial(plot_agreement, comparison.cells, comparison.tolerances)),
    ]
    times = [cell.times for cell in comparison.cells if cell.times is not None]
    if times:
        pictures.append(Picture("batches.png", partial(plot_batch_times, pd.concat(times))))
        pictures.append(Picture("errors.png", partial(plot_batch_errors, pd.concat(times))))
    for workload, name in zip(comparison.workloads, names_of(comparison.workloads), strict=True):
        logged = [cell for cell in comparison.of_workload(workload) if cell.queues is not None]
        if logged:
            pictures.append(Picture(f"latency-{name}.png", partial(plot_overlaid_cdfs, logged)))
        if any(queue.mean_depth >= LEAST_QUEUE for cell in logged for queue in cell.queues or ()):
            pictures.append(Picture(f"queue-{name}.png", partial(plot_queues, logged)))
    files, notes = draw_pictures(pictures, folder)
    return len(files), notes
