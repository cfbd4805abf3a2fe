"""What is scheduled: a policy's proposal, the work that the engine makes of it, and the batch that carries it
to a device. Values only, no behaviour.

*Work* is what a device does, and all that its time depends on; latency models, limits and profiles take
that. A *batch* is the envelope: its number, its times, and what was transferred with it."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from policies.core.seam.request import Request


class Stage(StrEnum):
    """What a range, or a whole batch, does on the device."""

    PREFILL = "PREFILL"
    """A prompt range through all of its remaining depths in one submission."""
    PREFILLING_PRELUDE = "PREFILLING_PRELUDE"
    """Embed a prompt range into the request's hidden ring; no recurrent depth runs."""
    PREFILLING_RECURRENT = "PREFILLING_RECURRENT"
    """Prompt ranges, one depth each."""
    PRELUDE = "PRELUDE"
    """Embed a sampled token."""
    RECURRENT = "RECURRENT"
    """Decode rows, one depth each (or all remaining ones); in a mixed batch prompt ranges ride along."""
    CODA = "CODA"
    """LM head and sampling: one hidden state becomes one token."""
    VERIFY = "VERIFY"
    """CODA of a token whose successor has been guessed: its token says whether the guess was right."""
    DRAFT = "DRAFT"
    """LM head and sampling after the early loops: a guess at the next token. In CODA batches, as VERIFY."""


HEADS = frozenset({Stage.CODA, Stage.VERIFY})
"""Rows of a CODA batch that make a request's next token."""
BATCH_STAGES = tuple(stage for stage in Stage if stage not in (Stage.VERIFY, Stage.DRAFT))
"""What a whole batch may be."""
PROMPT_STAGES = frozenset({Stage.PREFILL, Stage.PREFILLING_PRELUDE, Stage.PREFILLING_RECURRENT})


class Proposal(NamedTuple):
    """Work for one request that a policy proposes: its tokens `[start, end)` at `depth`, the first that runs.

    A decode row is the one token at the request's position. Everything else about a range follows from where
    the request stands, and is derived by the engine.
    """

    request_id: int
    depth: int
    start: int
    end: int


new_proposal: Callable[[tuple[int, int, int, int]], Proposal] = partial(tuple.__new__, Proposal)
"""A proposal of its four fields in order, for decode rows: its own constructor takes twice as long."""


class Selection(NamedTuple):
    """A policy's proposal for the next batch, in batch order.

    After `loop_count` depths the policy wants to be asked again; None: no sooner than after all remaining
    ones. 0 is a batch that runs no depth: it embeds (prompt tokens or sampled ones) or samples, as its
    requests' phases say.
    """

    ranges: tuple[Proposal, ...]
    loop_count: int | None


class ScheduledRange(NamedTuple):
    """A snapshot of work for one request: tokens `[token_start, token_start + token_count)` at one depth.

    `depth` is the first depth that runs; the batch's `loop_count` says how many follow. A decode row names
    the position of the token it processes and has `token_count` 1; CODA names the position whose hidden state
    becomes a token, and its `depth` is the first one that the token skipped by leaving early, 0 when it
    skipped none. The `depth` of VERIFY and DRAFT is the rank of the guess that is checked or made: how far
    ahead of the tokens that are certain it was, from 1 on. `chunk_start` is the first token of the prompt
    chunk that holds the range. `prefill_hidden_row_offset` is the row of `token_start` in the request's whole
    hidden buffer, ring slot included; None means `token_start - chunk_start`. `embeds` is True when a prompt
    range takes its rows from the embedding table (staging, or the prelude folded into depth 0) and False when
    they were staged before or are decode rows that a PRELUDE embeds: where tokens are guessed, their prelude
    is folded too. A named tuple and not a dataclass: hundreds of thousands are made per simulated second.
    """

    request_id: int
    stage: Stage
    depth: int
    token_start: int
    token_count: int
    chunk_start: int = 0
    prefill_hidden_row_offset: int | None = None
    embeds: bool = False

    @property
    def token_end(self) -> int:
        return self.token_start + self.token_count


new_range: Callable[[tuple[int, Stage, int, int, int, int, int | None, bool]], ScheduledRange] = partial(
    tuple.__new__, ScheduledRange
)
"""A range of its eight fields in order: its own constructor takes three times as long."""


