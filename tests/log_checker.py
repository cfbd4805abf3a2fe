"""An outside checker of the nine invariants (design section 2): reads the text of `batches.csv` and `requests.csv`, nothing else.

Imports none of the scheduler's code, so that a mistake there cannot hide itself here. It replays the log as the order of events
that `after_seq` fixes (batch formed, batch collected), keeps its own account of every request, and raises `Broken` at the first
event that an invariant forbids. Invariant 8 (same seed, same bytes) needs two logs and is a plain comparison.
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field

DEPTH_FREE = ("PRELUDE", "CODA", "PREFILLING_PRELUDE")
RANGE_STAGES = {
    "PREFILL": ("PREFILL",),
    "PREFILLING_PRELUDE": ("PREFILLING_PRELUDE",),
    "PREFILLING_RECURRENT": ("PREFILLING_RECURRENT",),
    "PRELUDE": ("PRELUDE",),
    "RECURRENT": ("RECURRENT", "PREFILLING_RECURRENT"),
    "CODA": ("CODA",),
}


class Broken(AssertionError):
    """An invariant does not hold; `number` is its number in design section 2 (0: the log itself is malformed)."""

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(f"invariant {number}: {sentence}")
        self.number = number


@dataclass(frozen=True)
class Rules:
    """What the run was told. `resident_chunks` is T under a wavefront and 1 otherwise; `num_groups` is blocks in each plane.

    `has_exact_times` says that the backend took no time but `select_ns` and `host_ns`, so the time of every chance to form a batch
    is known. `outputs` is the oracle of the run; without it any number of tokens up to `max_tokens` may end a request. With early
    exit tokens may leave after `min_loops` (None: they never decide to) and must after `max_loops` (None: all loops). `grows` is
    incremental allocation; `watermark_groups` and `swap_groups` count groups.
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
    scan_limit: int = 16
    max_bypasses: int = 8
    concurrency: int | None = None
    has_exact_times: bool = True
    outputs: Mapping[int, int] | None = None
    min_loops: int | None = None
    max_loops: int | None = None
    grows: bool = False
    preemption: str = "off"
    watermark_groups: int = 0
    swap_groups: int | None = None
    shares_prefixes: bool = False

    @property
    def last_loop(self) -> int:
        """Loops after which every decoded token leaves at the latest."""
        return self.max_loops or self.num_loops

    @property
    def is_under_pressure(self) -> bool:
        """Requests may have to wait for blocks, or give way, while they run, or need fewer blocks by the time they are let in."""
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

    @property
    def queue_order(self) -> tuple[int, int]:
        return (self.arrival_ns, self.request_id)

    @property
    def prompt_end(self) -> int:
        """End of what it runs as its prompt: the tokens it kept when it gave way follow the prompt proper."""
        return self.prompt_tokens + self.kept

    @property
    def is_ready(self) -> bool:
        """Something of it is left to schedule."""
        return self.expects not in ("NOTHING", "DECISION") and not self.is_ended


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
            raise Broken(0, f"request {request_id} gives way by {kind}")
        preempted[int(request_id)] = _groups(copied[0]) if kind == "swap" else None
    resumed = {}
    for item in row["resumed"].split():
        request_id, kept, swapped = item.split(":")
        resumed[int(request_id)] = (int(kept), int(swapped))
    return Batch(
        int(row["seq"]), row["stage"], int(row["loop_count"]), int(row["num_requests"]), int(row["rows"]), int(row["submitted_ns"]),
        int(row["started_ns"]), int(row["finished_ns"]), int(row["select_ns"]) + int(row["host_ns"]), int(row["collected_ns"]),
        int(row["after_seq"]), tuple(ranges), _groups_by_request(row["allocated"]), frozenset(map(int, row["exits"].split())),
        _groups_by_request(row["grown"]), preempted, resumed,
        {int(request_id): int(count) for request_id, count in (item.split(":") for item in row["reused"].split())},
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
            int(row["request_id"]), int(row["arrival_ns"]), int(row["prompt_tokens"]), int(row["max_tokens"]), int(row["priority"]),
            row["status"], int(row["output_tokens"]), _optional(row["first_scheduled_ns"]), _optional(row["finished_ns"]),
            row["reason"], tuple(map(int, row["token_ns"].split())), int(row["preemptions"]),
            row["content"],
        )  # fmt: skip
        if track.request_id in tracks:
            raise Broken(7, f"request {track.request_id} has two lines")
        if _optional(row["first_token_ns"]) != (track.token_ns[0] if track.token_ns else None):
            raise Broken(6, f"request {track.request_id}: first_token_ns {row['first_token_ns']} is not its first token's time")
        tracks[track.request_id] = track
    return tracks


