"""An outside checker of the nine invariants (design section 2): reads the text of `batches.csv` and
`requests.csv`, nothing else.

Imports none of the scheduler's code, so that a mistake there cannot hide itself here. It replays the log as
the order of events that `after_seq` fixes (batch formed, batch collected), keeps its own account of every
request, and raises `Broken` at the first event that an invariant forbids. Invariant 8 (same seed, same bytes)
needs two logs and is a plain comparison.
"""

import log_guesses
from log_holdings import Holdings
from log_reader import Batch, Broken, Range, Rules, Track, parse_batches, parse_requests

DEPTH_FREE = ("PRELUDE", "CODA", "PREFILLING_PRELUDE")
RANGE_STAGES = {
    "PREFILL": ("PREFILL",),
    "PREFILLING_PRELUDE": ("PREFILLING_PRELUDE",),
    "PREFILLING_RECURRENT": ("PREFILLING_RECURRENT",),
    "PRELUDE": ("PRELUDE",),
    "RECURRENT": ("RECURRENT", "PREFILLING_RECURRENT"),
    "CODA": ("CODA", "VERIFY", "DRAFT"),
}


def check_log(batches_csv: str, requests_csv: str, rules: Rules) -> "Replay":
    """Verify a whole run. Raises `Broken`; returns the replay, whose counters a test may look at."""
    replay = Replay(parse_batches(batches_csv), parse_requests(requests_csv), rules)
    replay.run()
    return replay


