"""Which pictures a run, a sweep or a report has, and the drawing of many: each whole or absent, none twice.

Pictures are extras. One that cannot be drawn, for whatever reason, is a sentence, and what it was to
illustrate stays as good as it was. A picture of the same runs by the same code is not drawn again:
`drawn.json` beside the pictures holds the key of each.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import joblib
import matplotlib

from policies.core.errors import InputError, WriteError
from policies.process.documents import read_json
from policies.process.sentences import one_line
from results.files import drafted
from results.identity import policy_order, slug
from results.load import Run
from results.plots.account import plot_account
from results.plots.cdf import plot_latency_cdfs
from results.plots.load import plot_goodput, plot_load
from results.plots.pareto import plot_pareto
from results.plots.replicas import plot_replicas
from results.plots.rows import plot_rows
from results.plots.transfer import has_transfers, plot_transfers
from results.plots.wavefront import plot_wavefront
from results.rundir import BATCHES, REQUESTS, SUMMARY
from results.tradeoff import loads_of

MAX_PANELS = 8
"""Runs that stand below one another in a picture, and chunk sizes of a picture that has a row for each."""
MAX_WORKLOADS = 8
"""Workloads with pictures of their own; tables have all."""
DRAWN = "drawn.json"


class Picture(NamedTuple):
    """A file's name, who draws it, and a key of all that it shows (empty: not known, so always drawn)."""

    name: str
    draw: Callable[[Path], object]
    key: str = ""


def draw_pictures(pictures: Sequence[Picture], folder: Path, jobs: int = 1) -> tuple[list[Path], list[str]]:
    """Draw into `folder`, several by `jobs` processes; the files that are there now, and a sentence for each
    that could not be drawn.

    What an earlier call drew there and this one does not is removed.
    """
    before = _drawn(folder)
    files, notes, keys = [], [], {}
    todo = [
        picture
        for picture in pictures
        if not picture.key or before.get(picture.name) != picture.key or not (folder / picture.name).is_file()
    ]
    parallel = joblib.Parallel(n_jobs=jobs if len(todo) > 1 else 1, batch_size=1)
    faults = parallel(joblib.delayed(_fault_of)(picture, folder) for picture in todo)
    fault_of = {picture.name: fault for picture, fault in zip(todo, faults, strict=True)}
    for picture in pictures:
        if fault := fault_of.get(picture.name):
            notes.append(fault)
        else:
            files.append(folder / picture.name)
            keys[picture.name] = picture.key
    for name in before.keys() - keys.keys():
        (folder / name).unlink(missing_ok=True)
    if any(keys.values()) and keys != before:
        try:
            with drafted(folder / DRAWN) as draft:
                draft.write_text(json.dumps(keys, indent=1) + "\n", encoding="utf-8")
        except WriteError as error:
            notes.append(_not_drawn(DRAWN, error, folder))
    return files, notes


def pictures_of_run(run: Run) -> list[Picture]:
    """Latency, rows, wavefront, time. The run must have a batch."""
    return [
        Picture("latency.png", partial(plot_latency_cdfs, [run])),
        Picture("rows.png", partial(plot_rows, [run])),
        Picture("wavefront.png", partial(plot_wavefront, [run])),
        Picture("time.png", partial(plot_account, [run])),
    ]


def pictures_of_fleet(run: Run) -> list[Picture]:
    """Load by replica, and latencies over all requests."""
    return [
        Picture("replicas.png", partial(plot_replicas, run)),
        Picture("latency.png", partial(plot_latency_cdfs, [run])),
    ]


