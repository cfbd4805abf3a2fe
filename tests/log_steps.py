"""The checker's account of what a batch's ranges do: which stage and depth may follow which (invariants 1, 2
and 3), and what exits, tokens and refused guesses make of it when the batch is collected."""

import log_guesses
from log_holdings import Holdings
from log_reader import Batch, Broken, Range, Track

DEPTH_FREE = ("PRELUDE", "CODA", "PREFILLING_PRELUDE")
RANGE_STAGES = {
    "PREFILL": ("PREFILL",),
    "PREFILLING_PRELUDE": ("PREFILLING_PRELUDE",),
    "PREFILLING_RECURRENT": ("PREFILLING_RECURRENT",),
    "PRELUDE": ("PRELUDE",),
    "RECURRENT": ("RECURRENT", "PREFILLING_RECURRENT"),
    "CODA": ("CODA", "VERIFY", "DRAFT"),
}


class Steps(Holdings):
    """How far every request has come by the log alone."""

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
        is_imported = track.imported_ns is not None and not item.is_prompt
        first_ns = track.imported_ns if is_imported else batch.submitted_ns
        if track.last_seq < 0 and track.first_scheduled_ns != first_ns:
            raise Broken(
                6,
                f"request {track.request_id} first ran at {first_ns}, not {track.first_scheduled_ns} ns",
            )
        track.last_seq = batch.seq
        loops = batch.loops
        if item.is_prompt:
            track.staged = max(track.staged, item.start + item.count)
            for at in range(item.depth, item.depth + loops):
                track.done[at] += item.count
            if track.done[-1] == track.prompt_end:
                track.expects, track.position = "CODA", track.prompt_end - 1
                if self.rules.role == "prefill":
                    track.expects = "SENT"
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
