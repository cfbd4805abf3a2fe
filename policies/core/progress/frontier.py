"""How far a prompt has come, depth by depth, and which range may run next.

Owns four integers' worth of state under one line:

    window_origin <= reclaimable <= f[T-1] <= ... <= f[1] <= f[0] <= staged <= prompt_tokens

Knows nothing of batches, budgets shared between requests, or time. Policies read it; assigning fails.
"""

from collections.abc import Sequence
from typing import Any

from policies.core.errors import SelectionError


class PromptProgress:
    """Scheduled progress of one prompt through `num_loops` depths in chunks of `chunk_tokens`.

    `num_preluded_tokens` is the end of the staged prompt, `prefill_depth_ranges[d]` the tokens done at depth
    d, `num_prefilled_tokens` the last depth's frontier. At most `resident_chunks` chunks may be between their
    first staging and their last depth: T for a wavefront (the hidden ring has T slots), 1 otherwise.

    Worked example, chunk 4, T = 4, prompt 12, all staged: `ready(0)` is [0, 4). After advance(0, 4, 1)
    `ready(0)` is [4, 8) and `ready(1)` is [0, 4); when [0, 4) has run at depth 3,
    `prefill_reclaimable_tokens` is 4 and ring slot 0 is free again.
    """

    __slots__ = (
        "chunk_tokens", "num_loops", "num_preluded_tokens", "prefill_depth_ranges", "prefill_window_origin",
        "prompt_tokens", "resident_chunks",
    )  # fmt: skip

    prompt_tokens: int
    chunk_tokens: int
    num_loops: int
    resident_chunks: int
    prefill_window_origin: int
    num_preluded_tokens: int
    prefill_depth_ranges: list[int]

    def __init__(
        self, prompt_tokens: int, chunk_tokens: int, num_loops: int, resident_chunks: int, origin: int = 0
    ) -> None:
        for name, value in {
            "prompt_tokens": prompt_tokens,
            "chunk_tokens": chunk_tokens,
            "num_loops": num_loops,
            "resident_chunks": resident_chunks,
            "prefill_window_origin": origin,
            "num_preluded_tokens": origin,
            "prefill_depth_ranges": [origin] * num_loops,
        }.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} of a prompt cannot be written; the scheduler moves frontiers")

    @property
    def num_prefilled_tokens(self) -> int:
        return self.prefill_depth_ranges[-1]

    @property
    def is_complete(self) -> bool:
        return self.prefill_depth_ranges[-1] == self.prompt_tokens

    @property
    def prefill_reclaimable_tokens(self) -> int:
        """Start of the oldest resident chunk: moves only when that whole chunk has finished its last
        depth."""
        done = self.prefill_depth_ranges[-1]
        return done if done == self.prompt_tokens else self.chunk_start(done)

    @property
    def stageable_end(self) -> int:
        """Tokens before this may be staged: a chunk's ring slot must be free of the chunk `resident_chunks`
        before it."""
        return min(
            self.prompt_tokens, self.prefill_reclaimable_tokens + self.resident_chunks * self.chunk_tokens
        )

    @property
    def is_at_chunks(self) -> bool:
        """Whether every frontier lies between two chunks, or at the prompt's end."""
        chunk, origin, end = self.chunk_tokens, self.prefill_window_origin, self.prompt_tokens
        frontiers = (self.num_preluded_tokens, *self.prefill_depth_ranges)
        return all([done == end or (done - origin) % chunk == 0 for done in frontiers])

    @property
    def num_resident_chunks(self) -> int:
        return -(-(self.num_preluded_tokens - self.prefill_reclaimable_tokens) // self.chunk_tokens)

    @property
    def num_resident_rows(self) -> int:
        """Hidden rows that must be kept between batches: staged and not yet through the last depth."""
        return self.num_preluded_tokens - self.prefill_depth_ranges[-1]

    def chunk_start(self, token: int) -> int:
        origin = self.prefill_window_origin
        return origin + (token - origin) // self.chunk_tokens * self.chunk_tokens

    def chunk_end(self, token: int) -> int:
        """End of the chunk that holds `token`, cut at the prompt's end."""
        return min(self.chunk_start(token) + self.chunk_tokens, self.prompt_tokens)

    def hidden_row_offset(self, token: int) -> int | None:
        """Row of `token` in the request's hidden ring; None without a ring (one resident chunk): the row is
        its place in the chunk.

        Chunk 4, T = 4: token 18 lies in chunk 4, slot 0, so row 0 x 4 + 2 = 2.
        """
        if self.resident_chunks == 1:
            return None
        chunk, offset = divmod(token - self.prefill_window_origin, self.chunk_tokens)
        return chunk % self.resident_chunks * self.chunk_tokens + offset

    def ready(self, depth: int, fuse_prelude: bool = True) -> tuple[int, int]:
        """The range `[start, end)` that may run at `depth` now; empty when start == end.

        With `fuse_prelude` a depth-0 range may take tokens that are not staged yet, as far as the ring has
        room.
        """
        start = self.prefill_depth_ranges[depth]
        if start == self.prompt_tokens:
            return start, start
        if depth > 0:
            available = self.prefill_depth_ranges[depth - 1]
        elif self.num_preluded_tokens > start or not fuse_prelude:
            available = self.num_preluded_tokens
        else:
            available = self.stageable_end
        if available == start:
            return start, start
        return start, min(available, self.chunk_end(start))

    def deepest_ready(self) -> tuple[int, int, int]:
        """(depth, start, end) of the ready range nearest to the prompt's end of the loop; start == end when
        none is ready."""
        frontiers = self.prefill_depth_ranges
        for depth in range(self.num_loops - 1, 0, -1):
            if frontiers[depth] < frontiers[depth - 1]:
                return depth, *self.ready(depth)
        return 0, *self.ready(0)

    def stageable(self) -> tuple[int, int]:
        """The range that may be staged (embedded into the ring) now, within one chunk; empty when start ==
        end."""
        start = self.num_preluded_tokens
        limit = self.stageable_end
        if start >= limit:
            return start, start
        return start, min(limit, self.chunk_end(start))

    def embeds(self, depth: int, start: int) -> bool:
        """Whether a range from `start` at `depth` takes its rows from the embedding table: not when it is
        staged."""
        return depth == 0 and start >= self.num_preluded_tokens

    def check_stage(self, start: int, count: int) -> None:
        """Raise `SelectionError` unless `[start, start + count)` may be staged now."""
        if start != self.num_preluded_tokens:
            raise SelectionError(
                f"staging starts at {start}, the staged frontier is {self.num_preluded_tokens}"
            )
        limit = self.stageable_end
        if start + count > limit:
            raise SelectionError(f"staging ends at {start + count}, the hidden ring has room up to {limit}")
        if start + count > self.chunk_end(start):
            raise SelectionError(
                f"staging [{start}, {start + count}) crosses the chunk end {self.chunk_end(start)}"
            )

    def check_advance(self, depth: int, start: int, count: int, loops: int) -> None:
        """Raise `SelectionError` unless `[start, start + count)` may run depths `depth .. depth + loops - 1`
        now."""
        frontiers = self.prefill_depth_ranges
        end = start + count
        if depth + loops > self.num_loops:
            raise SelectionError(
                f"depths {depth} to {depth + loops - 1} asked of a model with {self.num_loops}"
            )
        for at in range(depth, depth + loops):
            if frontiers[at] != start:
                raise SelectionError(f"it starts at {start}, the frontier of depth {at} is {frontiers[at]}")
        if end > self.chunk_end(start):
            raise SelectionError(f"[{start}, {end}) crosses the chunk end {self.chunk_end(start)}")
        if depth > 0:
            if end > frontiers[depth - 1]:
                raise SelectionError(
                    f"it ends at {end}, depth {depth - 1} is done up to {frontiers[depth - 1]}"
                )
        elif self.embeds(depth, start):
            self.check_stage(start, count)
        elif end > self.num_preluded_tokens:
            raise SelectionError(
                f"it begins staged and ends at {end}, staged are {self.num_preluded_tokens} tokens"
            )

    def stage(self, count: int) -> None:
        """Commit a staging that `check_stage` accepts."""
        set_preluded(self, self.num_preluded_tokens + count)

    def advance(self, depth: int, count: int, loops: int, embeds: bool) -> None:
        """Commit a range that `check_advance` accepts: frontiers `depth .. depth + loops - 1` move by
        `count`."""
        if embeds:
            set_preluded(self, self.num_preluded_tokens + count)
        for at in range(depth, depth + loops):
            self.prefill_depth_ranges[at] += count

    def moved_on(self, frontiers: Sequence[int], staged: int) -> None:
        """Commit ranges that were accepted one by one: where all frontiers lie after them."""
        set_preluded(self, staged)
        self.prefill_depth_ranges[:] = frontiers

    def rewind(self) -> None:
        """Forget chunks that have not finished their last depth: all frontiers go back to
        `prefill_reclaimable_tokens`.

        Chunk 4, T = 4: staged 12, depths [12, 8, 6, 5] goes back to 4, 4 and [4, 4, 4, 4].
        """
        done = self.prefill_reclaimable_tokens
        set_preluded(self, done)
        self.prefill_depth_ranges[:] = [done] * self.num_loops

    def imported(self, end: int) -> None:
        """Tokens before `end` have come from elsewhere, whole: chunks begin there.

        Chunk 4, prompt 12, imported up to 6: the next chunks are [6, 10) and [10, 12).
        """
        assert self.prefill_window_origin <= self.num_prefilled_tokens == self.num_preluded_tokens <= end
        set_origin(self, end)
        set_preluded(self, end)
        self.prefill_depth_ranges[:] = [end] * self.num_loops

    def completed(self, end: int) -> int:
        """The end of the last chunk that is complete when `[.., end)` has run its last depth."""
        return end if end in (self.prompt_tokens, self.chunk_end(end - 1)) else self.chunk_start(end)

    def is_ordered(self) -> bool:
        """Invariant 1: staged >= f[0] >= ... >= f[T-1]."""
        frontiers = self.prefill_depth_ranges
        return frontiers[0] <= self.num_preluded_tokens and frontiers == sorted(frontiers, reverse=True)

    def __repr__(self) -> str:
        return (
            f"staged {self.num_preluded_tokens}, depths {self.prefill_depth_ranges} of {self.prompt_tokens}"
        )


# The slots' own setters, past __setattr__.
set_preluded = vars(PromptProgress)["num_preluded_tokens"].__set__
set_origin = vars(PromptProgress)["prefill_window_origin"].__set__
