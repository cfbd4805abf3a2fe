"""Speculation: tokens that are guessed from the early loops of those before them.

When a token has run `draft_loops` loops, the LM head on its state guesses the next one, whose row begins at
depth 0 while the first runs on. When the first has run all loops its true successor is known: equal to the
guess, the rows behind it go on; else they are dropped, and their positions run again. Whether a guess is
right is the backend's to say, batch by batch (`Completion.refused`); nothing here knows a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from policies.core.bounds import Within
from policies.core.errors import InputError
from policies.core.models.shape import MAX_LOOPS, ModelShape
from policies.core.seam.draws import draw
from policies.core.seam.exits import ExitRule, ExitSettings
from policies.core.seam.policy import Policy
from policies.core.seam.settings import CacheSettings

MOST_GUESSES = 16
"""Ahead of one token: each has a row of the hidden pool, and few of them come to anything."""
STREAM = 0x67756573
"""Keeps draws of acceptance apart from others with the same seed, request and position."""
Chance = Annotated[float, Within(0, 1)]


class Item(Protocol):
    """A range, of a batch or of a log."""

    @property
    def request_id(self) -> int: ...
    @property
    def token_start(self) -> int: ...


class AcceptanceOracle(Protocol):
    """Which guesses turn out to be right, where that is not found out by a model; for backends only."""

    def is_right(self, request_id: int, position: int, rank: int) -> bool:
        """Whether the token at `position` is the one that was guessed for it, as the `rank`-th (from 1 on)
        beyond the tokens that were certain."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Whether tokens are guessed (`loops`), after how many loops, and how many ahead of the last one that is
    certain.

    `acceptance` says which guesses are right where no model does: with one probability, with one for each
    place in the guess (the last one for those beyond), or as the workload recorded (`trace`). A simulation
    needs it; the executor finds out by itself, and a probability forces it, for timing.
    """

    mode: Literal["off", "loops"] = "off"
    draft_loops: Annotated[int, Within(1, MAX_LOOPS)] = 2
    max_tokens: Annotated[int, Within(1, MOST_GUESSES)] = 3
    acceptance: Chance | tuple[Chance, ...] | Literal["trace"] | None = None

    @property
    def most_rows(self) -> int:
        """Tokens of a request that may be in the loop at once."""
        return 1 + (self.max_tokens if self.mode == "loops" else 0)

    def rule(self, exits: ExitSettings, model: ModelShape, policy: Policy, cache: CacheSettings) -> ExitRule:
        """The rule of `exits` with where tokens are guessed. Raises `InputError` for what does not go
        together."""
        rule = exits.rule(model.num_loops)
        if self.mode == "off":
            if self != SpeculationSettings():
                raise InputError(
                    "speculation.mode: off guesses nothing, expected no other key under speculation"
                )
            return rule
        if policy.guesses == "never":
            raise InputError(
                f"policy {policy.name} cannot run with speculation: its prompt and decode rows share batches "
                "without a wavefront, where a row is one token; use wcpb, slo, atomic or split"
            )
        if cache.layout == "shared":
            raise InputError(
                "speculation cannot run with cache.layout shared: a guessed token reads at every depth what "
                "those before it left at that depth, and shared keeps one plane; use last_exited"
            )
        if exits.mode != "fixed":
            raise InputError(
                f"speculation cannot run with exit.mode {exits.mode}: a guess is held against the token of "
                "all loops, which one that leaves early does not have; use exit.mode fixed"
            )
        if self.draft_loops >= model.num_loops:
            raise InputError(
                f"speculation.draft_loops: {self.draft_loops}, expected fewer than the {model.num_loops} "
                f"loops of {model.name}: a guess must be earlier than the token"
            )
        if self.acceptance == ():
            raise InputError("speculation.acceptance: an empty list, expected at least one probability")
        loops = model.num_loops
        return ExitRule(loops, loops, False, self.draft_loops, self.max_tokens)


NO_GUESSES = SpeculationSettings()


@dataclass(frozen=True, slots=True)
class DrawnAcceptance:
    """Guesses are right with `chances[rank - 1]`, the last one for ranks beyond; a draw depends on seed,
    request and position alone, so no schedule changes it."""

    seed: int
    chances: tuple[float, ...]

    def is_right(self, request_id: int, position: int, rank: int) -> bool:
        chance = self.chances[min(rank, len(self.chances)) - 1]
        return draw(self.seed, STREAM, request_id, position) < chance


class Refusals:
    """Follows, over collected batches in order, which of their rows are surplus because a guess before them
    was refused: those behind it in its own batch, and all of its request in batches that were formed before
    it was collected."""

    def __init__(self) -> None:
        self._seqs: dict[int, int] = {}

    def counting(
        self, seq: int, after_seq: int, ranges: Sequence[Item], refused: frozenset[tuple[int, int]]
    ) -> list[bool]:
        """Of each of batch `seq`'s ranges whether it counts; `after_seq` is the last batch collected before
        it was formed, `refused` what it shows to be wrong."""
        behind: set[int] = set()
        found = []
        for item in ranges:
            request_id = item.request_id
            counts = self._seqs.get(request_id, -1) <= after_seq and request_id not in behind
            found.append(counts)
            if counts and (request_id, item.token_start) in refused:
                behind.add(request_id)
        self._seqs.update(dict.fromkeys(behind, seq))
        return found


def acceptance_oracle(
    settings: SpeculationSettings, seed: int, recorded: AcceptanceOracle | None
) -> AcceptanceOracle | None:
    """Who says which guesses are right; None: a model does. `recorded` is the workload's word. Raises
    `InputError` when it has none and is asked."""
    acceptance = settings.acceptance
    if acceptance is None or settings.mode == "off":
        return None
    if acceptance == "trace":
        if recorded is None:
            raise InputError(
                "speculation.acceptance: trace needs the outcome of every guess, expected a workload with a "
                "column `guessed`"
            )
        return recorded
    chances = acceptance if isinstance(acceptance, tuple) else (acceptance,)
    return DrawnAcceptance(seed, chances)
