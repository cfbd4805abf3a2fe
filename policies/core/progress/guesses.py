"""What came of guesses, counted."""

from dataclasses import dataclass, field

from policies.core.seam.exits import ExitRule


@dataclass(slots=True)
class GuessTotals:
    """Guesses that were checked and those of them that were right, by rank (index 0 is not used), and the
    loops of batches with decode rows of a request, summed over requests: without guesses as many as the
    model's for each token after the first."""

    right: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    request_loops: int = 0

    @classmethod
    def of(cls, rule: ExitRule) -> "GuessTotals":
        size = rule.max_guesses + 1 if rule.draft_loops else 0
        return cls([0] * size, [0] * size)

    def checked(self, rank: int, is_right: bool) -> None:
        """A guess of `rank` has been checked."""
        self.checks[rank] += 1
        self.right[rank] += is_right
