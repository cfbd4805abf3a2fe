"""An outside checker of the nine invariants (design section 2): reads the text of `batches.csv` and
`requests.csv`, and of an engine with a role `handovers.csv`, nothing else.

Imports none of the scheduler's code, so that a mistake there cannot hide itself here. It replays the log as
the order of events that `after_seq` fixes (batch formed, batch collected), keeps its own account of every
request, and raises `Broken` at the first event that an invariant forbids. Invariant 8 (same seed, same bytes)
needs two logs and is a plain comparison.
"""

from collections.abc import Sequence

import log_guesses
from log_ends import Ends
from log_reader import SLEPT_NS, Batch, Broken, Rules, Track, parse_batches, parse_requests
from log_roles import News, Roles, parse_handovers


def check_log(batches_csv: str, requests_csv: str, rules: Rules, handovers_csv: str = "") -> "Replay":
    """Verify a whole run. Raises `Broken`; returns the replay, whose counters a test may look at."""
    news = parse_handovers(handovers_csv)
    replay = Replay(parse_batches(batches_csv), parse_requests(requests_csv), rules, news)
    replay.run()
    return replay


class Replay(Roles, Ends):
    """The log, event by event."""

    def __init__(
        self, batches: list[Batch], tracks: dict[int, Track], rules: Rules, news: Sequence[News] = ()
    ) -> None:
        super().__init__(tracks, rules, batches, news)
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
        begins_ns = max(self._host_free_ns, batch.submitted_ns)
        idle_ns = batch.submitted_ns - self._host_free_ns if self._host_free_ns else 0
        if batch.after_seq == batch.seq - 1 and idle_ns > SLEPT_NS:
            begins_ns += self.rules.wake_ns
        launched_ns = begins_ns + batch.host_ns
        self._host_free_ns = launched_ns + self.rules.after_submit_ns
        return launched_ns

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
        self._give_rooms()
        self._host_free_ns = batch.collected_ns + self.rules.after_collect_ns
        return batch.collected_ns

    def _drop_ended(self) -> None:
        self._running = {
            key: track
            for key, track in self._running.items()
            if not (track.is_ended and track.last_seq <= self._collected_seq)
        }

    def _check_idle(self, now_ns: int, forms: Batch | None, collects: Batch | None) -> None:
        """Invariant 9: from the event at `now_ns` to the next one no chance to form a batch was passed over.

        The next event is that a batch is formed, or that one is collected, or (both None) that the run ends.
        """
        if self._formed_seq - self._collected_seq >= self.rules.inflight:
            return
        self._arrive(now_ns)
        if self.rules.is_under_pressure:
            self._check_idle_under_pressure(now_ns, forms, collects)
        elif self._ready(collects) or self._lets_in(collects):
            self._check_formed(forms, now_ns)
        elif self.rules.has_exact_times:
            until_ns = forms.submitted_ns if forms else None
            if collects:
                busy_ns = self.rules.collect_ns
                until_ns = collects.collected_ns - busy_ns - (busy_ns > 0)
            while (at_ns := self._next_ns()) is not None and (until_ns is None or at_ns <= until_ns):
                self._arrive(at_ns)
                if self._ready(collects) or self._lets_in(collects):
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
            ready = self._ready(collects)
            is_contested = self._by_priority_gives_way and bool(self._waiting)
            if ready and not is_contested and sum(map(self._missing, ready)) <= self._free:
                self._check_formed(forms, now_ns)
        elif self._is_due(collects):
            self._check_formed(forms, now_ns)
        elif self.rules.has_exact_times:
            until_ns = forms.submitted_ns if forms else None
            while (at_ns := self._next_ns()) is not None and (until_ns is None or at_ns <= until_ns):
                self._arrive(at_ns)
                if self._is_due(collects):
                    self._check_formed(forms, at_ns)
                    return

    def _ready(self, collects: Batch | None) -> list[Track]:
        """Requests that run and of which something is left to schedule."""
        return [
            track for track in self._running.values() if track.is_ready and not self._left(track, collects)
        ]

    def _lets_in(self, collects: Batch | None) -> bool:
        return any(not self._left(self.tracks[request_id], collects) for request_id in self._admissible())

    def _left(self, track: Track, collects: Batch | None) -> bool:
        """Where handing over a batch takes time that the log does not tell, the client of a request may have
        hung up when the engine looks next, before `collects` is collected."""
        if self.rules.has_exact_times or collects is None or track.status != "cancelled":
            return False
        return (track.finished_ns or 0) <= collects.collected_ns

    def _is_due(self, collects: Batch | None) -> bool:
        """With nothing in flight there is something to run. Beside prompts on their way to or from another
        engine, which keep what they hold, those that wait may have to, and one that runs may lack blocks."""
        ready = self._ready(collects)
        if self.rules.role == "whole":
            return bool(ready) or not all(self._left(track, collects) for track in self._waiting)
        return bool(ready) and sum(map(self._missing, ready)) <= self._free

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
        times += [item.at_ns for item in list(self._news)[:1]]
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
                self._give_rooms()
                continue
            if not self._hang_ups or min(self._hang_ups)[0] > at_ns:
                self._hear(self._news.popleft())
                self._give_rooms()
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
            self._give_rooms()