class Replay(Holdings):
    """The log, event by event."""

    def __init__(self, batches: list[Batch], tracks: dict[int, Track], rules: Rules) -> None:
        super().__init__(tracks, rules)
        self.batches = batches
        self.peak_resident_chunks = 0
        self._formed_seq = self._collected_seq = -1
        self._host_free_ns = 0
        self._arriving = [track for track in reversed(tracks.values()) if track.status != "refused"]
        self._hang_ups: list[tuple[int, int]] = []
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
        """Invariant 6, and the order of events: the device is a FIFO and at most `inflight` batches are
        submitted at once."""
        seq = batch.seq
        if not 0 <= batch.submitted_ns <= batch.started_ns <= batch.finished_ns <= batch.collected_ns:
            raise Broken(6, f"batch {seq} submitted, started, finished, collected at {batch.submitted_ns}, "
                            f"{batch.started_ns}, "
                            f"{batch.finished_ns}, {batch.collected_ns} ns")  # fmt: skip
        if batch.after_seq >= seq or seq - batch.after_seq > self.rules.inflight:
            raise Broken(
                5, f"batch {seq} formed after collecting {batch.after_seq}, inflight is {self.rules.inflight}"
            )
        if batch.after_seq >= 0 and self.batches[batch.after_seq].collected_ns > batch.submitted_ns:
            raise Broken(
                6,
                f"batch {seq} formed at {batch.submitted_ns} ns, before batch {batch.after_seq} was "
                "collected",
            )
        if self.batches[batch.after_seq + 1].collected_ns < batch.submitted_ns:
            raise Broken(
                6,
                f"batch {seq} formed at {batch.submitted_ns} ns without batch {batch.after_seq + 1}, "
                "collected earlier",
            )
        if previous is None:
            return
        if batch.started_ns < previous.finished_ns:
            raise Broken(
                6,
                f"batch {seq} started at {batch.started_ns} ns, batch {seq - 1} finished at "
                f"{previous.finished_ns}",
            )
        if batch.submitted_ns < previous.submitted_ns or batch.collected_ns < previous.collected_ns:
            raise Broken(6, f"batch {seq} was submitted or collected before batch {seq - 1}")
        if batch.after_seq < previous.after_seq:
            raise Broken(6, f"batch {seq} knew of {batch.after_seq}, batch {seq - 1} of {previous.after_seq}")

    def _check_shape(self, batch: Batch) -> None:
        """Invariant 5 and the rules on stages and loop counts, from the batch alone."""
        rules, ranges = self.rules, batch.ranges
        ids = {item.request_id for item in ranges}
        if batch.rows != sum(item.count for item in ranges) or batch.num_requests != len(ids):
            raise Broken(
                0,
                f"batch {batch.seq} counts {batch.rows} rows of {batch.num_requests} requests, its ranges do "
                "not",
            )
        if batch.rows > rules.max_num_batched_tokens:
            raise Broken(5, f"batch {batch.seq} has {batch.rows} rows of {rules.max_num_batched_tokens}")
        if len(ids) > rules.max_num_seqs:
            raise Broken(5, f"batch {batch.seq} has {len(ids)} requests of {rules.max_num_seqs}")
        if (batch.stage in DEPTH_FREE) != (batch.loops == 0):
            raise Broken(2, f"batch {batch.seq}: loop_count {batch.loops} in a {batch.stage} batch")
        if self.rules.draft_loops:
            log_guesses.check_boundaries(batch, self.rules)
        if not any(item.stage in RANGE_STAGES[batch.stage] for item in ranges):
            raise Broken(2, f"{batch.stage} batch {batch.seq} has no range of its stage")
        for item in ranges:
            if item.count < 1:
                raise Broken(2, f"batch {batch.seq} has an empty range {item}")
            if item.stage not in RANGE_STAGES[batch.stage]:
                raise Broken(2, f"{item.stage} range in {batch.stage} batch {batch.seq}")
            if item.stage in ("VERIFY", "DRAFT") or (rules.draft_loops and batch.stage == "RECURRENT"):
                continue  # see log_guesses
            if not 0 <= item.depth <= rules.num_loops - batch.loops:
                raise Broken(
                    2, f"batch {batch.seq} runs {batch.loops} depths from {item.depth} of {rules.num_loops}"
                )
            ends = (rules.last_loop, rules.min_loops)
            if item.is_prompt:  # beside decode rows it may come back where they must
                ends = (rules.num_loops, *ends) if batch.stage == "RECURRENT" else (rules.num_loops,)
            runs_to_end = item.depth + batch.loops in ends
            if not runs_to_end and (batch.loops > 1 or item.stage == "PREFILL"):
                raise Broken(
                    2,
                    f"batch {batch.seq} stops {item} after {batch.loops} depths: neither a boundary nor the "
                    "end",
                )

    def _form(self, batch: Batch, now_ns: int) -> int:
        """Batch `batch` is formed: the chance must be there, and every range must follow from what ran
        before."""
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
            is_guessing = self.rules.draft_loops > 0 and not item.is_prompt
            for at in range(item.depth, item.depth + max(batch.loops, 1)) if not is_guessing else ():
                if (item.request_id, at) in depths_run:
                    raise Broken(2, f"batch {batch.seq} runs request {item.request_id} twice at depth {at}")
                depths_run.add((item.request_id, at))
            if item.is_prompt:
                self._check_prompt(track, item, batch)
            elif is_guessing:
                log_guesses.check_row(track, item, batch, self.rules)
            else:
                self._check_decode(track, item, batch)
            if batch.loops and item.start + item.count > len(track.groups) * self.rules.block_size:
                raise Broken(
                    4,
                    f"batch {batch.seq}: {item} writes beyond the {len(track.groups)} groups of its request",
                )
        for item in batch.ranges:
            if item.is_prompt or not self.rules.draft_loops:
                self._apply(self.tracks[item.request_id], item, batch)
        for track in {item.request_id: self.tracks[item.request_id] for item in batch.ranges}.values():
            frontiers = [track.prompt_end, track.staged, *track.done]
            if track.guessed:
                frontiers = [track.guessed, *track.done, track.made]
            if frontiers != sorted(frontiers, reverse=True):
                raise Broken(
                    1,
                    f"request {track.request_id} after batch {batch.seq}: staged {track.staged}, depths "
                    f"{track.done}",
                )
        if not self.rules.has_exact_times:
            return batch.submitted_ns
        launched_ns = max(self._host_free_ns, batch.submitted_ns) + batch.host_ns
        self._host_free_ns = launched_ns + self.rules.after_submit_ns
        return launched_ns

    def _check_prompt(self, track: Track, item: Range, batch: Batch) -> None:
        """Invariants 2 and 3 against the state before the batch: coverage, causal order, chunk boundaries,
        ring slots."""
        start, end, chunk = item.start, item.start + item.count, self.rules.chunk_tokens
        where = (
            f"batch {batch.seq}, request {track.request_id}, tokens [{start}, {end}) at depth {item.depth}"
        )
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
        """Invariant 2 for decode: CODA, then PRELUDE, all depths and CODA of the next position, one row
        each."""
        if item.stage == "RECURRENT" and self.rules.min_loops is not None:
            boundary = max(self.rules.min_loops, item.depth + 1)
            if boundary < self.rules.last_loop and item.depth + batch.loops > boundary:
                raise Broken(2, f"batch {batch.seq}: {item} runs past loop {boundary}, where it may leave")
        depth = 0 if item.stage == "PRELUDE" else track.depth
        if (item.stage, item.start, item.count, item.depth) != (track.expects, track.position, 1, depth):
            raise Broken(
                2,
                f"batch {batch.seq}: {item}, expected {track.expects} at {track.position}, depth "
                f"{track.depth}",
            )

    def _apply(self, track: Track, item: Range, batch: Batch) -> None:
        if track.last_seq < 0 and track.first_scheduled_ns != batch.submitted_ns:
            raise Broken(
                6,
                f"request {track.request_id} first ran at {batch.submitted_ns}, not "
                f"{track.first_scheduled_ns} ns",
            )
        track.last_seq = batch.seq
        loops = batch.loops
        if item.is_prompt:
            track.staged = max(track.staged, item.start + item.count)
            for at in range(item.depth, item.depth + loops):
                track.done[at] += item.count
            if track.done[-1] == track.prompt_end:
                track.expects, track.position = "CODA", track.prompt_end - 1
                if self.rules.draft_loops:
                    log_guesses.begin(track)
        elif item.stage == "CODA":
            track.coda_seqs.append(batch.seq)
            track.position += 1
            track.depth = 0
            track.expects = "PRELUDE" if len(track.coda_seqs) < track.max_tokens else "NO_TRANSFERS"
        elif item.stage == "PRELUDE":
            track.expects = "RECURRENT"
        else:
            track.depth += loops
            if track.depth == self.rules.last_loop:
                is_known = track.undecided_until <= self._collected_seq
                track.expects, track.depth = (
                    "CODA" if is_known else "DECISION",
                    track.depth % self.rules.num_loops,
                )
            elif self.rules.min_loops is not None and track.depth >= self.rules.min_loops:
                track.undecided_until = batch.seq

    def _collect(self, now_ns: int) -> int:
        """The oldest submitted batch is collected: tokens are delivered and what nothing uses any more
        returns.

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
        if self.rules.draft_loops:
            self._collect_tokens(batch)
        for item in batch.ranges:
            track = self.tracks[item.request_id]
            if item.is_prompt and item.depth + batch.loops == self.rules.num_loops and not track.is_ended:
                self._publish(track, item.start + item.count)
        for item in batch.ranges:
            track = self.tracks[item.request_id]
            if item.stage == "CODA" and not track.is_ended and not self.rules.draft_loops:
                number = track.coda_seqs.index(batch.seq)
                if number >= len(track.token_ns) or track.token_ns[number] != batch.finished_ns:
                    raise Broken(7, f"token {number + 1} of request {track.request_id} was made by batch "
                                    f"{batch.seq}, finished at "
                                    f"{batch.finished_ns} ns; delivered at "
                                    f"{track.token_ns[number:number + 1]}")  # fmt: skip
                track.delivered += 1
                track.is_ended = track.status != "cancelled" and track.delivered == track.output_tokens
                self._clients_free += track.is_ended and self.rules.concurrency is not None
        self._drop_ended()
        self._host_free_ns = batch.collected_ns + self.rules.after_collect_ns
        return batch.collected_ns

    def _collect_tokens(self, batch: Batch) -> None:
        """True tokens up to the first that was not guessed rightly are delivered; rows behind that one were
        in vain."""
        counts = [
            (self.tracks[item.request_id], item)
            for item in batch.ranges
            if not item.is_prompt
            and not self.tracks[item.request_id].is_ended
            and batch.seq > self.tracks[item.request_id].surplus_until
        ]
        for track, item in counts:
            log_guesses.collected(track, item)
        for track, item in counts:
            if track.is_ended or batch.seq <= track.surplus_until or item.stage == "DRAFT" or batch.loops:
                continue
            is_refused = (track.request_id, item.start) in batch.refused
            if is_refused and item.stage != "VERIFY":
                raise Broken(2, f"batch {batch.seq} refuses a guess behind {item}, there is none")
            if item.start != track.prompt_tokens - 1 + track.delivered:
                raise Broken(2, f"batch {batch.seq}: {item} makes token {track.delivered + 1}")
            due = track.token_ns[track.delivered : track.delivered + 1]
            if due != (batch.finished_ns,):
                raise Broken(7, f"{item} was made at {batch.finished_ns} ns, delivered at {due}")
            track.delivered += 1
            track.is_ended = track.status != "cancelled" and track.delivered == track.output_tokens
            self._clients_free += track.is_ended and self.rules.concurrency is not None
            if track.is_ended and item.stage == "VERIFY" and not is_refused:
                raise Broken(
                    7, f"batch {batch.seq}: request {track.request_id} ends, the guess behind does not"
                )
            if is_refused or track.is_ended:
                self.surplus_rows += log_guesses.refuse(track, item.start, batch.seq)

    def _drop_ended(self) -> None:
        self._running = {
            key: track
            for key, track in self._running.items()
            if not (track.is_ended and track.last_seq <= self._collected_seq)
        }

    def _check_exits(self, batch: Batch) -> None:
        """Tokens reported to have left go on to CODA; rows of theirs in later batches are surplus. No CODA
        before all is known."""
        rows = {item.request_id: item for item in batch.ranges if item.stage == "RECURRENT"}
        for request_id in sorted(batch.exits):
            track, item = self.tracks[request_id], rows.get(request_id)
            if item is None or batch.seq <= track.surplus_until:
                raise Broken(
                    2,
                    f"batch {batch.seq} reports an exit of request {request_id}, which has no row in it or "
                    "has left",
                )
            loops, first = item.depth + batch.loops, self.rules.min_loops
            if first is None or not first <= loops < self.rules.last_loop:
                raise Broken(
                    2,
                    f"batch {batch.seq}: request {request_id} leaves after {loops} loops, from {first} on it "
                    "may",
                )
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
                raise Broken(
                    9, f"batch {forms.seq} is formed at {forms.submitted_ns} ns, when nothing had happened"
                )

    def _check_idle_under_pressure(self, now_ns: int, forms: Batch | None, collects: Batch | None) -> None:
        """Work may have to wait for blocks as long as a batch is in flight; with none, a batch is formed
        whenever anybody is there.

        In flight or not, one is formed when all who run have the blocks they need and nobody can be
        preempted.
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

    def _check_formed(self, batch: Batch | None, now_ns: int) -> None:
        if batch is None:
            raise Broken(9, f"ready work and a place in flight at {now_ns} ns, and no batch formed")
        if self.rules.has_exact_times and batch.submitted_ns != now_ns:
            raise Broken(
                9, f"batch {batch.seq} could have been formed at {now_ns} ns, was at {batch.submitted_ns}"
            )

    def _next_ns(self) -> int | None:
        """When somebody arrives or hangs up next."""
        times = [track.arrival_ns for track in self._arriving[-1:] if self._clients_free > 0]
        times += [at_ns for at_ns, _ in self._hang_ups]
        return min(times, default=None)

    def _arrive(self, now_ns: int) -> None:
        """Requests that have arrived by `now_ns` wait; under a closed loop the next one comes after an
        earlier one's end.

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
                raise Broken(
                    7, f"request {track.request_id} is cancelled at {at_ns} ns and neither waits nor runs"
                )
            self._drop_ended()

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
            if (
                track.last_seq >= 0
                or track.output_tokens
                or track.finished_ns is None
                or track.finished_ns < track.arrival_ns
            ):
                raise Broken(7, f"{who} was refused and ran, or has no end")
            return
        if track.times_preempted != track.preemptions:
            raise Broken(
                7, f"{who} was preempted {track.times_preempted} times, told are {track.preemptions}"
            )
        is_cancelled = track.status == "cancelled"
        if (
            not (is_cancelled or track.status == "finished")
            or not track.is_ended
            or track.request_id in self._running
        ):
            raise Broken(7, f"{who} is {track.status} with {track.output_tokens} tokens delivered")
        least = 0 if is_cancelled else 1
        if not least <= track.delivered == track.output_tokens == len(track.token_ns) <= track.max_tokens:
            raise Broken(
                7,
                f"{who} has {track.output_tokens} tokens, {len(track.token_ns)} times, max_tokens "
                f"{track.max_tokens}",
            )
        if self.rules.outputs is not None:
            expected = min(self.rules.outputs.get(track.request_id, track.max_tokens), track.max_tokens)
            if track.output_tokens != expected and not (is_cancelled and track.output_tokens < expected):
                raise Broken(7, f"{who} ended after {track.output_tokens} tokens, the oracle says {expected}")
        scheduled = (
            [] if is_cancelled and track.first_scheduled_ns is None else [track.first_scheduled_ns or 0]
        )
        times = [track.arrival_ns, *scheduled, *track.token_ns, track.finished_ns or 0]
        if times != sorted(times) or (not is_cancelled and track.finished_ns != track.token_ns[-1]):
            raise Broken(6, f"{who}: arrival, first scheduled, tokens, finish at {times} ns")

    def _check_concurrency(self) -> None:
        """A closed loop never has more requests outstanding than its clients."""
        if self.rules.concurrency is None:
            return
        spans = [
            (t.arrival_ns, t.finished_ns or 0) for t in self.tracks.values() if t.finished_ns != t.arrival_ns
        ]
        edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        outstanding = 0
        for at_ns, step in edges:
            outstanding += step
            if outstanding > self.rules.concurrency:
                raise Broken(
                    7,
                    f"{outstanding} requests outstanding at {at_ns} ns, concurrency is "
                    f"{self.rules.concurrency}",
                )
