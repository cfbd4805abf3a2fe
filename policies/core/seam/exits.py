"""Early exit: after how many loops a decoded token may leave, and where a batch must come back so that it
can.

Prompts always run all loops, so the first token of a request comes from full depth. Whether a token leaves is
the backend's to say, one batch at a time (`Completion.exits`); nothing here knows a gate or the future.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from policies.core.bounds import Within
from policies.core.errors import InputError
from policies.core.models.shape import MAX_LOOPS


@dataclass(frozen=True, slots=True)
class ExitRule:
    """What the scheduler must know: a decoded token leaves after `min_loops` loops at the earliest and
    `max_loops` at the latest.

    `has_decisions` is False when nothing is decided in between: every decoded token runs `max_loops` loops.
    Where tokens are guessed (`policies.core.seam.guesses`) a token's successor is, after `draft_loops` loops,
    and at most `max_guesses` are guessed ahead; 0: nothing is.
    """

    min_loops: int
    max_loops: int
    has_decisions: bool
    draft_loops: int = 0
    max_guesses: int = 0

    def boundary(self, depth: int) -> int:
        """The first depth after `depth` before which a token may leave, or its successor is guessed: as far
        as a decode row may run in one submission.

        Decisions from loop 2 to 4: from depth 0 to 2, from 2 to 3, from 3 to 4. Without decisions always to
        `max_loops`, and with guesses after loop 2 from 0 to 2 first.
        """
        if depth < self.draft_loops:
            return self.draft_loops
        return max(self.min_loops, depth + 1) if self.has_decisions else self.max_loops


@dataclass(frozen=True, slots=True)
class ExitSettings:
    """When a decoded token leaves the loop; numbers of loops count from 1, `max_loops` None means all of the
    model's.

    `fixed` runs every token through all loops. `trace` takes each token's loops from the workload. `gate`
    leaves after loop i when `1 - prod_{j <= i} (1 - gate_j) >= threshold` in the executor, and threshold 1
    never leaves early; the simulator knows no gate and draws each token's loops by `loop_weights`, the
    weights of leaving after loop 1, 2, ..., the model's last.
    """

    mode: Literal["fixed", "gate", "trace"] = "fixed"
    min_loops: Annotated[int, Within(1, MAX_LOOPS)] = 1
    max_loops: Annotated[int, Within(1, MAX_LOOPS)] | None = None
    threshold: Annotated[float, Within(gt=0, le=1)] = 1.0
    loop_weights: tuple[Annotated[float, Within(0, 1e100)], ...] | None = None

    def rule(self, num_loops: int) -> ExitRule:
        """The rule for a model of `num_loops` loops. Raises `InputError` when the limits do not fit it."""
        if self.mode == "fixed":
            if self != ExitSettings():
                raise InputError(
                    "exit.mode: fixed runs every token through all loops, expected no other key under exit"
                )
            return ExitRule(num_loops, num_loops, False)
        max_loops = num_loops if self.max_loops is None else self.max_loops
        if not 1 <= self.min_loops <= max_loops <= num_loops:
            raise InputError(
                f"exit: min_loops {self.min_loops} and max_loops {max_loops}, expected 1 <= min_loops <= "
                f"max_loops <= {num_loops}"
            )
        never_leaves = self.mode == "gate" and self.threshold == 1
        return ExitRule(self.min_loops, max_loops, self.min_loops < max_loops and not never_leaves)
