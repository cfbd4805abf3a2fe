"""A request as a client sends it, and what backends alone know of its future.

`Request` holds only what a client could say. How many tokens it will really produce and where tokens exit is
the `Oracle`'s. How far a running request has come is `policies.core.progress.state`'s."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    SENT = "sent"
    """An engine that only computes prompts has sent the whole of it to another."""


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
    TRANSFER = "transfer"
    """Its prompt is on the way to another engine, or from one: nothing of it is scheduled here."""
    GUESSING = "guessing"
    """Tokens, known and guessed, are at several depths; each has a next step of its own (see
    `policies.core.progress.tokens`)."""
    DRAINED = "drained"
    """Everything is scheduled; the request waits for its last batches to be collected."""


PROMPT, CODA, PRELUDE, RECURRENT = Phase.PROMPT, Phase.CODA, Phase.PRELUDE, Phase.RECURRENT
GUESSING = Phase.GUESSING
"""Names for code that runs for every request of every batch: Python 3.11 takes 0.1 us to find a member of an
enum."""


Role = Literal["whole", "prefill", "decode"]
"""What an engine does of its requests: all; the prompt, whose K/V it sends away; or the rest, once it has
received them."""


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
