"""What `batches.csv` and `requests.csv` say, as values: the text is read here and nothing else, by no code of
the project's own."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field


class Broken(AssertionError):
    """An invariant does not hold; `number` is its number in design section 2 (0: the log itself is
    malformed)."""

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(f"invariant {number}: {sentence}")
        self.number = number


SLEPT_NS = 1_000_000


@dataclass(frozen=True)
class Rules:
    """What the run was told. `resident_chunks` is T under a wavefront and 1 otherwise; `num_groups` is blocks
    in each plane.

    `has_exact_times` says that the backend took no time but `select_ns` and `host_ns`, and
    `after_submit_ns` and `after_collect_ns` until the host could turn to the next batch, so the time of
    every chance to form a batch is known; whoever comes in the `collect_ns` before a batch is collected
    waits until it is; a host that had nothing to do for more than SLEPT_NS takes `wake_ns` more.
    `outputs` is the oracle of the run; without it any number of tokens up to
    `max_tokens` may end a request. With early exit tokens may leave after `min_loops` (None: they never
    decide to) and must after `max_loops` (None: all loops). `grows` is incremental allocation, under
    which a request begins with blocks for all that is known of it (`whole_context`) or for its first
    chunk; `watermark_groups` and `swap_groups` count groups. One that was preempted `most_preemptions`
    times is guarded. A request ranks `rank_ns_per_token` later for every token of its prompt. Where tokens
    are guessed, a token's successor is after `draft_loops` loops, `max_guesses` ahead. `role` is what the
    engine does of its requests: whole, prefill or decode.
    """

    num_loops: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    inflight: int
    resident_chunks: int
    num_groups: int
    block_size: int
    max_context_tokens: int = 65536
    by_priority: bool = False
    rank_ns_per_token: int = 0
    scan_limit: int = 16
    max_bypasses: int = 8
    concurrency: int | None = None
    has_exact_times: bool = True
    after_submit_ns: int = 0
    after_collect_ns: int = 0
    collect_ns: int = 0
    wake_ns: int = 0
    outputs: Mapping[int, int] | None = None
    min_loops: int | None = None
    max_loops: int | None = None
    grows: bool = False
    whole_context: bool = True
    most_preemptions: int = 5
    preemption: str = "off"
    watermark_groups: int = 0
    swap_groups: int | None = None
    shares_prefixes: bool = False
    draft_loops: int = 0
    max_guesses: int = 0
    role: str = "whole"

    @property
    def head_loops(self) -> tuple[int, int]:
        """Loops after which a guess is made, and a token."""
        return self.draft_loops, self.num_loops

    @property
    def last_loop(self) -> int:
        """Loops after which every decoded token leaves at the latest."""
        return self.max_loops or self.num_loops

    @property
    def is_under_pressure(self) -> bool:
        """Requests may have to wait for blocks, or be preempted, while they run, or need fewer blocks by the
        time they are let in."""
        return self.grows or self.preemption != "off" or self.shares_prefixes


@dataclass(frozen=True)
class Range:
    request_id: int
    stage: str
    depth: int
    start: int
    count: int

    @property
    def is_prompt(self) -> bool:
        return self.stage.startswith("PREFILL")


@dataclass(frozen=True)
class Batch:
    seq: int
    stage: str
    loops: int
    num_requests: int
    rows: int
    submitted_ns: int
    started_ns: int
    finished_ns: int
    host_ns: int
    collected_ns: int
    after_seq: int
    ranges: tuple[Range, ...]
    allocated: Mapping[int, tuple[int, ...]]
    exits: frozenset[int]
    grown: Mapping[int, tuple[int, ...]]
    preempted: Mapping[int, tuple[int, ...] | None]
    resumed: Mapping[int, tuple[int, int]]
    reused: Mapping[int, int]
    refused: frozenset[tuple[int, int]] = frozenset()


@dataclass(eq=False)
class Track:
    """One request as `requests.csv` tells it, and what the batches so far have done to it."""

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    status: str
    output_tokens: int
    first_scheduled_ns: int | None
    finished_ns: int | None
    reason: str
    token_ns: tuple[int, ...]
    preemptions: int
    content: str
    origin: int = 0
    published: int = 0
    keys: tuple[object, ...] = ()
    staged: int = 0
    done: list[int] = field(default_factory=list)
    expects: str = "PROMPT"
    position: int = 0
    depth: int = 0
    coda_seqs: list[int] = field(default_factory=list)
    last_seq: int = -1
    groups: tuple[int, ...] = ()
    is_ended: bool = False
    delivered: int = 0
    kept: int = 0
    times_preempted: int = 0
    is_parked: bool = False
    is_swapped: bool = False
    swapped: int = 0
    bypasses: int = 0
    surplus_until: int = -1
    undecided_until: int = -1
    made: int = 0
    guessed: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)
    imported_ns: int | None = None

    @property
    def prompt_end(self) -> int:
        """End of what it runs as its prompt: the tokens it kept when it was preempted follow the prompt
        proper."""
        return self.prompt_tokens + self.kept

    @property
    def is_ready(self) -> bool:
        """Something of it is left to schedule."""
        return self.expects not in ("NO_TRANSFERS", "DECISION", "SENT", "RECEIVED") and not self.is_ended


def parse_batches(text: str) -> list[Batch]:
    """Every line of `batches.csv`."""
    return [_batch(row) for row in csv.DictReader(io.StringIO(text))]


def _batch(row: Mapping[str, str]) -> Batch:
    ranges = []
    for item in row["ranges"].split(" "):
        request_id, stage, depth, start, count = item.split(":")
        ranges.append(Range(int(request_id), stage, int(depth), int(start), int(count)))
    preempted: dict[int, tuple[int, ...] | None] = {}
    for item in row["preempted"].split():
        request_id, kind, *copied = item.split(":")
        if kind not in ("swap", "recompute"):
            raise Broken(0, f"request {request_id} is preempted by {kind}")
        preempted[int(request_id)] = _groups(copied[0]) if kind == "swap" else None
    resumed = {}
    for item in row["resumed"].split():
        request_id, kept, swapped = item.split(":")
        resumed[int(request_id)] = (int(kept), int(swapped))
    outcomes = [item.split(":") for item in row["exits"].split()]
    return Batch(
        int(row["seq"]), row["stage"], int(row["loop_count"]), int(row["num_requests"]), int(row["rows"]),
        int(row["submitted_ns"]), int(row["started_ns"]), int(row["finished_ns"]),
        int(row["select_ns"]) + int(row["host_ns"]), int(row["collected_ns"]), int(row["after_seq"]),
        tuple(ranges), _groups_by_request(row["allocated"]), 
        frozenset(int(item[0]) for item in outcomes if len(item) == 1),
        _groups_by_request(row["grown"]), preempted, resumed,
        {int(request_id): int(count) for request_id,
        count in (item.split(":") for item in row["reused"].split())},
        frozenset((int(item[0]), int(item[1])) for item in outcomes if len(item) == 2),
    )  # fmt: skip


def _groups_by_request(text: str) -> dict[int, tuple[int, ...]]:
    items = [item.split(":") for item in text.split()]
    return {int(request_id): _groups(runs) for request_id, runs in items}


def _groups(runs: str) -> tuple[int, ...]:
    """`4-6+2` is (4, 5, 6, 2)."""
    groups: list[int] = []
    for run in filter(None, runs.split("+")):
        first, _, last = run.partition("-")
        groups.extend(range(int(first), int(last or first) + 1))
    return tuple(groups)


def parse_requests(text: str) -> dict[int, Track]:
    """Every line of `requests.csv` by request id."""
    tracks: dict[int, Track] = {}
    for row in csv.DictReader(io.StringIO(text)):
        track = Track(
            int(row["request_id"]), int(row["arrival_ns"]), int(row["prompt_tokens"]), int(row["max_tokens"]),
            int(row["priority"]), row["status"], int(row["output_tokens"]),
            _optional(row["first_scheduled_ns"]), _optional(row["finished_ns"]), row["reason"],
            tuple(map(int, row["token_ns"].split())), int(row["preemptions"]), row["content"],
        )  # fmt: skip
        if track.request_id in tracks:
            raise Broken(7, f"request {track.request_id} has two lines")
        if _optional(row["first_token_ns"]) != (track.token_ns[0] if track.token_ns else None):
            raise Broken(
                6,
                f"request {track.request_id}: first_token_ns {row['first_token_ns']} is not its first "
                "token's time",
            )
        tracks[track.request_id] = track
    return tracks


def _optional(text: str) -> int | None:
    return int(text) if text else None
