"""ServeGen client statistics: requests drawn from what was fitted to a production client, window by window.

The two files are no request log. `*-trace.csv` has no header: window start (s), mean rate (1/s), cv of the
gaps, family of their fitted distribution (Gamma, Weibull, or empty when silent), shape, scale (s).
`*-dataset.json` has histograms of lengths.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.core.errors import InputError
from workloads.columns import Columns
from workloads.drawn import MAX_REQUESTS
from workloads.histograms import Histograms, read_dataset
from workloads.rng import stream
from workloads.spec import TraceSpec
from workloads.synthetic import draw_values, to_ns

FAMILIES = ("Gamma", "Weibull")
MAX_UNLIMITED_REQUESTS = 1_000_000
_DEFAULT_WINDOW_S = 600.0
_FIELDS = ("window start", "rate", "cv", "family", "shape", "scale")


class Window(NamedTuple):
    """One row: `num_requests` requests within `width_s` from `start_s` on, with gaps of the fitted `family`
    and `shape`."""

    start_s: float
    width_s: float
    num_requests: int
    family: str
    shape: float


def looks_like_servegen(columns: Sequence[str]) -> bool:
    """Whether a first CSV row is a ServeGen window: six fields, the fourth a family, the first two
    numbers."""
    cells = [cell.strip() for cell in columns]
    return (
        len(cells) == 6
        and cells[3] in (*FAMILIES, "")
        and all(math.isfinite(_number(cell)) for cell in cells[:2])
    )


def draw_servegen(
    spec: TraceSpec, path: Path, dataset: Path, cells: Iterable[tuple[int, list[str]]], seed: int
) -> Columns:
    """Requests from `start_s` (default: the beginning) to `end_s` (default: the end), at most `limit`.

    Each window gets rate x width requests; gaps come from the fitted family and are scaled so that they fill
    the window, because the fitted mean does not always agree with the stated rate. Prompt and output lengths
    are drawn independently: their joint distribution is not published. A window's requests do not depend on
    where the drawing starts. Raises `InputError`.
    """
    windows = list(read_windows(path, cells))
    histograms = read_dataset(dataset)
    start_s = spec.start_s or 0.0
    end_s = math.inf if spec.end_s is None else spec.end_s
    chosen = [
        (index, item)
        for index, item in enumerate(windows)
        if item.start_s + item.width_s > start_s and item.start_s < end_s
    ]
    total = sum(item.num_requests for _, item in chosen)
    fullest = max((item.num_requests for _, item in chosen), default=0)
    if fullest > MAX_REQUESTS:
        raise InputError(f"{path}: a window of {fullest} requests, expected at most {MAX_REQUESTS}")
    if spec.limit is None and total > MAX_UNLIMITED_REQUESTS:
        raise InputError(
            f"{path}: {total} requests, expected workload.limit or workload.end_s to keep it below "
            f"{MAX_UNLIMITED_REQUESTS}"
        )
    columns = Columns(path.name)
    for index, window in chosen:
        if window.num_requests:
            _draw_window(columns, window, histograms, seed, index, (start_s, end_s), spec.limit)
        if spec.limit is not None and len(columns) >= spec.limit:
            break
    if not len(columns):
        raise InputError(
            f"{path}: no request from {start_s:g} s to {end_s:g} s, expected a window with a rate above 0"
        )
    columns.notes.append(
        "requests are drawn from ServeGen's fitted windows; prompt and output lengths are drawn independently"
    )
    columns.notes.extend(histograms.notes())
    return columns


def _draw_window(
    columns: Columns,
    window: Window,
    histograms: Histograms,
    seed: int,
    index: int,
    span_s: tuple[float, float],
    limit: int | None,
) -> None:
    arrivals_s = window.start_s + window.width_s * _positions(
        window, stream(seed, "servegen_arrivals", index)
    )
    prompts, outputs = histograms.at(window.start_s)
    prompt_tokens = draw_values(*prompts, window.num_requests, stream(seed, "servegen_prompt_tokens", index))
    output_tokens = draw_values(*outputs, window.num_requests, stream(seed, "servegen_output_tokens", index))
    drawn = zip(arrivals_s, to_ns(arrivals_s), prompt_tokens, output_tokens, strict=True)
    for arrival_s, arrival_ns, prompt, output in drawn:
        if not span_s[0] <= arrival_s < span_s[1]:
            continue
        if prompt == 0 or output == 0:
            columns.skipped_rows += 1
            continue
        columns.arrival_ns.append(arrival_ns)
        columns.append(prompt, output)
        if len(columns) == limit:
            return


def _positions(window: Window, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Where in the window, from 0 to 1, its requests arrive: one gap more than requests, scaled to fill
    it."""
    draw = rng.standard_gamma if window.family == "Gamma" else rng.weibull
    gaps: npt.NDArray[np.float64] = draw(window.shape, window.num_requests + 1)
    total = gaps.sum()
    if not 0 < total < math.inf:  # shapes so small that every gap underflows, or overflows
        gaps = rng.standard_exponential(window.num_requests + 1)
        total = gaps.sum()
    positions: npt.NDArray[np.float64] = np.minimum(np.cumsum(gaps[:-1]) / total, 1.0)
    return positions


def read_windows(path: Path, cells: Iterable[tuple[int, list[str]]]) -> Iterator[Window]:
    """Windows in file order. All last as long as the closest two starts are apart (600 s for a lone one);
    gaps are silent."""
    rows: list[tuple[float, float, str, float]] = []
    for line, row in cells:
        item = _read_row(path, line, row)
        if rows and item[0] <= rows[-1][0]:
            raise InputError(
                f"{path}: line {line}: window start: {item[0]:g}, expected more than {rows[-1][0]:g}, the "
                "one before"
            )
        rows.append(item)
    width_s = min((later[0] - row[0] for row, later in pairwise(rows)), default=_DEFAULT_WINDOW_S)
    for start_s, rate, family, shape in rows:
        yield Window(start_s, width_s, round(rate * width_s), family, shape)


def _read_row(path: Path, line: int, row: Sequence[str]) -> tuple[float, float, str, float]:
    cells = [*(cell.strip() for cell in row), *[""] * 6][:6]
    start_s, rate, cv, _, shape, _ = (_number(cell) for cell in cells)
    family = cells[3]
    for index, value, high in ((0, start_s, 1e9), (1, rate, 1e6)):
        if not 0 <= value <= high:
            raise InputError(
                f"{path}: line {line}: {_FIELDS[index]}: {cells[index]!a}, expected a number from 0 to "
                f"{high:g}"
            )
    if rate == 0:
        return start_s, rate, family, 1.0
    if family not in FAMILIES:
        raise InputError(
            f"{path}: line {line}: family: {family!a}, expected Gamma or Weibull where the rate is above 0"
        )
    if not 0 < shape < math.inf:
        shape = 1.0 / (cv * cv) if family == "Gamma" and 0 < cv < 1e100 else math.nan
    if not 0 < shape < math.inf:
        raise InputError(f"{path}: line {line}: shape: {cells[4]!a}, expected a number above 0")
    return start_s, rate, family, shape


def _number(text: str) -> float:
    """`text` as a float; NaN, which no range check lets through, when it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def dataset_beside(path: Path) -> Path:
    """`x-dataset.json` for `x-trace.csv`. Raises `InputError` for another name."""
    for ending in ("-trace.csv", "-trace.csv.gz"):
        if path.name.endswith(ending):
            return path.with_name(path.name.removesuffix(ending) + "-dataset.json")
    raise InputError(
        f"{path}: expected a name ending in -trace.csv, or workload.dataset to name the file of length "
        "histograms"
    )