def pictures_of_runs(runs: Sequence[Run]) -> list[Picture]:
    """The Pareto picture of all runs, latency against load where there are several, transfers where links
    differ, and goodput where there are objectives; for every workload where the time of its runs went,
    latencies by chunk size, and rows and the wavefront of a typical run of each policy. Runs without logs are
    in all but the last three."""
    workloads = list(dict.fromkeys(run.workload for run in runs))[:MAX_WORKLOADS]
    shown = [run for run in runs if run.workload in workloads]
    pictures = [_keyed("pareto.png", plot_pareto, shown)] if shown else []
    if loads_of(runs):
        pictures.append(_keyed("load.png", plot_load, runs))
    if has_transfers(runs):
        pictures.append(_keyed("transfer.png", plot_transfers, runs))
    if sum(bool(run.summary.get("slo")) for run in shown) > 1:
        pictures.append(_keyed("goodput.png", plot_goodput, shown))
    for workload, name in zip(workloads, names_of(workloads), strict=True):
        mine = [run for run in shown if run.workload == workload]
        logged = [run for run in mine if run.has_logs]
        typical = typical_runs([run for run in logged if run.summary["num_batches"]])
        pictures.append(_keyed(f"time-{name}.png", plot_account, mine))
        if logged:
            pictures.append(_keyed(f"latency-{name}.png", plot_latency_cdfs, one_of_each(logged)))
        if typical:
            pictures.append(_keyed(f"rows-{name}.png", plot_rows, typical))
        if len({run.num_loops for run in typical}) == 1:
            pictures.append(_keyed(f"wavefront-{name}.png", plot_wavefront, typical))
    return pictures


def names_of(workloads: Sequence[str]) -> list[str]:
    """Workloads as parts of file names, a number behind those that would have the same: `a b` and `a-b`."""
    slugs = [slug(workload) for workload in workloads]
    return [f"{name}-{at}" if (at := slugs[:place].count(name)) else name for place, name in enumerate(slugs)]


def typical_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs to set side by side: the chunk size that most policies ran, the smallest of equals; at most
    `MAX_PANELS`."""
    if not runs:
        return []
    counts = Counter(run.chunk_tokens for run in runs)
    chunk = min(counts, key=lambda size: (-counts[size], size))
    return sorted(
        (run for run in runs if run.chunk_tokens == chunk), key=lambda run: policy_order(run.policy)
    )[:MAX_PANELS]


def one_of_each(runs: Sequence[Run]) -> list[Run]:
    """The first run of every policy at every chunk size: at most `MAX_PANELS` of either, the smallest
    sizes."""
    chunks = sorted({run.chunk_tokens for run in runs})[:MAX_PANELS]
    policies = sorted({run.policy for run in runs}, key=policy_order)[:MAX_PANELS]
    first: dict[tuple[str, int], Run] = {}
    for run in runs:
        if run.chunk_tokens in chunks and run.policy in policies:
            first.setdefault((run.policy, run.chunk_tokens), run)
    return list(first.values())


def _keyed(name: str, draw: Callable[[Sequence[Run], Path], object], runs: Sequence[Run]) -> Picture:
    """A picture of `runs`, known by what their files say and by the code that draws."""
    digest = hashlib.sha256(f"{_code_sha256()} {draw.__name__}".encode())
    for run in runs:
        digest.update((run.path / SUMMARY).read_bytes())
        for log in (REQUESTS, BATCHES):
            path = run.path / log
            stat = path.stat() if path.is_file() else None
            digest.update(
                f"{run.path.name} {stat and (stat.st_size, stat.st_mtime_ns)}".encode("utf-8", "replace")
            )
    return Picture(name, partial(draw, runs), digest.hexdigest())


@cache
def _code_sha256() -> str:
    digest = hashlib.sha256(matplotlib.__version__.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _fault_of(picture: Picture, folder: Path) -> str | None:
    """Draw `picture`; why it could not be drawn, or None."""
    path = folder / picture.name
    try:
        picture.draw(path)
    except Exception as error:  # whatever it was: no picture may cost the run that it shows
        path.unlink(missing_ok=True)
        return _not_drawn(picture.name, error, folder)
    return None


def _drawn(folder: Path) -> Mapping[str, str]:
    """Keys by name of what an earlier call drew; names alone, so that nothing outside is ever removed."""
    try:
        found = read_json(folder / DRAWN, "what an earlier call drew")
    except InputError:
        return {}
    is_ours = isinstance(found, dict) and all(
        name == Path(name).name and name.endswith(".png") and isinstance(key, str)
        for name, key in found.items()
    )
    return found if is_ours else {}


def _not_drawn(name: str, error: Exception, folder: Path) -> str:
    reason = str(error).replace(f"{folder}/", "") or type(error).__name__
    return one_line(f"{name} could not be drawn: {reason}")
