"""mixed: split, and prompt rows and decode rows share a recurrent batch, each at its own depth."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from policies.building_blocks import beside_decode, decode_comes_next, oldest_chunks, prompt_selection
from policies.core.seam.batch import Selection
from policies.core.seam.policy import Policy
from policies.core.seam.view import View


@dataclass(frozen=True)
class Mixed(Policy):
    """Decode rows ride along with prompt chunks: one weight read serves both. They take turns only where both
    do not fit."""

    name: ClassVar[str] = "mixed"
    guesses: ClassVar[Literal["wavefront", "drafts", "never"]] = "never"
    repeats: ClassVar[bool] = True

    def select(self, view: View) -> Selection | None:
        return beside_decode(view, oldest_chunks, self._prompt_batch)

    def _prompt_batch(self, view: View) -> Selection | None:
        """Prompts alone: where nobody loops, and their turn where decode rows fill a whole batch."""
        ranges = oldest_chunks(view, view.limits.max_num_batched_tokens)
        return prompt_selection(ranges, comes_back=decode_comes_next(view))
