"""The tokens of one request that are in the loop at once, known and guessed: one frontier per depth over
output tokens.

The scheduler's; knows no batch and no time. Positions follow one another, and none is deeper than the one
before it:

    loops of row 0 >= loops of row 1 >= ...   (the frontier of depth d: the first position with d loops or
                                               fewer)

What a batch does counts at once (*scheduled*); whether a guess was right is known when the batch that made
the true token is collected. A row whose true successor is being made is *sampled*, and stays until then.
"""

from typing import NamedTuple


class Row:
    """One token: the loops it has run, how far ahead it was guessed (0: it is known), and how many batches
    with it have been collected."""

    __slots__ = ("depth", "ran", "rank")

    def __init__(self, depth: int, rank: int) -> None:
        self.depth = depth
        self.rank = rank
        self.ran = 0


class Head(NamedTuple):
    """What the LM head makes of a row: its true successor, or a guess at it. `rank` is that of the guess that
    is made, or checked; 0: there is none to check."""

    is_guess: bool
    rank: int


class TokenRows:
    """Rows from position `first` on, the first `num_sampled` of them sampled, none at or beyond `end`.

    Worked example, T = 4, guesses after 2 loops: token 10 has run 2 loops, row 11 is guessed, both run 2
    more: depths [4, 2]. The LM head makes token 11 of row 10 and guesses 12 of row 11: [sampled, 2, 0]. Once
    that is collected, [2, 0] from position 11 where 11 was guessed rightly, and [0] where not.
    """

    __slots__ = ("_rows", "draft_loops", "end", "first", "max_guesses", "num_loops", "num_sampled")

    def __init__(
        self, first: int, depth: int, end: int, num_loops: int, draft_loops: int, max_guesses: int
    ) -> None:
        self.first = first
        self.end = end
        self.num_loops = num_loops
        self.draft_loops = draft_loops
        self.max_guesses = max_guesses
        self.num_sampled = 0
        self._rows = [Row(depth, 0)]

    @property
    def position(self) -> int:
        """The first token whose true successor is not being made: `end` when there is none."""
        return self.first + self.num_sampled

    @property
    def behind(self) -> int:
        """The first position behind all rows."""
        return self.first + len(self._rows)

    @property
    def depths(self) -> list[int]:
        """Loops of each row from `position` on."""
        return [row.depth for row in self._rows[self.num_sampled :]]

    def depth_at(self, position: int) -> int | None:
        """Loops that the row at `position` has run; None when there is none that could run."""
        return self._rows[position - self.first].depth if self.position <= position < self.behind else None

    def head(self, position: int, num_leaving: int) -> Head | None:
        """What the LM head makes of the row at `position`, in a batch that makes the successors of the first
        `num_leaving` rows as well; None when it is not there yet, or has been guessed from, or may not be."""
        depth = self.depth_at(position)
        is_last = position + 1 == self.behind
        if depth == self.num_loops:
            if position != self.position + num_leaving:
                return None
            return Head(False, 0 if is_last else self._rows[position + 1 - self.first].rank)
        left = len(self._rows) - self.num_sampled - num_leaving
        if depth == self.draft_loops and is_last and left <= self.max_guesses and self.behind < self.end:
            return Head(True, left)
        return None

    @property
    def num_waiting(self) -> int:
        """Rows from `position` on that have run all loops."""
        return self.depths.count(self.num_loops)

    def loop(self, position: int, loops: int) -> None:
        """The row at `position` has run so many loops more."""
        self._rows[position - self.first].depth += loops

    def guess(self, rank: int) -> None:
        """The last row's successor is guessed."""
        self._rows.append(Row(0, rank))

    def sample(self) -> None:
        """The successor of the row at `position` is made: where it was not guessed it begins now, unless it
        is the last token, which is never fed back."""
        self.num_sampled += 1
        if self.position == self.behind < self.end:
            self._rows.append(Row(0, 0))

    def collected(self, position: int) -> None:
        """A batch with the row at `position` is collected."""
        self._rows[position - self.first].ran += 1

    def settle(self) -> None:
        """The successor of the first row is known, and is the one behind it if there is one."""
        del self._rows[0]
        self.first += 1
        self.num_sampled -= 1
        if self._rows:
            self._rows[0].rank = 0

    def refuse(self) -> int:
        """The successor of the first row is known, and not the one behind it, which begins anew; return how
        many collected rows were in vain."""
        in_vain = sum([row.ran for row in self._rows[1:]])
        self._rows[:] = [Row(0, 0)]
        self.first += 1
        self.num_sampled = 0
        return in_vain

    def forget_guesses(self) -> int:
        """Keep the row at `position` alone, with nothing in flight; return how many rows were in vain."""
        in_vain = sum([row.ran for row in self._rows[1:]])
        del self._rows[1:]
        return in_vain

    def __repr__(self) -> str:
        return f"tokens from {self.position} at depths {self.depths}"