def _optional(text: str) -> int | None:
    return int(text) if text else None


def check_log(batches_csv: str, requests_csv: str, rules: Rules) -> "Replay":
    """Verify a whole run. Raises `Broken`; returns the replay, whose counters a test may look at."""
    replay = Replay(parse_batches(batches_csv), parse_requests(requests_csv), rules)
    replay.run()
    return replay


class Replay:
    """The log, event by event."""

    def __init__(self, batches: list[Batch], tracks: dict[int, Track], rules: Rules) -> None:
        self.batches, self.tracks, self.rules = batches, tracks, rules
        self.surplus_rows = 0
        self.peak_resident_chunks = 0
        self._formed_seq = self._collected_seq = -1
        self._running: dict[int, Track] = {}
        self._arriving = [track for track in reversed(tracks.values()) if track.status != "refused"]
        self._waiting: list[Track] = []
        self._hang_ups: list[tuple[int, int]] = []
        self._swapped = 0
        self.reused_groups = 0
        self._published: dict[object, int] = {}
        self._names: dict[object, int] = {}
        self._content: dict[int, object] = {}
        self._clients_free = rules.concurrency if rules.concurrency is not None else len(tracks)
        for track in tracks.values():
            track.done = [0] * rules.num_loops

    def run(self) -> None:
        self._check_refusals()
        arrivals = [track.arrival_ns for track in self.tracks.values()]
        if arrivals != sorted(arrivals):
            raise Broken(6, f"requests are not in arrival order: {arrivals}")
        now_ns = 0
        previous: Batch | None = None
        for number, batch in enumerate(self.batches):
            if batch.seq != number:
                raise Broken(0, f"line {number} holds batch {batch.seq}")
            self._check_times(batch, previous)
            self._check_shape(batch)
            while self._collected_seq < batch.after_seq:
                now_ns = self._collect(now_ns)
            now_ns = self._form(batch, now_ns)
            previous = batch
        while self._collected_seq < len(self.batches) - 1:
            now_ns = self._collect(now_ns)
        self._check_idle(now_ns, None, None)
        self._arrive(1 << 63)
        for track in self.tracks.values():
            self._check_end(track)
        self._check_concurrency()

    def _check_times(self, batch: Batch, previous: Batch | None) -> None:
        """Invariant 6, and the order of events: the device is a FIFO and at most `inflight` batches are submitted at once."""
        seq = batch.seq
        if not 0 <= batch.submitted_ns <= batch.started_ns <= batch.finished_ns <= batch.collected_ns:
            raise Broken(6, f"batch {seq} submitted, started, finished, collected at {batch.submitted_ns}, {batch.started_ns}, "
                            f"{batch.finished_ns}, {batch.collected_ns} ns")  # fmt: skip
        if batch.after_seq >= seq or seq - batch.after_seq > self.rules.inflight:
            raise Broken(5, f"batch {seq} formed after collecting {batch.after_seq}, inflight is {self.rules.inflight}")
        if batch.after_seq >= 0 and self.batches[batch.after_seq].collected_ns > batch.submitted_ns:
            raise Broken(6, f"batch {seq} formed at {batch.submitted_ns} ns, before batch {batch.after_seq} was collected")
        if self.batches[batch.after_seq + 1].collected_ns < batch.submitted_ns:
            raise Broken(6, f"batch {seq} formed at {batch.submitted_ns} ns without batch {batch.after_seq + 1}, collected earlier")
        if previous is None:
            return
        if batch.started_ns < previous.finished_ns:
            raise Broken(6, f"batch {seq} started at {batch.started_ns} ns, batch {seq - 1} finished at {previous.finished_ns}")
        if batch.submitted_ns < previous.submitted_ns or batch.collected_ns < previous.collected_ns:
            raise Broken(6, f"batch {seq} was submitted or collected before batch {seq - 1}")
        if batch.after_seq < previous.after_seq:
            raise Broken(6, f"batch {seq} knew of {batch.after_seq}, batch {seq - 1} of {previous.after_seq}")

    def _check_shape(self, batch: Batch) -> None:
        """Invariant 5 and the rules on stages and loop counts, from the batch alone."""
        rules, ranges = self.rules, batch.ranges
        ids = {item.request_id for item in ranges}
        if batch.rows != sum(item.count for item in ranges) or batch.num_requests != len(ids):
            raise Broken(0, f"batch {batch.seq} counts {batch.rows} rows of {batch.num_requests} requests, its ranges do not")
        if batch.rows > rules.max_num_batched_tokens:
            raise Broken(5, f"batch {batch.seq} has {batch.rows} rows of {rules.max_num_batched_tokens}")
        if len(ids) > rules.max_num_seqs:
            raise Broken(5, f"batch {batch.seq} has {len(ids)} requests of {rules.max_num_seqs}")
        if (batch.stage in DEPTH_FREE) != (batch.loops == 0):
            raise Broken(2, f"batch {batch.seq}: loop_count {batch.loops} in a {batch.stage} batch")
        if batch.stage not in {item.stage for item in ranges}:
            raise Broken(2, f"{batch.stage} batch {batch.seq} has no range of its stage")
        for item in ranges:
            if item.count < 1:
                raise Broken(2, f"batch {batch.seq} has an empty range {item}")
            if item.stage not in RANGE_STAGES[batch.stage]:
                raise Broken(2, f"{item.stage} range in {batch.stage} batch {batch.seq}")
            if not 0 <= item.depth <= rules.num_loops - batch.loops:
                raise Broken(2, f"batch {batch.seq} runs {batch.loops} depths from {item.depth} of {rules.num_loops}")
            ends = (rules.num_loops,) if item.is_prompt else (rules.last_loop, rules.min_loops)
            runs_to_end = item.depth + batch.loops in ends
            if not runs_to_end and (batch.loops > 1 or item.stage == "PREFILL"):
                raise Broken(2, f"batch {batch.seq} stops {item} after {batch.loops} depths: neither a boundary nor the end")

    def _form(self, batch: Batch, now_ns: int) -> int:
        """Batch `batch` is formed: the chance must be there, and every range must follow from what ran before."""
        self._check_idle(now_ns, batch, None)
        self._formed_seq = batch.seq
        self._arrive(batch.submitted_ns)
        self._check_preemptions(batch)
        self._check_growths(batch)
        self._check_admissions(batch)
        depths_run: set[tuple[int, int]] = set()
        for item in batch.ranges:
            track = self._running.get(item.request_id)
            if track is None:
                raise Broken(4, f"batch {batch.seq} runs request {item.request_id}, which holds no blocks")
            if track.is_ended:
                raise Broken(7, f"batch {batch.seq} runs request {item.request_id}, known to have ended")
            for at in range(item.depth, item.depth + max(batch.loops, 1)):
                if (item.request_id, at) in depths_run:
                    raise Broken(2, f"batch {batch.seq} runs request {item.request_id} twice at depth {at}")
                depths_run.add((item.request_id, at))
            if item.is_prompt:
                self._check_prompt(track, item, batch)
            else:
                self._check_decode(track, item, batch)
            if batch.loops and item.start + item.count > len(track.groups) * self.rules.block_size:
                raise Broken(4, f"batch {batch.seq}: {item} writes beyond the {len(track.groups)} groups of its request")
        for item in batch.ranges:
            self._apply(self.tracks[item.request_id], item, batch)
        for track in {item.request_id: self.tracks[item.request_id] for item in batch.ranges}.values():
            frontiers = [track.prompt_end, track.staged, *track.done]
            if frontiers != sorted(frontiers, reverse=True):
                raise Broken(1, f"request {track.request_id} after batch {batch.seq}: staged {track.staged}, depths {track.done}")
        return batch.submitted_ns + (batch.host_ns if self.rules.has_exact_times else 0)

    def _check_prompt(self, track: Track, item: Range, batch: Batch) -> None:
        """Invariants 2 and 3 against the state before the batch: coverage, causal order, chunk boundaries, ring slots."""
        start, end, chunk = item.start, item.start + item.count, self.rules.chunk_tokens
        where = f"batch {batch.seq}, request {track.request_id}, tokens [{start}, {end}) at depth {item.depth}"
        if track.expects != "PROMPT":
            raise Broken(2, f"{where}: the prompt is done")
        first, last = (start - track.origin) // chunk, (end - 1 - track.origin) // chunk
        if end > track.prompt_end or first != last:
            raise Broken(2, f"{where}: leaves its chunk of {chunk} or the prompt of {track.prompt_end}")
        if item.stage == "PREFILLING_PRELUDE":
            if start != track.staged:
                raise Broken(2, f"{where}: staged are {track.staged} tokens")
        else:
            for at in range(item.depth, item.depth + batch.loops):
                if start != track.done[at]:
                    what = "run twice" if start < track.done[at] else "run before the tokens ahead of them"
                    raise Broken(2, f"{where}: tokens {what}, depth {at} is done up to {track.done[at]}")
            if item.depth > 0 and end > track.done[item.depth - 1]:
                raise Broken(2, f"{where}: depth {item.depth - 1} is done up to {track.done[item.depth - 1]}")
            if item.depth == 0 and start < track.staged < end:
                raise Broken(2, f"{where}: partly staged, up to {track.staged}")
        oldest = (track.done[-1] - track.origin) // chunk
        resident = (max(end, track.staged) - 1 - track.origin) // chunk - oldest + 1
        self.peak_resident_chunks = max(self.peak_resident_chunks, resident)
        if resident > self.rules.resident_chunks:
            raise Broken(3, f"{where}: {resident} chunks resident, {self.rules.resident_chunks} allowed")

    def _check_decode(self, track: Track, item: Range, batch: Batch) -> None:
        """Invariant 2 for decode: CODA, then PRELUDE, all depths and CODA of the next position, one row each."""
        if item.stage == "RECURRENT" and self.rules.min_loops is not None:
            boundary = max(self.rules.min_loops, item.depth + 1)
            if boundary < self.rules.last_loop and item.depth + batch.loops > boundary:
                raise Broken(2, f"batch {batch.seq}: {item} runs past loop {boundary}, where it may leave")
        depth = 0 if item.stage == "PRELUDE" else track.depth
        if (item.stage, item.start, item.count, item.depth) != (track.expects, track.position, 1, depth):
            raise Broken(2, f"batch {batch.seq}: {item}, expected {track.expects} at {track.position}, depth {track.depth}")

    def _apply(self, track: Track, item: Range, batch: Batch) -> None:
        if track.last_seq < 0 and track.first_scheduled_ns != batch.submitted_ns:
            raise Broken(6, f"request {track.request_id} first ran at {batch.submitted_ns}, not {track.first_scheduled_ns} ns")
        track.last_seq = batch.seq
        loops = batch.loops
        if item.is_prompt:
            track.staged = max(track.staged, item.start + item.count)
            for at in range(item.depth, item.depth + loops):
                track.done[at] += item.count
            if track.done[-1] == track.prompt_end:
                track.expects, track.position = "CODA", track.prompt_end - 1
        elif item.stage == "CODA":
            track.coda_seqs.append(batch.seq)
            track.position += 1
            track.depth = 0
            track.expects = "PRELUDE" if len(track.coda_seqs) < track.max_tokens else "NOTHING"
        elif item.stage == "PRELUDE":
            track.expects = "RECURRENT"
        else:
            track.depth += loops
            if track.depth == self.rules.last_loop:
                is_known = track.undecided_until <= self._collected_seq
                track.expects, track.depth = "CODA" if is_known else "DECISION", track.depth % self.rules.num_loops
            elif self.rules.min_loops is not None and track.depth >= self.rules.min_loops:
                track.undecided_until = batch.seq

    def _collect(self, now_ns: int) -> int:
        """The oldest submitted batch is collected: tokens are delivered and what nothing uses any more returns.

        Who has hung up by then gets no token of it.
        """
        batch = self.batches[self._collected_seq + 1]
        self._check_idle(now_ns, None, batch)
        self._arrive(batch.collected_ns)
        self._collected_seq = batch.seq
        for item in batch.ranges:
            track = self.tracks[item.request_id]
            self.surplus_rows += item.count if track.is_ended or batch.seq <= track.surplus_until else 0
        self._check_exits(batch)
        for item in batch.ranges:
            track = self.tracks[item.request_id]
            if item.is_prompt and item.depth + batch.loops == self.rules.num_loops and not track.is_ended:
                self._publish(track, item.start + item.count)
        for item in batch.ranges:
            track = self.tracks[item.request_id]
            if item.stage == "CODA" and not track.is_ended:
                number = track.coda_seqs.index(batch.seq)
                if number >= len(track.token_ns) or track.token_ns[number] != batch.finished_ns:
                    raise Broken(7, f"token {number + 1} of request {track.request_id} was made by batch {batch.seq}, finished at "
                                    f"{batch.finished_ns} ns; delivered at {track.token_ns[number:number + 1]}")  # fmt: skip
                track.delivered += 1
                track.is_ended = track.status != "cancelled" and track.delivered == track.output_tokens
                self._clients_free += track.is_ended and self.rules.concurrency is not None
        self._drop_ended()
        return batch.collected_ns

    def _drop_ended(self) -> None:
        self._running = {
            key: track for key, track in self._running.items() if not (track.is_ended and track.last_seq <= self._collected_seq)
        }

    def _check_exits(self, batch: Batch) -> None:
        """Tokens reported to have left go on to CODA; rows of theirs in later batches are surplus. No CODA before all is known."""
        rows = {item.request_id: item for item in batch.ranges if item.stage == "RECURRENT"}
        for request_id in sorted(batch.exits):
            track, item = self.tracks[request_id], rows.get(request_id)
            if item is None or batch.seq <= track.surplus_until:
                raise Broken(2, f"batch {batch.seq} reports an exit of request {request_id}, which has no row in it or has left")
            loops, first = item.depth + batch.loops, self.rules.min_loops
            if first is None or not first <= loops < self.rules.last_loop:
                raise Broken(2, f"batch {batch.seq}: request {request_id} leaves after {loops} loops, from {first} on it may")
            if not track.is_ended:
                track.expects, track.depth = "CODA", loops
                track.undecided_until = batch.seq
                if track.last_seq > batch.seq:
                    track.surplus_until = track.last_seq
        for track in map(self.tracks.__getitem__, rows):
            if track.expects == "DECISION" and track.undecided_until == batch.seq:
                track.expects = "CODA"

    def _check_idle(self, now_ns: int, forms: Batch | None, collects: Batch | None) -> None:
        """Invariant 9: from the event at `now_ns` to the next one no chance to form a batch was passed over.

        The next event is that a batch is formed, or that one is collected, or (both None) that the run ends.
        """
        if self._formed_seq - self._collected_seq >= self.rules.inflight:
            return
        self._arrive(now_ns)
        if self.rules.is_under_pressure:
            self._check_idle_under_pressure(now_ns, forms, collects)
        elif any(track.is_ready for track in self._running.values()) or self._admissible():
            self._check_formed(forms, now_ns)
        elif self.rules.has_exact_times:
            until_ns = forms.submitted_ns if forms else collects.collected_ns if collects else None
            while (at_ns := self._next_ns()) is not None and (until_ns is None or at_ns <= until_ns):
                self._arrive(at_ns)
                if self._admissible():
                    self._check_formed(forms, at_ns)
                    return
            if forms:
                raise Broken(9, f"batch {forms.seq} is formed at {forms.submitted_ns} ns, when nothing had happened")

    def _check_idle_under_pressure(self, now_ns: int, forms: Batch | None, collects: Batch | None) -> None:
        """Work may have to wait for blocks as long as a batch is in flight; with none, a batch is formed whenever anybody is there.

        In flight or not, one is formed when all who run have the blocks they need and nobody can be made to give way.
        """
        if self._formed_seq > self._collected_seq:
            ready = [track for track in self._running.values() if track.is_ready]
            is_contested = self._by_priority_gives_way and bool(self._waiting)
            if ready and not is_contested and sum(map(self._missing, ready)) <= self._free:
                self._check_formed(forms, now_ns)
        elif self._waiting or any(track.is_ready for track in self._running.values()):
            self._check_formed(forms, now_ns)
        elif self.rules.has_exact_times:
            until_ns = forms.submitted_ns if forms else None
            while (at_ns := self._next_ns()) is not None and (until_ns is None or at_ns <= until_ns):
                self._arrive(at_ns)
                if self._waiting:
                    self._check_formed(forms, at_ns)
                    return

    @property
    def _by_priority_gives_way(self) -> bool:
        return self.rules.by_priority and self.rules.preemption != "off"

    @property
    def _free(self) -> int:
        return self.rules.num_groups - len(self._held)

    @property
    def _held(self) -> set[int]:
        return {group for track in self._running.values() for group in track.groups}

    def _rank(self, track: Track) -> tuple[int, int, int]:
        return (track.priority if self.rules.by_priority else 0, *track.queue_order)

    def _next_positions(self, track: Track) -> int:
        """Positions that must have blocks before its next step."""
        if track.expects == "PROMPT":
            chunk = self.rules.chunk_tokens
            return min(track.origin + ((track.done[0] - track.origin) // chunk + 1) * chunk, track.prompt_end)
        return track.position + 1 if track.expects == "PRELUDE" else 0

    def _missing(self, track: Track) -> int:
        if not self.rules.grows:
            return 0
        return max(0, -(-self._next_positions(track) // self.rules.block_size) - len(track.groups))

    def _check_preemptions(self, batch: Batch) -> None:
        """Who gives way is idle, ranks last, and does so for somebody who ranks before; what it holds is free afterwards."""
        victims = [self.tracks[request_id] for request_id in batch.preempted]
        idle = [track for track in self._running.values() if track.last_seq <= self._collected_seq and not track.is_ended]
        for victim in victims:
            who = f"batch {batch.seq}: request {victim.request_id}"
            if victim not in idle or self.rules.preemption == "off":
                raise Broken(4, f"{who} gives way and does not run, or is still in flight, or nobody may")
            spared = [track for track in idle if track not in victims and track.request_id not in batch.grown]
            if any(self._rank(track) > self._rank(victim) for track in spared):
                raise Broken(4, f"{who} gives way, and one that ranks after it does not")
            grown = any(self._rank(self.tracks[other]) < self._rank(victim) for other in batch.grown)
            admitted = self.rules.by_priority and any(self.tracks[other].priority < victim.priority for other in batch.allocated)
            if not grown and not admitted:
                raise Broken(4, f"{who} gives way for nobody")
        for victim in victims:
            self._give_way(victim, batch.preempted[victim.request_id], batch)

    def _give_way(self, track: Track, copied: tuple[int, ...] | None, batch: Batch) -> None:
        who = f"batch {batch.seq}: request {track.request_id}"
        if track.expects == "PROMPT":
            chunk = self.rules.chunk_tokens
            stored = track.staged = track.origin + (track.done[-1] - track.origin) // chunk * chunk
            track.done = [stored] * self.rules.num_loops
        else:
            stored = track.position + (track.expects != "PRELUDE")
        count = -(-stored // self.rules.block_size)
        limit = self.rules.swap_groups
        swaps = self.rules.preemption == "swap" and (limit is None or self._swapped + count <= limit)
        if copied != (track.groups[:count] if swaps else None):
            raise Broken(4, f"{who} swaps out {copied}, expected {track.groups[:count] if swaps else 'none'}")
        if not swaps:
            count = 0
            track.kept, track.expects, track.position, track.depth = track.delivered, "PROMPT", 0, 0
            track.origin, track.staged, track.done = 0, 0, [0] * self.rules.num_loops
        track.groups, track.is_parked, track.is_swapped, track.swapped = (), True, swaps, count
        track.times_preempted += 1
        self._swapped += count
        del self._running[track.request_id]
        self._waiting.append(track)

    def _check_growths(self, batch: Batch) -> None:
        """A running request gets exactly what it lacks for its next step, of what is free."""
        for request_id, groups in batch.grown.items():
            track = self._running.get(request_id)
            if track is None or not groups or len(groups) != self._missing(track):
                raise Broken(4, f"batch {batch.seq}: request {request_id} grows by {groups} and does not need that")
            self._take(track, groups)

    def _take(self, track: Track, groups: tuple[int, ...]) -> None:
        held = self._held
        for group in groups:
            if group in self._content:
                del self._published[self._content.pop(group)]
        if len({*held, *groups}) != len(held) + len(groups) or not all(0 <= group < self.rules.num_groups for group in groups):
            raise Broken(4, f"request {track.request_id} got a group of {groups} twice, one that is held, or one that is not there")
        track.groups = (*track.groups, *groups)

    def _check_formed(self, batch: Batch | None, now_ns: int) -> None:
        if batch is None:
            raise Broken(9, f"ready work and a place in flight at {now_ns} ns, and no batch formed")
        if self.rules.has_exact_times and batch.submitted_ns != now_ns:
            raise Broken(9, f"batch {batch.seq} could have been formed at {now_ns} ns, was at {batch.submitted_ns}")

    def _next_ns(self) -> int | None:
        """When somebody arrives or hangs up next."""
        times = [track.arrival_ns for track in self._arriving[-1:] if self._clients_free > 0]
        times += [at_ns for at_ns, _ in self._hang_ups]
        return min(times, default=None)

    def _arrive(self, now_ns: int) -> None:
        """Requests that have arrived by `now_ns` wait; under a closed loop the next one comes after an earlier one's end.

        Whoever has hung up by then waits no more, or runs no more.
        """
        while (at_ns := self._next_ns()) is not None and at_ns <= now_ns:
            if self._arriving and self._arriving[-1].arrival_ns == at_ns and self._clients_free > 0:
                self._clients_free -= 1
                track = self._arriving.pop()
                self._waiting.append(track)
                if track.status == "cancelled":
                    self._hang_ups.append((track.finished_ns or 0, track.request_id))
                continue
            hang_up = min(self._hang_ups)
            self._hang_ups.remove(hang_up)
            track = self.tracks[hang_up[1]]
            track.is_ended = True
            self._clients_free += self.rules.concurrency is not None
            if track in self._waiting:
                self._waiting.remove(track)
                self._swapped -= track.swapped
            elif track.request_id not in self._running:
                raise Broken(7, f"request {track.request_id} is cancelled at {at_ns} ns and neither waits nor runs")
            self._drop_ended()

    def _admissible(self) -> list[int]:
        """Requests that admission lets in now, one after another, by queue order, scan limit and bypass limits."""
        rules = self.rules
        self._waiting.sort(key=self._rank)
        free = self._free
        queue, bypasses = list(self._waiting), {track.request_id: track.bypasses for track in self._waiting}
        taken: list[int] = []
        while len(self._running) + len(taken) < rules.max_num_seqs:
            overtaken: list[int] = []
            for track in queue[: rules.scan_limit]:
                if self._groups_to_start(track) <= free:
                    break
                if bypasses[track.request_id] >= rules.max_bypasses:
                    return taken
                overtaken.append(track.request_id)
            else:
                return taken
            for request_id in overtaken:
                bypasses[request_id] += 1
            free -= self._groups_to_start(track)
            taken.append(track.request_id)
            queue.remove(track)
        return taken

    def _reuse(self, track: Track, groups: tuple[int, ...], batch: Batch) -> tuple[int, ...]:
        """A request that computes its prompt begins with all that is published of it, but computes one token itself."""
        who = f"batch {batch.seq}: request {track.request_id}"
        shared: list[int] = []
        if self.rules.shares_prefixes and not (track.is_parked and track.is_swapped):
            track.keys = track.keys or self._chain(track)
            for key in track.keys[: (track.prompt_end - 1) // self.rules.block_size]:
                if key not in self._published:
                    break
                shared.append(self._published[key])
        count = batch.reused.get(track.request_id, 0)
        if groups[:count] != tuple(shared):
            raise Broken(4, f"{who} reuses {groups[:count]}, published are {shared}")
        if not (track.is_parked and track.is_swapped):
            track.origin = track.staged = count * self.rules.block_size
            track.done = [track.origin] * self.rules.num_loops
        track.published = count
        self.reused_groups += count
        return groups[:count]

    def _chain(self, track: Track) -> tuple[object, ...]:
        """A key for each whole block of what its content says, nested so that it holds all blocks before it."""
        tokens, _, ids = track.content.partition(":")
        if not tokens:
            return ()
        said = [(name, place) for name in ids.split() for place in range(int(tokens))][: track.prompt_tokens]
        size = self.rules.block_size
        keys: list[object] = []
        key: object = None
        for end in range(size, len(said) + 1, size):
            key = self._names.setdefault((key, tuple(said[end - size : end])), len(self._names))
            keys.append(key)
        return tuple(keys)

    def _publish(self, track: Track, end: int) -> None:
        """Its prompt is complete up to `end`: whole blocks of whole chunks can be reused, each from the first that has it."""
        chunk = self.rules.chunk_tokens
        if end != track.prompt_end:
            end = track.origin + (end - track.origin) // chunk * chunk
        while track.published < min(len(track.keys), end // self.rules.block_size):
            key, group = track.keys[track.published], track.groups[track.published]
            track.published += 1
            if key not in self._published and group not in self._content:
                self._published[key], self._content[group] = group, key

    def _groups_to_start(self, track: Track) -> int:
        """What a waiting request gets: all it can need, or enough for its first step and for what was swapped out."""
        if not self.rules.grows:
            return self._groups(track)
        return max(self._missing(track), track.swapped)

    def _groups(self, track: Track) -> int:
        return -(-(track.prompt_tokens + track.max_tokens - 1) // self.rules.block_size)

    def _check_admissions(self, batch: Batch) -> None:
        """Invariant 4 for blocks, 5 for places, and the order of admission."""
        self._waiting.sort(key=self._rank)
        expected = list(batch.allocated) if self.rules.is_under_pressure else self._admissible()
        if list(batch.allocated) != expected:
            raise Broken(9, f"batch {batch.seq} admits {list(batch.allocated)}, by order, scan and bypass limits it is {expected}")
        for request_id, groups in batch.allocated.items():
            track = self.tracks[request_id]
            if track not in self._waiting:
                raise Broken(7, f"batch {batch.seq} admits request {request_id}, which does not wait")
            place = self._waiting.index(track)
            if place >= self.rules.scan_limit or any(other.bypasses >= self.rules.max_bypasses for other in self._waiting[:place]):
                raise Broken(9, f"batch {batch.seq} admits request {request_id} past {place} others")
            for overtaken in self._waiting[:place]:
                overtaken.bypasses += 1
            del self._waiting[place]
            track.bypasses = 0
            shared = self._reuse(track, groups, batch)
            needed = self._groups_to_start(track)
            reserve = self.rules.watermark_groups if self._running and self.rules.grows else 0
            taken = needed - len(self._held.intersection(shared))
            if len(groups) != needed or taken + reserve > self._free:
                raise Broken(4, f"request {request_id} needs {needed} groups, {reserve} stay free of {self._free}, got {groups}")
            track.groups = shared
            self._running[request_id] = track
            self._take(track, groups[len(shared) :])
            if batch.resumed.get(request_id) != ((track.kept, track.swapped) if track.is_parked else None):
                raise Broken(4, f"batch {batch.seq} resumes {request_id} with {batch.resumed.get(request_id)}")
            self._swapped -= track.swapped
            track.is_parked, track.swapped = False, 0
        if len(self._running) > self.rules.max_num_seqs:
            raise Broken(5, f"{len(self._running)} requests run at batch {batch.seq}, max_num_seqs is {self.rules.max_num_seqs}")

    def _check_refusals(self) -> None:
        """Exactly the requests that can never fit are refused, with a reason."""
        for track in self.tracks.values():
            fits = self._groups(track) <= self.rules.num_groups
            fits = fits and track.prompt_tokens + track.max_tokens <= self.rules.max_context_tokens
            if fits == (track.status == "refused") or fits != (track.reason == ""):
                what = "it can fit" if fits else "it can never fit"
                raise Broken(7, f"request {track.request_id} is {track.status} ({track.reason}), {what}")

    def _check_end(self, track: Track) -> None:
        """Invariant 7: it ended once, with the tokens it should have; and its own times are in order (6)."""
        who = f"request {track.request_id}"
        if track.status == "refused":
            if track.last_seq >= 0 or track.output_tokens or track.finished_ns is None or track.finished_ns < track.arrival_ns:
                raise Broken(7, f"{who} was refused and ran, or has no end")
            return
        if track.times_preempted != track.preemptions:
            raise Broken(7, f"{who} gave way {track.times_preempted} times, told are {track.preemptions}")
        is_cancelled = track.status == "cancelled"
        if not (is_cancelled or track.status == "finished") or not track.is_ended or track.request_id in self._running:
            raise Broken(7, f"{who} is {track.status} with {track.output_tokens} tokens delivered")
        least = 0 if is_cancelled else 1
        if not least <= track.delivered == track.output_tokens == len(track.token_ns) <= track.max_tokens:
            raise Broken(7, f"{who} has {track.output_tokens} tokens, {len(track.token_ns)} times, max_tokens {track.max_tokens}")
        if self.rules.outputs is not None:
            expected = min(self.rules.outputs.get(track.request_id, track.max_tokens), track.max_tokens)
            if track.output_tokens != expected and not (is_cancelled and track.output_tokens < expected):
                raise Broken(7, f"{who} ended after {track.output_tokens} tokens, the oracle says {expected}")
        scheduled = [] if is_cancelled and track.first_scheduled_ns is None else [track.first_scheduled_ns or 0]
        times = [track.arrival_ns, *scheduled, *track.token_ns, track.finished_ns or 0]
        if times != sorted(times) or (not is_cancelled and track.finished_ns != track.token_ns[-1]):
            raise Broken(6, f"{who}: arrival, first scheduled, tokens, finish at {times} ns")

    def _check_concurrency(self) -> None:
        """A closed loop never has more requests outstanding than its clients."""
        if self.rules.concurrency is None:
            return
        spans = [(t.arrival_ns, t.finished_ns or 0) for t in self.tracks.values() if t.finished_ns != t.arrival_ns]
        edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        outstanding = 0
        for at_ns, step in edges:
            outstanding += step
            if outstanding > self.rules.concurrency:
                raise Broken(7, f"{outstanding} requests outstanding at {at_ns} ns, concurrency is {self.rules.concurrency}")
