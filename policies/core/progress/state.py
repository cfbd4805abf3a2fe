"""How far one running request has come. Owned by the scheduler; policies read it as a `RequestView`.

Reading is plain attribute access. Assigning fails, whoever tries: a step is taken by the method that is named
after it, so that nothing a policy does to what it sees can change a schedule.
"""

from typing import Any, ClassVar

from policies.core.progress.frontier import PromptProgress
from policies.core.progress.tokens import TokenRows
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import CODA, GUESSING, PRELUDE, RECURRENT, Phase, Request


class RequestState:
    """One running request: its prompt frontiers, its decode position, and what it holds (nothing while it is
    preempted).

    Progress here is *scheduled* progress: the device is a FIFO, so what has been submitted may be built upon.
    A decoding request walks CODA -> PRELUDE -> RECURRENT (depths 0 .. T-1) -> CODA; `position` is the token
    it is at: with a prompt of 10 tokens the first CODA is at position 9 and the first PRELUDE embeds position
    10. At CODA `depth` is the first one that the token skipped by leaving early, 0 when it skipped none; its
    rows in batches up to `surplus_until` were formed before that was known. Collecting batch
    `undecided_until` decides whether it leaves early. `last_seq` is the last batch that touches it,
    `admitted_seq` the one with which it was last let in. Of its tokens `num_scheduled_outputs` are made by
    what is submitted, `num_output_tokens` are collected, the last of them delivered at `last_token_ns` (not
    kept by what skips batches, which policies that read it never allow). Where tokens are guessed it walks
    from its prompt to GUESSING, and `tokens` are its rows; `position` and `depth` are the first one's.
    """

    num_before: ClassVar[int] = 0

    __slots__ = (
        "admitted_seq", "arrival_ns", "block_groups", "depth", "first_scheduled_ns", "guessing", "is_ended",
        "last_seq", "last_token_ns", "max_tokens", "num_output_tokens", "num_preemptions", "num_published",
        "num_scheduled_outputs", "order", "phase", "position", "priority", "prompt", "prompt_tokens",
        "rank", "request", "request_id", "ring_id", "surplus_until", "tokens", "undecided_until",
    )  # fmt: skip

    admitted_seq: int
    arrival_ns: int
    block_groups: list[int]
    depth: int
    first_scheduled_ns: int
    guessing: ExitRule | None
    is_ended: bool
    last_seq: int
    last_token_ns: int
    max_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_published: int
    num_scheduled_outputs: int
    order: tuple[int, int]
    """The total order among requests that a policy treats alike: (arrival, id)."""
    phase: Phase
    position: int
    priority: int
    prompt: PromptProgress
    prompt_tokens: int
    rank: tuple[int, int, int, int]
    """Its place in the order of admission, see `policies.core.memory.admission.Rank`."""
    request: Request
    request_id: int
    ring_id: int
    surplus_until: int
    tokens: TokenRows | None
    undecided_until: int

    def __init__(
        self,
        request: Request,
        prompt: PromptProgress,
        rank: tuple[int, int, int, int],
        guessing: ExitRule | None,
    ) -> None:
        values: dict[str, object] = {
            "rank": rank,
            "request": request,
            "request_id": request.request_id,
            "arrival_ns": request.arrival_ns,
            "order": (request.arrival_ns, request.request_id),
            "max_tokens": request.max_tokens,
            "priority": request.priority,
            "block_groups": [],
            "tokens": None,
            "guessing": guessing,
            "num_scheduled_outputs": 0,
            "num_output_tokens": 0,
            "first_scheduled_ns": -1,
            "is_ended": False,
            **dict.fromkeys(("admitted_seq", "last_seq", "last_token_ns"), -1),
            **dict.fromkeys(("ring_id", "surplus_until", "undecided_until"), -1),
            "num_preemptions": 0,
            "num_published": 0,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.start_again(prompt)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"request {self.request_id}: {name} cannot be written; a policy proposes, and the scheduler "
            "moves requests"
        )

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
        if self.tokens is not None:
            return self.tokens.behind if self.phase is GUESSING else 0
        return self.position + 1 if self.phase is Phase.PRELUDE else 0

    @property
    def num_known_positions(self) -> int:
        """Positions whose tokens are known: the whole prompt, and what was made of it so far."""
        return self.prompt_tokens if self.phase is Phase.PROMPT else self.position + 1

    @property
    def num_stored_positions(self) -> int:
        """Positions whose K/V are worth keeping when nothing of it is in flight: of a prompt, up to its last
        complete chunk."""
        if self.phase is Phase.PROMPT:
            return self.prompt.prefill_reclaimable_tokens
        is_ahead = self.phase is Phase.PRELUDE or (self.tokens is not None and self.depth == 0)
        return self.position if is_ahead else self.position + 1

    def start_again(self, prompt: PromptProgress) -> None:
        """Compute everything again: generated tokens stay, as the end of the prompt, and the next CODA makes
        the next one.

        A prompt of 10 tokens that was preempted after 3 outputs is run as one of 13, and its CODA at position
        12 makes output 4.
        """
        set_prompt(self, prompt)
        set_prompt_tokens(self, prompt.prompt_tokens)
        set_phase(self, Phase.PROMPT)
        set_tokens(self, None)
        set_depth(self, 0)
        set_position(self, 0)

    def placed(self, ring_id: int, block_groups: list[int]) -> None:
        """It runs, in ring `ring_id` and with these groups."""
        set_ring_id(self, ring_id)
        set_block_groups(self, block_groups)

    def admitted(self, seq: int) -> None:
        """It was let in with batch `seq`."""
        set_admitted_seq(self, seq)

    def released(self) -> None:
        """What it held is somebody else's."""
        set_block_groups(self, [])

    def preempted(self) -> None:
        """What it holds is taken from it, once more."""
        set_num_preemptions(self, self.num_preemptions + 1)

    def published(self, num_groups: int) -> None:
        """Its first `num_groups` groups are shared, or need not be."""
        set_num_published(self, num_groups)

    def scheduled(self, seq: int, now_ns: int) -> None:
        """Batch `seq`, formed at `now_ns`, touches its prompt; the steps of its tokens say so themselves."""
        if self.last_seq < 0:
            set_first_scheduled_ns(self, now_ns)
        set_last_seq(self, seq)

    def prompt_done(self) -> None:
        """Its prompt is through the last depth: the last token's hidden state waits for the LM head, and
        where tokens are guessed it is the first of its rows."""
        set_phase(self, CODA)
        set_position(self, self.prompt_tokens - 1)
        rule = self.guessing
        if rule is not None:
            first, end, loops = self.prompt_tokens - 1, self.request.num_kv_positions, rule.max_loops
            set_tokens(self, TokenRows(first, loops, end, loops, rule.draft_loops, rule.max_guesses))
            self._stands(self.tokens)

    def awaits(self) -> None:
        """Another engine computes its prompt, or is sent it: nothing of it is scheduled here until then."""
        set_phase(self, Phase.TRANSFER)

    def received(self, end: int, at_ns: int) -> None:
        """Its prompt is here up to `end` since `at_ns`; all of it: the LM head is next."""
        self.prompt.imported(end)
        if end == self.prompt_tokens:
            set_first_scheduled_ns(self, at_ns)
            self.prompt_done()

    def computes(self) -> None:
        """No more of its prompt will come: it is computed here, from where what has come ends."""
        set_phase(self, Phase.PROMPT)

    def stepped(self, seq: int) -> None:
        """Batch `seq` takes steps of its `tokens`."""
        set_last_seq(self, seq)
        self._stands(self.tokens)

    def guessed_wrong(self, seq: int) -> int:
        """Collecting batch `seq` shows that the row behind the first is not its successor: rows in later
        batches are surplus. Return how many collected ones were in vain."""
        assert self.tokens is not None
        in_vain = self.tokens.refuse()
        set_surplus_until(self, max(self.last_seq, seq))
        self._stands(self.tokens)
        return in_vain

    def guesses_dropped(self) -> int:
        """It is preempted, with nothing in flight: of its tokens the first one stays. Return how many rows
        were in vain."""
        return 0 if self.tokens is None else self.tokens.forget_guesses()

    def _stands(self, tokens: TokenRows | None) -> None:
        assert tokens is not None
        depths = tokens.depths
        set_position(self, tokens.position)
        set_depth(self, depths[0] if depths else 0)
        set_phase(self, GUESSING if depths else Phase.DRAINED)
        set_num_scheduled_outputs(self, self.num_output_tokens + tokens.num_sampled)

    def sampled(self, seq: int) -> None:
        """A token is made of its hidden state: it is embedded next, or was the last that may be."""
        set_last_seq(self, seq)
        outputs = self.num_scheduled_outputs + 1
        set_num_scheduled_outputs(self, outputs)
        set_position(self, self.position + 1)
        set_depth(self, 0)
        set_phase(self, Phase.DRAINED if outputs == self.max_tokens else PRELUDE)

    def embedded(self, seq: int) -> None:
        """Its token is at depth 0 of the loop."""
        set_last_seq(self, seq)
        set_phase(self, RECURRENT)

    def looped(self, seq: int, depth: int) -> None:
        """Its token has run up to `depth` and loops on."""
        set_last_seq(self, seq)
        set_depth(self, depth)

    def decides(self, seq: int) -> None:
        """Whether its token leaves early is known once batch `seq` is collected."""
        set_undecided_until(self, seq)

    def looped_out(self, seq: int, depth: int, is_decided: bool) -> None:
        """Its token has run its last depth: it goes to CODA, or waits for batches that may still say that it
        had left earlier; `depth` is the first one it skipped, 0 when none."""
        set_last_seq(self, seq)
        set_phase(self, CODA if is_decided else Phase.UNDECIDED)
        set_depth(self, depth)

    def stayed(self) -> None:
        """It is known now that its token did not leave early."""
        set_phase(self, CODA)

    def left(self, depth: int, seq: int) -> None:
        """Batch `seq` says that its token left before `depth`: rows in later batches are surplus."""
        set_phase(self, CODA)
        set_depth(self, depth)
        set_undecided_until(self, seq)
        if self.last_seq > seq:
            set_surplus_until(self, self.last_seq)

    def delivered(self, num_tokens: int = 1) -> int:
        """So many tokens more have been collected; return how many have."""
        count = self.num_output_tokens + num_tokens
        set_num_output_tokens(self, count)
        return count

    def moved_on(self, phase: Phase, depth: int, num_tokens: int, last_seq: int) -> None:
        """It has made `num_tokens` in batches up to `last_seq`, and waits at `depth` for its next step."""
        outputs = self.num_scheduled_outputs + num_tokens
        set_phase(self, Phase.DRAINED if outputs == self.max_tokens and phase is PRELUDE else phase)
        set_depth(self, depth)
        set_position(self, self.position + num_tokens)
        set_num_scheduled_outputs(self, outputs)
        set_last_seq(self, last_seq)

    def heard(self, at_ns: int) -> None:
        """The last of its tokens that are collected was delivered at `at_ns`."""
        set_last_token_ns(self, at_ns)

    def ended(self) -> None:
        """Nothing of it is scheduled any more; it drains."""
        set_is_ended(self, True)
        set_phase(self, Phase.DRAINED)

    def __repr__(self) -> str:
        where: object = self.prompt
        if self.phase is not Phase.PROMPT:
            where = self.tokens or f"position {self.position}, depth {self.depth}"
        return f"request {self.request_id} ({self.phase.value}: {where})"


# The slots' own setters, which know nothing of the __setattr__ above.
set_block_groups, set_depth, set_first_scheduled_ns, set_is_ended, set_last_seq = (
    vars(RequestState)[name].__set__
    for name in ("block_groups", "depth", "first_scheduled_ns", "is_ended", "last_seq")
)
set_num_output_tokens, set_num_published, set_num_scheduled_outputs, set_phase, set_position = (
    vars(RequestState)[name].__set__
    for name in ("num_output_tokens", "num_published", "num_scheduled_outputs", "phase", "position")
)
set_admitted_seq, set_last_token_ns, set_tokens = (
    vars(RequestState)[name].__set__ for name in ("admitted_seq", "last_token_ns", "tokens")
)
set_num_preemptions, set_prompt, set_prompt_tokens, set_ring_id, set_surplus_until, set_undecided_until = (
    vars(RequestState)[name].__set__
    for name in ("num_preemptions", "prompt", "prompt_tokens", "ring_id", "surplus_until", "undecided_until")
)
