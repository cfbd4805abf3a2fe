"""The same work over many cells at once, on the cores of this machine or on a cluster, with a bar on stderr.

Parallelism is joblib's: its default backend uses local processes, that of `sim.cluster` the workers of a Dask
scheduler.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import joblib
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from policies.process.output import plain_warnings

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Task], Result | None],
    tasks: Sequence[Task],
    jobs: int,
    what: str,
    cluster: str | None = None,
    shared: Path | None = None,
) -> Iterator[tuple[Task, Result]]:
    """Yield (task, what `work` makes of it) as they finish. On a `cluster`, all of whose workers must see the
    folder `shared`, `jobs` does not count.

    A task that raises ends it all with its error. One that returns None was ended by Ctrl-C, which was meant
    for all of them: raises `KeyboardInterrupt`.
    """
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    if not tasks:
        return
    place: Any = nullcontext()
    if cluster is not None:
        from sim.cluster import workers_of  # an extra that few need

        assert shared is not None
        place = workers_of(cluster, shared)
    with place, Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(what, total=len(tasks))
        parallel = joblib.Parallel(
            n_jobs=jobs if cluster is None else -1, return_as="generator_unordered", batch_size=1
        )
        for at, result in parallel(
            joblib.delayed(_numbered)(work, at, task) for at, task in enumerate(tasks)
        ):
            if result is None:
                raise KeyboardInterrupt
            progress.advance(bar)
            yield tasks[at], result


def _numbered(work: Callable[[Task], Result | None], at: int, task: Task) -> tuple[int, Result | None]:
    plain_warnings("sim")
    return at, work(task)