class Work(NamedTuple):
    """What one submission runs on a device.

    `rows` is the number of rows of one invocation; a batch of `loop_count` 4 is 4 recurrent invocations of
    `rows` rows each. `num_requests` are the distinct requests among `ranges`. `has_planes` is False under
    layout shared: then a token that leaves early has no deeper plane to be copied to.
    """

    stage: Stage
    loop_count: int
    ranges: tuple[ScheduledRange, ...]
    rows: int
    num_requests: int
    has_planes: bool = True

    @classmethod
    def of(cls, stage: Stage, loop_count: int, ranges: Iterable[ScheduledRange]) -> "Work":
        """Work of `ranges`, whose rows and requests are counted."""
        ranges = tuple(ranges)
        rows = sum([item.token_count for item in ranges])
        return cls(stage, loop_count, ranges, rows, len({item.request_id for item in ranges}))

    def moved(self, tokens: int) -> "Work":
        """Decode work with every row `tokens` further."""
        if not tokens:
            return self
        stage, loop_count, ranges, rows, num_requests, has_planes = self
        moved = [
            new_range((request_id, stage, depth, start + tokens, 1, 0, None, False))
            for request_id, stage, depth, start, _, _, _, _ in ranges
        ]
        return Work(stage, loop_count, tuple(moved), rows, num_requests, has_planes)

    @property
    def exit_depths(self) -> list[int]:
        """Of each token of a CODA batch whose K/V must be copied to the planes that it skipped, the first of
        these planes."""
        if self.stage is not Stage.CODA or not self.has_planes:
            return []
        return [item.depth for item in self.ranges if item.depth and item.stage is Stage.CODA]

    def attention_work(self) -> tuple[int, int]:
        """KV tokens read and (query, key) pairs of one invocation, all ranges together.

        A range of 16 tokens from 32 on reads 48 tokens and has 16 x 32 + 16 x 17 / 2 = 648 pairs.
        """
        kv_tokens = pairs = 0
        for item in self.ranges:
            start, count = item.token_start, item.token_count
            end = start + count
            kv_tokens += end
            pairs += end if count == 1 else count * start + count * (count + 1) // 2
        return kv_tokens, pairs


class Allocation(NamedTuple):
    """What admission gave a request: KV block groups in token order and the row of the hidden pools that is
    its own.

    Group `g` stands for one block of `block_size` tokens in every depth plane: plane `d` is block `g * planes
    + d`. `is_resumed` says that the request ran before and was preempted. Its first `num_kept_tokens` output
    tokens then follow its prompt as part of it, and the first `num_swapped_groups` groups take their
    contents, and its own row its hidden state and last sampled token, from host memory. The first
    `num_reused_groups` groups hold a prefix that was computed for an earlier request: nothing writes to them.
    """

    request: Request
    block_groups: tuple[int, ...]
    ring_id: int
    is_resumed: bool = False
    num_kept_tokens: int = 0
    num_swapped_groups: int = 0
    num_reused_groups: int = 0

    @property
    def request_id(self) -> int:
        return self.request.request_id


class Growth(NamedTuple):
    """Groups that a running request got beside the `first_group` ones that it had."""

    request_id: int
    first_group: int
    block_groups: tuple[int, ...]


class Preemption(NamedTuple):
    """A request that was preempted. With `is_swapped` the contents of `block_groups`, and the hidden state
    and the last sampled token of its own row in ring `ring_id`, go to host memory before anything else of the
    batch runs.
    """

    request_id: int
    ring_id: int
    is_swapped: bool
    block_groups: tuple[int, ...]


class Transfers(NamedTuple):
    """What was transferred when a batch was formed, in the order in which a device does it: swap out, swap
    in, then the rows.

    `released` requests have ended since the batch before and hold nothing any more, in host memory neither.
    `swapped_bytes` go to and from host memory.
    """

    preemptions: tuple[Preemption, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    growths: tuple[Growth, ...] = ()
    released: tuple[int, ...] = ()
    swapped_bytes: int = 0


NO_TRANSFERS = Transfers()


class ExecutionBatch(NamedTuple):
    """One submission to a device: its work in an envelope, in the order of `seq`.

    `transfers` is what was transferred when this batch was formed, so that a backend learns block tables in
    order. `after_seq` is the sequence number of the last batch collected before this one was formed (-1:
    none), which with the times fixes the order of everything the engine saw.
    """

    seq: int
    work: Work
    formed_ns: int
    after_seq: int
    transfers: Transfers = NO_TRANSFERS

    @property
    def stage(self) -> Stage:
        return self.work.stage

    @property
    def loop_count(self) -> int:
        return self.work.loop_count

    @property
    def ranges(self) -> tuple[ScheduledRange, ...]:
        return self.work.ranges

    @property
    def rows(self) -> int:
        return self.work.rows
