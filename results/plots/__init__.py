"""Pictures of runs, one file per kind. Everything here reads run directories and writes PNGs; nothing is
shown on a screen."""

from pathlib import Path

from results.load import Run
from results.plots.account import plot_account
from results.plots.cdf import plot_latency_cdfs
from results.plots.pareto import plot_pareto
from results.plots.rows import plot_rows
from results.plots.wavefront import plot_wavefront
from results.plots.window import Window

__all__ = [
    "Window",
    "plot_account",
    "plot_latency_cdfs",
    "plot_pareto",
    "plot_rows",
    "plot_run",
    "plot_wavefront",
]


def plot_run(run: Run, folder: Path) -> list[Path]:
    """The pictures of one run in `folder`: latency, rows, wavefront, time. Returns the files. The run must
    have a batch."""
    files = [folder / name for name in ("latency.png", "rows.png", "wavefront.png", "time.png")]
    plot_latency_cdfs([run], files[0])
    plot_rows([run], files[1])
    plot_wavefront([run], files[2])
    plot_account([run], files[3])
    return files
