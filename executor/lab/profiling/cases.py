"""Which batches a profile times to tell the parts of a batch's cost apart: grids over rows, segments, query
rows and context.

Batches as policies form them come from `executor.lab.profiling.serving`. Nothing here runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from policies.core.engine.batchlines import ranges_text
from policies.core.seam.batch import ScheduledRange, Stage, Work
from results.profile import ProfileRow

CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384)
SPAN_TOKENS = 16
"""Longest range of a `linear` case where requests and depths suffice: attention then sees one history
tile."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large batches may be: rows, context and requests of one, prompt tokens per chunk, and tokens that
    the KV pool holds."""

    max_rows: int
    max_context: int
    max_requests: int
    chunks: tuple[int, ...]
    pool_tokens: int

    def admits(self, case: "Case") -> bool:
        spans = case.spans()
        return (
            case.rows <= self.max_rows
            and len(spans) <= self.max_requests
            and max(spans.values()) <= self.max_context
            and sum(spans.values()) <= self.pool_tokens
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One batch to time; request ids count from 0 in order of appearance."""

    kind: str
    name: str
    stage: Stage
    loop_count: int
    ranges: tuple[ScheduledRange, ...]

    @classmethod
    def of(cls, kind: str, name: str, work: Work) -> "Case":
        """A case that repeats `work`."""
        ids: dict[int, int] = {}
        ranges = tuple(
            item._replace(request_id=ids.setdefault(item.request_id, len(ids))) for item in work.ranges
        )
        return cls(kind, name, work.stage, work.loop_count, ranges)

    @property
    def rows(self) -> int:
        return sum(item.token_count for item in self.ranges)

    def spans(self) -> dict[int, int]:
        """Positions that each request needs K/V for."""
        found: dict[int, int] = {}
        for item in self.ranges:
            found[item.request_id] = max(found.get(item.request_id, 0), item.token_end)
        return found

    def work(self) -> Work:
        return Work.of(self.stage, self.loop_count, self.ranges)

    def row(self) -> ProfileRow:
        """The line of the profile that it becomes, not measured yet."""
        return ProfileRow(
            self.kind, self.name, self.stage, self.loop_count, self.rows, ranges_text(self.ranges)
        )


def component_cases(scale: Scale, buckets: Sequence[int], num_loops: int) -> list[Case]:
    """All grids, cut to `scale`. `buckets` are the row counts that batches are padded to."""
    cases = (
        *_linear(scale, buckets, num_loops),
        *_decode(num_loops),
        *_prompts(num_loops),
        *_wavefronts(num_loops),
        *_mixes(),
        *_token_stages(scale, buckets),
        *_copies(num_loops),
    )
    return [case for case in cases if scale.admits(case)]


def _prompt(
    request_id: int, depth: int, start: int, count: int, stage: Stage = Stage.PREFILLING_RECURRENT
) -> ScheduledRange:
    return ScheduledRange(request_id, stage, depth, start, count, start, 0, embeds=depth == 0)


