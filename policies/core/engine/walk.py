"""A company of running requests followed batch by batch without moving it: who stands alike, and how they
stand after a batch.

The steps are those of `Scheduler.commit`; what batches they are is said by answers of
`policies.core.engine.rhythm`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

from policies.core.progress.state import RequestState
from policies.core.seam.batch import ScheduledRange, Stage, Work, new_range
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import CODA, PRELUDE, PROMPT, RECURRENT, Phase
from policies.core.seam.settings import SchedulerSettings

STAGES = {Stage.PRELUDE, Stage.RECURRENT, Stage.CODA}

Stand = tuple[Phase, int, int]
"""Of a decoding request: phase, depth, and how many batches ago it was scheduled."""
PromptStand = tuple[int, ...]
"""Of a prompt: how many batches ago it was scheduled (0: it never was); by how many chunks the frontiers of
deeper depths lie behind that of the first, and that one behind what is staged; chunks that are left, 2 for
more."""
Key = tuple[frozenset[Stand] | frozenset[tuple[Stand, int]], tuple[PromptStand, ...], int]
"""How all stand, prompts in order; and prompt batches since decode rows last ran, where there are prompts."""


class Answer(NamedTuple):
    """What was chosen: everybody who stands as one of `taken`, and behind them whole chunks of prompts, by
    place among the prompts, with depth and stage."""

    stage: Stage
    loop_count: int
    taken: frozenset[Stand]
    chunks: tuple[tuple[int, int, Stage], ...]


class Group(NamedTuple):
    """Those who decode and stand alike, by their place in order: their phase and depth, the batch that took
    them last (the first of the walk has number 0, those before it negative ones), and tokens that they have
    made."""

    phase: Phase
    depth: int
    last: int
    tokens: int
    members: Sequence[int]


new_group: Callable[[tuple[Phase, int, int, int, Sequence[int]]], Group] = partial(tuple.__new__, Group)
"""A group of its five fields in order: see `policies.core.seam.batch.new_range`."""


class Prompt(NamedTuple):
    """A prompt, by its place in order: its frontiers, and the batch that took it last (None: none yet)."""

    member: int
    frontiers: tuple[int, ...]
    staged: int
    last: int | None


class Moment(NamedTuple):
    """Where all stand between two batches. `peak_rows` are the most hidden rows since the beginning, beyond
    those that were kept then."""

    groups: list[Group]
    prompts: list[Prompt]
    since_decode: int
    peak_rows: int


class Walk:
    """From how `order` stands before batch `next_seq`; prompts in it stand at whole chunks."""

    def __init__(
        self,
        order: Sequence[RequestState],
        next_seq: int,
        settings: SchedulerSettings,
        exits: ExitRule,
        num_loops: int,
        has_planes: bool,
    ) -> None:
        self._order = order
        self._settings = settings
        self._exits = exits
        self._num_loops = num_loops
        self._has_planes = has_planes
        self._chunk_tokens = settings.chunk_tokens
        self._ids = [state.request_id for state in order]
        self._positions = [state.position for state in order]
        self._counts = settings.min_coda_batch_size > 1
        self._rows = self._peak_rows = 0
        self._at = 0
        self.made = [0] * len(order)
        """Tokens that each has made."""
        self.coda_at = [0] * len(order)
        """The batch that each made its last token in."""
        self.begun_at: dict[int, int] = {}
        """The first batch of prompts that have begun on the way."""
        self.since_decode = 0
        self.prompts: list[Prompt] = []
        found: dict[Stand, list[int]] = {}
        for member, state in enumerate(order):
            phase, age = state.phase, next_seq - state.last_seq
            if phase is PROMPT:
                prompt = state.prompt
                staged = prompt.num_preluded_tokens
                last = None if state.last_seq < 0 else -age
                self.prompts.append(Prompt(member, tuple(prompt.prefill_depth_ranges), staged, last))
            else:
                found.setdefault((phase, state.depth, age), []).append(member)
        self.groups = [
            Group(phase, depth, -age, 0, members) for (phase, depth, age), members in found.items()
        ]

    def fits(self) -> bool:
        """Whether whatever might run next has room in a batch, and some is left."""
        room = self._settings.max_num_batched_tokens - len(self._order)
        if not self.prompts:
            return room >= 0
        chunk = self._chunk_tokens
        ready = sum([staged - frontiers[-1] + chunk for _, frontiers, staged, _ in self.prompts])
        return room > ready

    def key(self) -> Key:
        """How all stand; how many stand so too, where they wait for one another at the LM head."""
        at = self._at
        stands = [(phase, depth, at - last) for phase, depth, last, _, _ in self.groups]
        prompts = tuple([self._prompt_stand(item) for item in self.prompts])
        since = min(self.since_decode, self._settings.max_prefill_batches_before_decode) if prompts else 0
        if not self._counts:
            return frozenset(stands), prompts, since
        counts = Counter[Stand]()
        for stand, group in zip(stands, self.groups, strict=True):
            counts[stand] += len(group.members)
        return frozenset(counts.items()), prompts, since

    def makes_first_tokens(self, answer: Answer) -> bool:
        """Whether nobody has made a token whom `answer` would let make another."""
        return answer.stage is not Stage.CODA or not any([item.tokens for item in self._parted(answer)[0]])

    def moment(self) -> Moment:
        return Moment(self.groups, self.prompts, self.since_decode, self._peak_rows)

    def step(self, answer: Answer) -> Work:
        """Take the batch of `answer`."""
        stage, loops, _, chunks = answer
        (chosen, others), at = self._parted(answer), self._at
        ranges: list[ScheduledRange] = []
        members: Sequence[int] = ()
        if chosen:
            members = joined(chosen)
            columns = [self._ids, self._positions]
            if len(members) < len(self._order):
                columns = [[column[member] for member in members] for column in columns]
            depths: Iterable[int] = repeat(chosen[0].depth)
            if any([item.depth != chosen[0].depth for item in chosen]):
                depth_of = {member: item.depth for item in chosen for member in item.members}
                depths = [depth_of[member] for member in members]
            fields = zip(
                columns[0], repeat(stage), depths, columns[1], repeat(1), repeat(0), repeat(None),
                repeat(False), strict=False,
            )  # fmt: skip
            ranges = list(map(new_range, fields))
        rows = requests = len(ranges)
        if chunks:
            more = [self._chunk(*chunk) for chunk in chunks]
            ranges += more
            rows += sum([item.token_count for item in more])
            requests += len({index for index, _, _ in chunks})
        self.groups = others + self._moved(chosen, loops)
        if stage is Stage.CODA:
            for member in members:
                self._positions[member] += 1
                self.made[member] += 1
                self.coda_at[member] = at
        if chunks:
            self._advance(chunks, ranges[-len(chunks) :], loops)
        if loops:
            self.since_decode = 0 if chosen else self.since_decode + 1
        self._at += 1
        return Work(stage, loops, tuple(ranges), rows, requests, self._has_planes)

    def answer(self, work: Work) -> Answer | None:
        """`work`, which was chosen as all stand, as an answer; None when it takes some of those who stand
        alike and leaves others, or cuts a chunk."""
        rows = [item.request_id for item in work.ranges if item.stage in STAGES]
        chunks = work.ranges[len(rows) :]
        first_of = {self._ids[item.members[0]]: item for item in self.groups}
        chosen = [first_of[request_id] for request_id in rows if request_id in first_of]
        if [self._ids[member] for member in joined(chosen)] != rows:
            return None
        place_of = {self._ids[prompt.member]: place for place, prompt in enumerate(self.prompts)}
        taken = []
        for item in chunks:
            place = place_of.get(item.request_id)
            if place is None or item.stage is Stage.PREFILLING_PRELUDE:
                return None
            if self._chunk(place, item.depth, item.stage) != item:
                return None
            taken.append((place, item.depth, item.stage))
        stands = frozenset([(item.phase, item.depth, self._at - item.last) for item in chosen])
        return Answer(work.stage, work.loop_count, stands, tuple(taken))

    def _parted(self, answer: Answer) -> tuple[list[Group], list[Group]]:
        """Groups that `answer` takes, and the others."""
        taken, at = answer.taken, self._at
        chosen: list[Group] = []
        others: list[Group] = []
        for item in self.groups:
            phase, depth, last, _, _ = item
            (chosen if (phase, depth, at - last) in taken else others).append(item)
        return chosen, others

    def _prompt_stand(self, item: Prompt) -> PromptStand:
        member, frontiers, staged, last = item
        prompt, chunk = self._order[member].prompt, self._chunk_tokens
        origin = prompt.prefill_window_origin
        first, *others = [-((origin - done) // chunk) for done in (*frontiers, staged, prompt.prompt_tokens)]
        age = 0 if last is None else self._at - last
        return (age, *[first - done for done in others[:-1]], min(others[-1] - first, 2))

    def _chunk(self, place: int, depth: int, stage: Stage) -> ScheduledRange:
        """The chunk of a prompt that comes next at `depth`."""
        member, frontiers, staged, _ = self.prompts[place]
        prompt, start = self._order[member].prompt, frontiers[depth]
        offset = prompt.hidden_row_offset(start)
        count = min(self._chunk_tokens, prompt.prompt_tokens - start)
        embeds = depth == 0 and start >= staged
        return new_range((self._ids[member], stage, depth, start, count, start, offset, embeds))

    def _moved(self, chosen: list[Group], loops: int) -> list[Group]:
        """Those who decode in this batch, a step further."""
        at = self._at
        moved: dict[tuple[Phase, int, int], list[Group]] = {}
        for item in chosen:
            phase, depth, _, tokens, _ = item
            if phase is RECURRENT:
                depth += loops
                if depth == self._exits.max_loops:
                    phase, depth = CODA, 0 if depth == self._num_loops else depth
            elif phase is CODA:
                phase, depth, tokens = PRELUDE, 0, tokens + 1
            else:
                phase = RECURRENT
            moved.setdefault((phase, depth, tokens), []).append(item)
        return [
            new_group((phase, depth, at, tokens, joined(alike)))
            for (phase, depth, tokens), alike in moved.items()
        ]

    def _advance(
        self, chunks: tuple[tuple[int, int, Stage], ...], ranges: Sequence[ScheduledRange], loops: int
    ) -> None:
        """Prompts, a chunk further at some depths; one that is through goes to the LM head."""
        prompts, last_depth = self.prompts.copy(), self._num_loops
        for (place, depth, _), item in zip(chunks, ranges, strict=True):
            member, frontiers, staged, last = prompts[place]
            if last is None:
                self.begun_at[member] = self._at
            count, end = item.token_count, item.token_start + item.token_count
            frontiers = (*frontiers[:depth], *[end] * loops, *frontiers[depth + loops :])
            if item.embeds:
                self._rows += end - staged
                staged = end
            if depth + loops == last_depth:
                self._rows -= count
            self._peak_rows = max(self._peak_rows, self._rows)
            prompts[place] = Prompt(member, frontiers, staged, self._at)
        self.prompts = []
        for prompt in prompts:
            state = self._order[prompt.member]
            if prompt.frontiers[-1] < state.prompt_tokens:
                self.prompts.append(prompt)
                continue
            self.groups.append(Group(CODA, 0, self._at, 0, [prompt.member]))
            self._positions[prompt.member] = state.prompt_tokens - 1


def joined(groups: Sequence[Group]) -> Sequence[int]:
    """Members of `groups` in order."""
    if len(groups) == 1:
        return groups[0].members
    return sorted([member for item in groups for member in item.members])
