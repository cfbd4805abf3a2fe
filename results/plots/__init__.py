"""Pictures of runs, one file per kind. Everything here reads run directories and writes PNGs; nothing is
shown on a screen."""

import os

os.environ.pop("MPLBACKEND", None)  # a window toolkit, perhaps none that is here: we draw to files alone

from results.plots.account import plot_account
from results.plots.cdf import plot_latency_cdfs
from results.plots.chunks import plot_chunks
from results.plots.gallery import draw_pictures, pictures_of_run, pictures_of_runs
from results.plots.load import plot_goodput, plot_load
from results.plots.pareto import plot_pareto
from results.plots.rows import plot_rows
from results.plots.wavefront import plot_wavefront
from results.plots.window import Window

__all__ = [
    "Window",
    "draw_pictures",
    "pictures_of_run",
    "pictures_of_runs",
    "plot_account",
    "plot_chunks",
    "plot_goodput",
    "plot_latency_cdfs",
    "plot_load",
    "plot_pareto",
    "plot_rows",
    "plot_wavefront",
]