def _linear(scale: Scale, buckets: Sequence[int], num_loops: int) -> Iterator[Case]:
    """Rows up to and just past every bucket, in as many ranges from position 0 as there are requests and
    depths."""
    for rows, loops in [*product(_edges(buckets), (1,)), *product(buckets[::3], (num_loops,))]:
        depths = num_loops if loops == 1 else 1
        longest = max(SPAN_TOKENS, -(-rows // (scale.max_requests * depths)))
        ranges = tuple(
            _prompt(at // depths, at % depths, 0, min(longest, rows - first))
            for at, first in enumerate(range(0, rows, longest))
        )
        name = f"{rows} rows in ranges of {longest}" + ("" if loops == 1 else f", {loops} loops")
        yield Case("linear", name, Stage.PREFILLING_RECURRENT, loops, ranges)


def _decode(num_loops: int) -> Iterator[Case]:
    shapes = [(count, context, 1) for count in (1, 2, 4, 8, 16, 32, 64) for context in CONTEXTS]
    shapes += [(count, context, num_loops) for count in (1, 8, 32) for context in (128, 512, 4096)]
    for count, context, loops in shapes:
        yield decode_case(count, context, loops, depths=num_loops if loops == 1 else 1)


def decode_case(count: int, context: int, loops: int = 1, depths: int = 1) -> Case:
    """`count` decode rows of as many requests that see `context` tokens, spread over `depths`."""
    ranges = tuple(ScheduledRange(at, Stage.RECURRENT, at % depths, context - 1, 1) for at in range(count))
    name = f"{count} decode rows at {context}" + ("" if loops == 1 else f", {loops} loops")
    return Case("attention", name, Stage.RECURRENT, loops, ranges)


def _prompts(num_loops: int) -> Iterator[Case]:
    shapes = [
        (requests, count, end, 1)
        for requests in (1, 4)
        for count in (16, 32, 64, 128, 256, 512)
        for end in (count, 2048, 8192, 16384)
    ]
    shapes += [
        (1, 1024, 1024, 1),
        (1, 2048, 2048, 1),
        (1, 1024, 8192, 1),
        (8, 128, 1024, 1),
        (16, 64, 512, 1),
    ]
    shapes += [(requests, count, count, num_loops) for requests in (1, 8) for count in (16, 128, 256)]
    for requests, count, end, loops in shapes:
        if end >= count:
            yield prompt_case(requests, count, end, loops)


def prompt_case(requests: int, count: int, end: int, loops: int = 1) -> Case:
    """The last `count` tokens of prompts of `end` tokens."""
    stage = Stage.PREFILL if loops > 1 else Stage.PREFILLING_RECURRENT
    ranges = tuple(_prompt(at, 0, end - count, count, stage) for at in range(requests))
    name = f"{requests} x {count} prompt rows to {end}" + ("" if loops == 1 else f", {loops} loops")
    return Case("attention", name, stage, loops, ranges)


def _wavefronts(num_loops: int) -> Iterator[Case]:
    for requests, chunk, end in product((1, 4, 8), (16, 32, 64, 128), (1024, 8192)):
        yield wavefront_case(requests, chunk, end, num_loops)


def wavefront_case(requests: int, chunk: int, end: int, num_loops: int) -> Case:
    """Requests with a chunk at every depth, the deepest one ending at `end`."""
    ranges = tuple(
        _prompt(request, depth, end - chunk + (num_loops - 1 - depth) * chunk, chunk)
        for request in range(requests)
        for depth in reversed(range(num_loops))
    )
    name = f"{requests} x {num_loops} x {chunk} wavefront rows at {end}"
    return Case("attention", name, Stage.PREFILLING_RECURRENT, 1, ranges)


def _mixes() -> Iterator[Case]:
    for decode, context, count, start in product((1, 8, 32), (512, 4096), (16, 64, 512), (0, 4096)):
        if decode > 1:
            yield mixed_case(decode - 1, context, count, start)


def mixed_case(decode: int, context: int, count: int, start: int) -> Case:
    """`decode` decode rows that see `context` tokens, beside a prompt range, whose query tiles are higher."""
    rows = tuple(ScheduledRange(at, Stage.RECURRENT, at % 4, context - 1, 1) for at in range(decode))
    name = f"{decode} decode rows at {context} beside {count} prompt rows from {start}"
    return Case("attention", name, Stage.RECURRENT, 1, (*rows, _prompt(decode, 0, start, count)))


def _token_stages(scale: Scale, buckets: Sequence[int]) -> Iterator[Case]:
    """Prelude and coda of decoding requests, staging of prompts: rows up to and just past every bucket."""
    edges = _edges(buckets)
    for kind, stage in (("prelude", Stage.PRELUDE), ("coda", Stage.CODA)):
        for count in (rows for rows in edges if rows <= scale.max_requests):
            yield Case(
                kind,
                f"{count} rows",
                stage,
                0,
                tuple(ScheduledRange(at, stage, 0, 511 % scale.max_context, 1) for at in range(count)),
            )
    shapes = [(1, 16), (4, 16), (1, 64), (4, 64), (1, 128), (8, 128), (1, 512), (4, 512)]
    for requests, count in (*shapes, *((1, rows) for rows in edges if (1, rows) not in shapes)):
        stage = Stage.PREFILLING_PRELUDE
        ranges = tuple(_prompt(at, 0, 0, count, stage) for at in range(requests))
        yield Case("staging", f"{requests} x {count} prompt rows", stage, 0, ranges)


def _edges(buckets: Sequence[int]) -> list[int]:
    """The fewest and the most rows that are padded to each bucket: 1 2 3 4 5 8 for buckets 1 2 4 8."""
    return [rows for low, high in pairwise((0, *buckets)) for rows in sorted({low + 1, high})]


def _copies(num_loops: int) -> Iterator[Case]:
    """Rows that leave after a depth; from the last one there is nothing to copy."""
    for count, depth in product((1, 4, 8, 16, 32), range(num_loops - 1)):
        ranges = tuple(ScheduledRange(at, Stage.RECURRENT, depth, 100 + at, 1) for at in range(count))
        yield Case("copies", f"{count} rows after depth {depth}", Stage.RECURRENT, 0, ranges)
