"""The checker's account of an engine that does one part of its requests: what it heard of the other side
(`handovers.csv`), and what follows from that.

One that computes prompts keeps a whole prompt until it is `sent`. One that decodes gives a request room, in
the order of admission, as soon as there is some; then its prompt is `received`, piece by piece, or `lost`,
and only then does anything of it run here. A batch's line names who was given room since the batch before.
"""

import csv
import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from log_reader import Batch, Broken, Rules, Track
from log_steps import Steps


@dataclass(frozen=True)
class News:
    at_ns: int
    what: str
    request_id: int
    end: int | None


def parse_handovers(text: str) -> list[News]:
    """Every line of `handovers.csv`."""
    return [
        News(int(row["at_ns"]), row["what"], int(row["request_id"]), int(row["end"]) if row["end"] else None)
        for row in csv.DictReader(io.StringIO(text))
    ]


class Roles(Steps):
    """What an engine hears of the other side, as it acts on it."""

    def __init__(
        self, tracks: dict[int, Track], rules: Rules, batches: Sequence[Batch], news: Sequence[News]
    ) -> None:
        super().__init__(tracks, rules)
        self.num_imported = 0
        self._news = deque(news)
        self._listed: dict[int, deque[Batch]] = {}
        """Batches whose lines give a request room, by its id."""
        for batch in batches:
            for request_id in batch.allocated:
                self._listed.setdefault(request_id, deque()).append(batch)
        self._let_in: list[int] = []
        """Who was given room since the last batch."""
        self._nameless = count(-1, -1)
        if [item.at_ns for item in news] != sorted(item.at_ns for item in news):
            raise Broken(6, "news of transfers are not in the order of their times")

    def _hear(self, news: News) -> None:
        track = self.tracks[news.request_id]
        who = f"request {track.request_id}, {news.what} at {news.at_ns} ns"
        if (self.rules.role == "prefill") != (news.what == "sent"):
            raise Broken(7, f"{who}: an engine with the role {self.rules.role} has no use for it")
        if news.what == "sent":
            if track.expects != "SENT" or track.last_seq > self._collected_seq or track.is_ended:
                raise Broken(7, f"{who}: it is at {track.expects}, last ran in batch {track.last_seq}")
            if (track.status, track.finished_ns) != ("sent", news.at_ns):
                raise Broken(7, f"{who}: it is {track.status} at {track.finished_ns} ns")
            track.is_ended = True
            self._drop_ended()
            return
        if track in self._waiting and self.rules.is_under_pressure:  # it was given room when no line tells
            listed = self._listed.get(track.request_id)
            for request_id in listed[0].allocated if listed else (track.request_id,):
                if track in self._waiting and self.tracks[request_id] in self._waiting:
                    self._give_room(self.tracks[request_id])
        if track.expects != "RECEIVED" or track.request_id not in self._running or track.is_ended:
            raise Broken(2, f"{who}: it is at {track.expects}, not one whose prompt is on its way")
        if news.what == "lost":
            track.expects = "PROMPT"
            return
        if news.end is None or not track.staged < news.end <= track.prompt_tokens:
            raise Broken(2, f"{who}: up to {news.end}, has {track.staged} of {track.prompt_tokens} tokens")
        track.origin = track.staged = news.end
        track.done = [news.end] * self.rules.num_loops
        if news.end == track.prompt_tokens:
            self.num_imported += 1
            track.expects, track.position, track.imported_ns = "CODA", news.end - 1, news.at_ns

    def _give_rooms(self) -> None:
        """Whoever can be let in is, whenever something has happened."""
        if self.rules.role == "decode" and not self.rules.is_under_pressure:
            for request_id in self._admissible():
                self._give_room(self.tracks[request_id])

    def _give_room(self, track: Track) -> None:
        """By the next line that says so. One that left before that has room of which no line tells."""
        self._waiting.sort(key=self._rank)
        listed = self._listed.get(track.request_id)
        if listed:
            batch = listed.popleft()
            self._admit(track, batch.allocated[track.request_id], batch)
        else:
            self._waiting.remove(track)
            track.groups = tuple(next(self._nameless) for _ in range(self._groups_to_start(track)))
            self._running[track.request_id] = track
        if not track.times_preempted:
            track.expects = "RECEIVED"
        self._let_in.append(track.request_id)

    def _before(self, track: Track) -> list[Track]:
        """Of those that hang up before a line could name them it is not known when they got room."""
        others = super()._before(track)
        if self.rules.role == "decode" and self.rules.is_under_pressure:
            others = [other for other in others if self._listed.get(other.request_id)]
        return others

    def _check_admissions(self, batch: Batch) -> None:
        if self.rules.role != "decode":
            super()._check_admissions(batch)
            return
        for request_id in batch.allocated if self.rules.is_under_pressure else ():
            if self.tracks[request_id] in self._waiting:
                self._give_room(self.tracks[request_id])
        given = [request_id for request_id in self._let_in if request_id in self._running]
        if self.rules.is_under_pressure:
            given.sort(key=list(batch.allocated).index)
        if list(batch.allocated) != given:
            raise Broken(9, f"batch {batch.seq} gives room to {list(batch.allocated)}, {given} got some")
        self._let_in.clear()
