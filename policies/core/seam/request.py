"""A request as a client sends it, and the scheduler's state of one that runs.

`Request` holds only what a client could say. How many tokens it will really produce and where tokens exit is
the `Oracle`'s, which only backends read. `RequestState` is owned by the scheduler; policies read it and never
write it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from policies.core.engine.frontier import PromptProgress


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class Phase(StrEnum):
    """What a running request's next step is, by scheduled (not completed) progress."""

    PROMPT = "prompt"
    """Prompt tokens remain to be run at some depth."""
    CODA = "coda"
    """A final hidden state waits for the LM head."""
    PRELUDE = "prelude"
    """A sampled token waits to be embedded."""
    RECURRENT = "recurrent"
    """A token is between recurrent depths."""
    UNDECIDED = "undecided"
    """A token has run its last depth while batches in flight may still say that it had left earlier."""
    DRAINED = "drained"
    """Everything is scheduled; the request waits for its last batches to be collected."""


PROMPT, CODA, PRELUDE, RECURRENT = Phase.PROMPT, Phase.CODA, Phase.PRELUDE, Phase.RECURRENT
"""Names for code that runs for every request of every batch: Python 3.11 takes 0.1 us to find a member of an
enum."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for: a prompt of `prompt_tokens` tokens and at most `max_tokens` new ones.

    `priority` counts only under priority admission, lower first. `request_id` is unique within a run.
    `content_ids` say what the prompt begins with, one for every `content_tokens` tokens (the last may be cut
    short): where two prompts have equal ids up to a place, they have equal tokens up to there. What no id
    covers is like no other prompt.
    """

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    content_ids: tuple[int, ...] = ()
    content_tokens: int = 0

    @property
    def num_kv_positions(self) -> int:
        """Positions that get K/V: the last sampled token is never fed back."""
        return self.prompt_tokens + self.max_tokens - 1


class Oracle(Protocol):
    """The future, for backends only: what a recorded or generated workload says will happen."""

    def output_tokens(self, request_id: int) -> int:
        """Tokens the request really produces, 1 <= output_tokens <= max_tokens."""
        ...


class ExitOracle(Protocol):
    """Where tokens will leave the loop, for backends only."""

    def exit_loops(self, request_id: int, position: int) -> int:
        """Loops, 1 or more, after which the decoded token at `position` would leave if no limit held it."""
        ...


class RequestState:
    """One running request: its prompt frontiers, its decode position, and what it holds (nothing while it is
    preempted).

    Progress here is *scheduled* progress: the device is a FIFO, so what has been submitted may be built upon.
    A decoding request walks CODA -> PRELUDE -> RECURRENT (depths 0 .. T-1) -> CODA; `position` is the token
    it is at: with a prompt of 10 tokens the first CODA is at position 9 and the first PRELUDE embeds position
    10. At CODA `depth` is the first one that the token skipped by leaving early, 0 when it skipped none; its
    rows in batches up to `surplus_until` were formed before that was known. Collecting batch
    `undecided_until` settles whether it leaves early.
    """

    __slots__ = (
        "arrival_ns", "block_groups", "depth", "first_scheduled_ns", "is_ended", "last_seq", "max_tokens",
        "num_output_tokens", "num_published", "num_scheduled_outputs", "phase", "position", "priority",
        "prompt", "prompt_tokens", "request", "request_id", "ring_id", "surplus_until", "undecided_until",
    )  # fmt: skip

    def __init__(self, request: Request, prompt: PromptProgress) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival_ns = request.arrival_ns
        self.prompt_tokens = request.prompt_tokens
        self.max_tokens = request.max_tokens
        self.priority = request.priority
        self.prompt = prompt
        self.block_groups: list[int] = []
        self.ring_id = -1
        self.num_published = 0
        self.phase = Phase.PROMPT
        self.depth = 0
        self.position = 0
        self.num_scheduled_outputs = 0
        self.num_output_tokens = 0
        self.last_seq = -1
        self.surplus_until = -1
        self.undecided_until = -1
        self.first_scheduled_ns = -1
        self.is_ended = False

    @property
    def order(self) -> tuple[int, int]:
        """The total order among requests that a policy treats alike: (arrival, id)."""
        return (self.arrival_ns, self.request_id)

    @property
    def next_kv_positions(self) -> int:
        """Positions that need K/V blocks for its next step: a prompt's next chunk, or the token that is
        embedded next.

        Chunk 16, prompt 40, 20 tokens done at depth 0: 32. A token is embedded when it has a place, so it
        always loops on.
        """
        if self.phase is Phase.PROMPT:
            start = self.prompt.prefill_depth_ranges[0]
            return start if start == self.prompt_tokens else self.prompt.chunk_end(start)
        return self.position + 1 if self.phase is Phase.PRELUDE else 0

    @property
    def num_stored_positions(self) -> int:
        """Positions whose K/V are worth keeping when nothing of it is in flight: of a prompt, up to its last
        complete chunk."""
        if self.phase is Phase.PROMPT:
            return self.prompt.prefill_reclaimable_tokens
        return self.position if self.phase is Phase.PRELUDE else self.position + 1

    def start_again(self, prompt: PromptProgress) -> None:
        """Compute everything again: generated tokens stay, as the end of the prompt, and the next CODA makes
        the next one.

        A prompt of 10 tokens that was preempted after 3 outputs is run as one of 13, and its CODA at position
        12 makes output 4.
        """
        self.prompt = prompt
        self.prompt_tokens = prompt.prompt_tokens
        self.phase = Phase.PROMPT
        self.depth = 0
        self.position = 0

    def __repr__(self) -> str:
        where = self.prompt if self.phase is Phase.PROMPT else f"position {self.position}, depth {self.depth}"
        return f"request {self.request_id} ({self.phase.value}: {where})"
