"""What a policy sees of requests whose tokens are guessed: each row a member of the view of its own."""

from collections.abc import Iterable
from typing import NamedTuple

from policies.core.progress.frontier import PromptProgress
from policies.core.progress.state import RequestState
from policies.core.seam.request import CODA, GUESSING, PROMPT, RECURRENT, Phase


class RowView(NamedTuple):
    """One token of `request` at `position`, which has run `depth` loops; `phase` is RECURRENT, or CODA where
    the LM head comes next. The rest is the request's."""

    request: RequestState
    position: int
    depth: int
    phase: Phase
    num_before: int
    request_id: int
    last_seq: int
    order: tuple[int, int]

    @property
    def arrival_ns(self) -> int:
        return self.request.arrival_ns

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def max_tokens(self) -> int:
        return self.request.max_tokens

    @property
    def prompt(self) -> PromptProgress:
        return self.request.prompt

    @property
    def admitted_seq(self) -> int:
        return self.request.admitted_seq

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens

    @property
    def num_scheduled_outputs(self) -> int:
        return self.request.num_scheduled_outputs

    @property
    def last_token_ns(self) -> int:
        return self.request.last_token_ns


class ByRow(NamedTuple):
    """Members of a view: prompts whole, and rows by what they need next."""

    prompts: tuple[RequestState, ...]
    codas: tuple[RowView, ...]
    looping: tuple[RowView, ...]
    drafts: tuple[RowView, ...]


def by_row(running: Iterable[RequestState]) -> ByRow:
    """The members of a view of `running`, in its order, rows of a request in order of position.

    A row at which the next token can be guessed waits for that; where it cannot be (too many are ahead, or
    none follows), it loops on.
    """
    prompts: list[RequestState] = []
    codas: list[RowView] = []
    looping: list[RowView] = []
    drafts: list[RowView] = []
    for state in running:
        if state.phase is PROMPT:
            prompts.append(state)
        if state.phase is not GUESSING or state.tokens is None:
            continue
        tokens = state.tokens
        num_waiting = tokens.num_waiting
        for at, depth in enumerate(tokens.depths):
            position = tokens.position + at
            head = tokens.head(position, at if depth == tokens.num_loops else num_waiting)
            kind = looping if head is None else drafts if head.is_guess else codas
            phase = RECURRENT if head is None else CODA
            kind.append(
                RowView(state, position, depth, phase, at, state.request_id, state.last_seq, state.order)
            )
    return ByRow(tuple(prompts), tuple(codas), tuple(looping), tuple(drafts))
