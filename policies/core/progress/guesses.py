"""What came of guesses, counted."""

from dataclasses import dataclass, field
from operator import add

from policies.core.seam.exits import ExitRule


@dataclass(slots=True)
class GuessTotals:
    """Guesses that were checked and those of them that were right, by rank (index 0 is not used).

    `request_loops` are the loops of batches with decode rows of a request, summed over requests: without
    guesses as many as the model's for each token after the first. `drafts` counts the rows that guessed, and
    `draft_ns` is their share, by rows, of the device time of their batches.
    """

    right: list[int] = field(default_factory=list)
    checks: list[int] = field(default_factory=list)
    request_loops: int = 0
    drafts: int = 0
    draft_ns: int = 0

    @classmethod
    def of(cls, rule: ExitRule) -> "GuessTotals":
        size = rule.max_guesses + 1 if rule.draft_loops else 0
        return cls([0] * size, [0] * size)

    def __add__(self, other: "GuessTotals") -> "GuessTotals":
        """Of two engines that follow one rule."""
        return GuessTotals(
            list(map(add, self.right, other.right)),
            list(map(add, self.checks, other.checks)),
            self.request_loops + other.request_loops,
            self.drafts + other.drafts,
            self.draft_ns + other.draft_ns,
        )

    def drafted(self, drafts: int, rows: int, device_ns: int) -> None:
        """A batch of `rows` rows, so many of them guesses, has taken `device_ns`."""
        self.drafts += drafts
        self.draft_ns += device_ns * drafts // rows

    def checked(self, rank: int, is_right: bool) -> None:
        """A guess of `rank` has been checked."""
        self.checks[rank] += 1
        self.right[rank] += is_right
