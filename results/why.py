"""Which batches are behind a tail: `results why RUN --itl p99`.

A tail is every gap between two tokens, or every first token, that took as long as the percentile or longer. A
batch is behind one when the device ran it in that time. Time without a batch on the device is the host's and
the queue's. Where a run knows components (simulations do) each batch's part is split by them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from policies.core.errors import InputError
from policies.core.seam.events import COMPONENTS
from results.batchlog import LoggedBatch
from results.load import Run
from results.table import plain_table

MOST_BATCHES, MOST_NAMED = 12, 4
KINDS = ("decode rows alone", "prompts alone", "both together", "embedding and LM head")
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class Behind:
    """A batch, in how many gaps of the tail it ran, and for how long in all of them together."""

    batch: LoggedBatch
    num_gaps: int
    behind_ns: int


@dataclass(slots=True)
class Spent:
    """Nanoseconds of gaps by what was on the device: components, `device` where they are not known,
    `idle`."""

    num_gaps: int = 0
    whole_ns: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)

    def mean_ms(self, name: str) -> float:
        return self.by_name[name] / max(self.num_gaps, 1) / 1e6

    def share(self, name: str) -> float:
        return self.by_name[name] / self.whole_ns if self.whole_ns else 0.0


@dataclass(frozen=True, slots=True)
class Reason:
    """What is behind the tail of one run: gaps from `limit_ns` on, beside the gaps around the median."""

    run: Run
    name: str
    percent: float
    limit_ns: float
    median_ns: float
    tail: Spent
    typical: Spent
    batches: tuple[Behind, ...]
    num_batches: int

    @property
    def components(self) -> list[str]:
        return [
            name
            for name in (*COMPONENTS, "device", "idle")
            if self.tail.by_name[name] or self.typical.by_name[name]
        ]


def why(run: Run, name: str, percent: float) -> Reason:
    """The batches behind the slowest `name` ("itl" or "ttft") of `run`, from its `percent` percentile on.

    Raises `InputError` for a run without logs, or without such a latency.
    """
    if not run.has_logs:
        raise InputError(
            f"{run.path}: has no requests.csv and batches.csv, expected a run that kept them, or one replica "
            "of a fleet"
        )
    spans = np.array(list(_spans(run, name)), dtype=np.int64).reshape(-1, 2)
    if not len(spans):
        raise InputError(
            f"{run.path}: no request has what --{name} asks about, expected one with enough tokens"
        )
    lengths = spans[:, 1] - spans[:, 0]
    limit_ns, median_ns = np.percentile(lengths, (percent, 50))
    tail = spans[lengths >= limit_ns]
    around = np.argsort(np.abs(lengths - median_ns), kind="stable")[: max(len(tail), 1)]
    parts = [_Part(spans_of) for spans_of in (tail, spans[np.sort(around)])]
    found: list[Behind] = []
    for batch in run.batches():
        tail_behind = parts[0].see(batch)
        parts[1].see(batch)
        if tail_behind is not None:
            found.append(tail_behind)
    found.sort(key=lambda item: (-item.behind_ns, item.batch.seq))
    spent = [part.spent() for part in parts]
    return Reason(
        run,
        name,
        percent,
        float(limit_ns),
        float(median_ns),
        spent[0],
        spent[1],
        tuple(found[:MOST_BATCHES]),
        len(found),
    )


def composition(batch: LoggedBatch, chunk_tokens: int) -> str:
    """What a batch held in words: `512 prompt rows of request 7 at depth 0 (from token 512), 3 decode
    rows`."""
    prompts: dict[tuple[int, int], list[int]] = {}
    decode = Counter(item.depth for item in batch.ranges() if not item.is_prompt)
    for item in batch.ranges():
        if item.is_prompt:
            prompts.setdefault((item.request_id, item.depth), [item.token_start, 0])[1] += item.token_count
    ordered = sorted(prompts.items(), key=lambda item: -item[1][1])
    words = [
        f"{count} of request {request} @{start} at depth {depth}"
        for (request, depth), (start, count) in ordered[:MOST_NAMED]
    ]
    if len(ordered) > MOST_NAMED:
        words.append(
            f"{sum(count for _, (_, count) in ordered[MOST_NAMED:])} in {len(ordered) - MOST_NAMED} more"
        )
    if decode:
        depths = ",".join(map(str, sorted(decode)))
        words.append(f"{decode.total()} decode rows at depth {depths}")
    return ", ".join(words)


def kind_of(batch: LoggedBatch) -> str:
    """One of `KINDS`, by what the batch held."""
    if not batch.loop_count:
        return KINDS[3]
    if ":PREFILL" not in batch.ranges_text:
        return KINDS[0]
    return KINDS[2] if batch.num_decode_rows else KINDS[1]


def batch_table(reason: Reason) -> Table:
    """The batches, those with the longest part in the tail first."""
    table = plain_table(None)
    for name in ("batch", "at, ms", "took, ms", "rows", "loops", "in gaps", "of the tail"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("what it held", no_wrap=True)
    for item in reason.batches:
        batch = item.batch
        table.add_row(
            str(batch.seq),
            f"{batch.started_ns / 1e6:,.1f}",
            f"{(batch.finished_ns - batch.started_ns) / 1e6:,.2f}",
            str(batch.rows),
            str(batch.loop_count),
            str(item.num_gaps),
            f"{item.behind_ns / max(reason.tail.whole_ns, 1):.1%}",
            batch.stage,
            Text(composition(batch, reason.run.chunk_tokens)),
        )
    return table


def component_table(reason: Reason) -> Table:
    """Where the time of a gap of the tail goes, beside one around the median."""
    table = plain_table(None)
    table.add_column("", no_wrap=True)
    for name in ("in the tail, ms", "share", "around the median, ms", "share", "more, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in reason.components:
        tail, typical = reason.tail.mean_ms(name), reason.typical.mean_ms(name)
        table.add_row(
            name,
            f"{tail:,.2f}",
            f"{reason.tail.share(name):.0%}",
            f"{typical:,.2f}",
            f"{reason.typical.share(name):.0%}",
            f"{tail - typical:+,.2f}",
        )
    return table


def sentences(reason: Reason) -> Iterator[str]:
    """What was asked, and the answer in short."""
    run, tail = reason.run, reason.tail
    what = {"itl": "gaps between tokens", "ttft": "first tokens"}[reason.name]
    yield (
        f"{run.workload}, {run.policy}, chunk {run.chunk_tokens}: {tail.num_gaps} {what} took "
        f"{reason.limit_ns / 1e6:,.2f} ms (p{reason.percent:g}) or longer; the median is "
        f"{reason.median_ns / 1e6:,.2f} ms"
    )
    shown = sum(item.behind_ns for item in reason.batches)
    yield (
        f"{reason.num_batches} batches ran in them; the {len(reason.batches)} below are "
        f"{shown / max(tail.whole_ns, 1):.0%} of their time"
    )
    kinds = [
        f"{kind} {tail.by_kind[kind] / max(tail.whole_ns, 1):.0%}" for kind in KINDS if tail.by_kind[kind]
    ]
    yield f"of their time, batches of {', '.join(kinds) or 'nothing'}"


class _Part:
    """Spans in order of their end, and what is found in them while batches go by in order of their start."""

    def __init__(self, spans: Int64) -> None:
        self._spans = spans[np.argsort(spans[:, 0], kind="stable")]
        self._starts, self._ends = self._spans[:, 0], self._spans[:, 1]
        self._latest = np.maximum.accumulate(self._ends)
        self._by_name: Counter[str] = Counter()
        self._by_kind: Counter[str] = Counter()

    def see(self, batch: LoggedBatch) -> Behind | None:
        """What `batch` is behind, None when it is behind nothing."""
        first = int(np.searchsorted(self._latest, batch.started_ns, side="right"))
        last = int(np.searchsorted(self._starts, batch.finished_ns, side="left"))
        inside = np.minimum(self._ends[first:last], batch.finished_ns) - np.maximum(
            self._starts[first:last], batch.started_ns
        )
        inside = inside[inside > 0]
        took_ns = batch.finished_ns - batch.started_ns
        if not len(inside) or not took_ns:
            return None
        behind_ns = int(inside.sum())
        known = [(name, batch.row.whole_or_none(f"{name}_ns") or 0) for name in COMPONENTS]
        total_ns = sum(value for _, value in known)
        if total_ns:
            for name, value in known:
                self._by_name[name] += round(behind_ns * value / total_ns)
        else:
            self._by_name["device"] += behind_ns
        self._by_kind[kind_of(batch)] += behind_ns
        return Behind(batch, len(inside), behind_ns)

    def spent(self) -> Spent:
        whole_ns = int((self._ends - self._starts).sum())
        self._by_name["idle"] = max(whole_ns - self._by_name.total(), 0)
        return Spent(len(self._spans), whole_ns, self._by_name, self._by_kind)


def _spans(run: Run, name: str) -> Iterator[tuple[int, int]]:
    """From when until when every latency called `name` of the run was."""
    table = run.requests()
    for arrival_ns, text in table[["arrival_ns", "token_ns"]].itertuples(index=False):
        times = np.fromstring(text, dtype=np.int64, sep=" ").tolist()
        if name == "ttft":
            yield from ((arrival_ns, token_ns) for token_ns in times[:1])
        else:
            yield from pairwise(times)


def percent_of(text: str) -> float:
    """`p99.9` as 99.9. Raises `ValueError` for what is no percentile."""
    value = float(text.removeprefix("p"))
    if not 0 <= value < 100:
        raise ValueError
    return value
