"""The checker's account of who holds what: places, block groups, shared prefixes, copies in host memory
(invariants 4 and 9)."""

import log_guesses
from log_reader import Batch, Broken, Rules, Track


class Holdings:
    """What every running request holds by the log alone; a replay moves it on, event by event."""

    def __init__(self, tracks: dict[int, Track], rules: Rules) -> None:
        self.tracks, self.rules = tracks, rules
        self.reused_groups = self.surplus_rows = 0
        self._running: dict[int, Track] = {}
        self._waiting: list[Track] = []
        self._swapped = 0
        self._published: dict[object, int] = {}
        self._names: dict[object, int] = {}
        self._content: dict[int, object] = {}

    @property
    def _by_priority_gives_way(self) -> bool:
        return self.rules.by_priority and self.rules.preemption != "off"

    @property
    def _free(self) -> int:
        return self.rules.num_groups - len(self._held)

    @property
    def _held(self) -> set[int]:
        return {group for track in self._running.values() for group in track.groups}

    def _rank(self, track: Track) -> tuple[int, int, int, int]:
        rank_ns = track.arrival_ns + self.rules.rank_ns_per_token * track.prompt_tokens
        priority = track.priority if self.rules.by_priority else 0
        return (priority, rank_ns, track.arrival_ns, track.request_id)

    def _next_positions(self, track: Track) -> int:
        """Positions that must have blocks before its next step."""
        if track.expects == "PROMPT":
            chunk = self.rules.chunk_tokens
            return min(track.origin + ((track.done[0] - track.origin) // chunk + 1) * chunk, track.prompt_end)
        if track.expects == "GUESSING":
            return track.guessed
        return track.position + 1 if track.expects == "PRELUDE" else 0

    def _missing(self, track: Track) -> int:
        if not self.rules.grows:
            return 0
        return max(0, -(-self._next_positions(track) // self.rules.block_size) - len(track.groups))

    def _check_preemptions(self, batch: Batch) -> None:
        """Who is preempted is idle, ranks last, and does so for somebody who ranks before; what it holds is
        free afterwards."""
        victims = [self.tracks[request_id] for request_id in batch.preempted]
        idle = [
            track
            for track in self._running.values()
            if track.last_seq <= self._collected_seq
            and not track.is_ended
            and track.expects not in ("SENT", "RECEIVED")
        ]
        for victim in victims:
            who = f"batch {batch.seq}: request {victim.request_id}"
            if victim not in idle or self.rules.preemption == "off":
                raise Broken(4, f"{who} is preempted and does not run, or is still in flight, or nobody may")
            spared = [
                track
                for track in idle
                if track not in victims
                and track.request_id not in batch.grown
                and not self._is_guarded(track)
            ]
            if any(self._rank(track) > self._rank(victim) for track in spared):
                raise Broken(4, f"{who} is preempted, and one that ranks after it does not")
            grown = any(self._rank(self.tracks[other]) < self._rank(victim) for other in batch.grown)
            admitted = self.rules.by_priority and any(
                self.tracks[other].priority < victim.priority for other in batch.allocated
            )
            if not grown and not admitted:
                raise Broken(4, f"{who} is preempted for nobody")
            above = any(
                self.tracks[other].priority < victim.priority for other in [*batch.grown, *batch.allocated]
            )
            if self._is_guarded(victim) and not (self.rules.by_priority and above):
                raise Broken(9, f"{who} is preempted after {victim.times_preempted} times, by its equals")
        for victim in victims:
            self._give_way(victim, batch.preempted[victim.request_id], batch)

    def _is_guarded(self, track: Track) -> bool:
        return self.rules.grows and track.times_preempted >= self.rules.most_preemptions

    def _keeps_guards(self, track: Track) -> bool:
        """All up to the last guarded one of its priority, itself included, fit whole when `track` comes
        in."""
        priority = self._rank(track)[0]
        order = sorted(
            [*(other for other in self._running.values() if not other.is_ended), track], key=self._rank
        )
        guarded = [
            place
            for place, other in enumerate(order)
            if self._is_guarded(other) and self._rank(other)[0] == priority and place >= order.index(track)
        ]
        up_to_last = order[: guarded[-1] + 1] if guarded else []
        return sum(map(self._groups, up_to_last)) <= self.rules.num_groups

    def _give_way(self, track: Track, copied: tuple[int, ...] | None, batch: Batch) -> None:
        who = f"batch {batch.seq}: request {track.request_id}"
        if track.expects == "PROMPT":
            chunk = self.rules.chunk_tokens
            stored = track.staged = track.origin + (track.done[-1] - track.origin) // chunk * chunk
            track.done = [stored] * self.rules.num_loops
        elif track.expects == "GUESSING":
            self.surplus_rows += log_guesses.forget(track, track.made)
            stored = max(track.done[0], track.made)
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
            track.made = track.guessed = 0
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
                raise Broken(
                    4, f"batch {batch.seq}: request {request_id} grows by {groups} and does not need that"
                )
            self._take(track, groups)

    def _take(self, track: Track, groups: tuple[int, ...]) -> None:
        held = self._held
        for group in groups:
            if group in self._content:
                del self._published[self._content.pop(group)]
        if len({*held, *groups}) != len(held) + len(groups) or not all(
            0 <= group < self.rules.num_groups for group in groups
        ):
            raise Broken(
                4,
                f"request {track.request_id} got a group of {groups} twice, one that is held, or one that is "
                "not there",
            )
        track.groups = (*track.groups, *groups)

    def _admissible(self) -> list[int]:
        """Requests that admission lets in now, one after another, by queue order, scan limit and bypass
        limits."""
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
        """A request that computes its prompt begins with all that is published of it, but computes one token
        itself."""
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
        """A key for each whole block of what its content says, nested so that it holds all blocks before
        it."""
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
        """Its prompt is complete up to `end`: whole blocks of whole chunks can be reused, each from the first
        that has it."""
        chunk = self.rules.chunk_tokens
        if end != track.prompt_end:
            end = track.origin + (end - track.origin) // chunk * chunk
        while track.published < min(len(track.keys), end // self.rules.block_size):
            key, group = track.keys[track.published], track.groups[track.published]
            track.published += 1
            if key not in self._published and group not in self._content:
                self._published[key], self._content[group] = group, key

    def _groups_to_start(self, track: Track) -> int:
        """What a waiting request gets: all it can need; or enough for what is known of it; or for its first
        step and what was swapped out."""
        if not self.rules.grows:
            return self._groups(track)
        if self.rules.whole_context:
            known = track.position + 1
            if track.expects in ("PROMPT", "GUESSING"):
                known = track.prompt_end if track.expects == "PROMPT" else track.made + 1
            return -(-known // self.rules.block_size)
        return max(self._missing(track), track.swapped)

    def _groups(self, track: Track) -> int:
        return -(-(track.prompt_tokens + track.max_tokens - 1) // self.rules.block_size)

    def _check_admissions(self, batch: Batch) -> None:
        """Invariant 4 for blocks, 5 for places, and the order of admission."""
        self._waiting.sort(key=self._rank)
        expected = list(batch.allocated) if self.rules.is_under_pressure else self._admissible()
        if list(batch.allocated) != expected:
            raise Broken(
                9,
                f"batch {batch.seq} admits {list(batch.allocated)}, by order, scan and bypass limits it is "
                f"{expected}",
            )
        for request_id, groups in batch.allocated.items():
            self._admit(self.tracks[request_id], groups, batch)

    def _before(self, track: Track) -> list[Track]:
        """Those that wait and come before `track`."""
        return self._waiting[: self._waiting.index(track)]

    def _admit(self, track: Track, groups: tuple[int, ...], batch: Batch) -> None:
        """`track` is given `groups`, as the line of `batch` tells."""
        if track not in self._waiting:
            raise Broken(7, f"batch {batch.seq} admits request {track.request_id}, which does not wait")
        others = self._before(track)
        if len(others) >= self.rules.scan_limit or any(
            other.bypasses >= self.rules.max_bypasses for other in others
        ):
            raise Broken(9, f"batch {batch.seq} admits request {track.request_id} past {len(others)} others")
        for overtaken in others:
            overtaken.bypasses += 1
        if not self._keeps_guards(track):
            raise Broken(
                9, f"batch {batch.seq} admits request {track.request_id}, and a guarded one may lack room"
            )
        self._waiting.remove(track)
        track.bypasses = 0
        shared = self._reuse(track, groups, batch)
        needed = self._groups_to_start(track)
        reserve = self.rules.watermark_groups if self._running and self.rules.grows else 0
        taken = needed - len(self._held.intersection(shared))
        if len(groups) != needed or taken + reserve > self._free:
            raise Broken(
                4,
                f"request {track.request_id} needs {needed} groups, {reserve} stay free of {self._free}, got "
                f"{groups}",
            )
        track.groups = shared
        self._running[track.request_id] = track
        self._take(track, groups[len(shared) :])
        if batch.resumed.get(track.request_id) != ((track.kept, track.swapped) if track.is_parked else None):
            raise Broken(
                4, f"batch {batch.seq} resumes {track.request_id} with {batch.resumed.get(track.request_id)}"
            )
        self._swapped -= track.swapped
        track.is_parked, track.swapped = False, 0
        if len(self._running) > self.rules.max_num_seqs:
            raise Broken(
                5,
                f"{len(self._running)} requests run at batch {batch.seq}, max_num_seqs is "
                f"{self.rules.max_num_seqs}",
            )
