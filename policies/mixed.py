"""mixed: split, and prompt rows and decode rows share a recurrent batch, each at its own depth."""

from dataclasses import dataclass
from typing import ClassVar

from policies.building_blocks import (
    decode_batch,
    in_stage_order,
    mixed_selection,
    oldest_chunk_ranges,
    prompt_selection,
    token_stages,
)
from policies.core.seam.batch import Selection, Stage
from policies.core.seam.policy import Policy
from policies.core.seam.view import View


@dataclass(frozen=True)
class Mixed(Policy):
    """Decode rows ride along with prompt chunks: one weight read serves both. They take turns only where both
    do not fit."""

    name: ClassVar[str] = "mixed"

    def select(self, view: View) -> Selection | None:
        early = token_stages(view)
        if early is not None:
            return early
        max_rows = view.limits.max_num_batched_tokens - len(view.looping)
        if max_rows <= 0:
            return in_stage_order(view, self._prompt_batch)
        ranges = oldest_chunk_ranges(view, Stage.PREFILLING_RECURRENT, max_rows)
        if ranges and view.looping:
            return mixed_selection(view, ranges)
        return prompt_selection(view, ranges, comes_back=view.has_decode_work) or decode_batch(view)

    def _prompt_batch(self, view: View) -> Selection | None:
        """Prompts alone: their turn where decode rows fill a whole batch."""
        ranges = oldest_chunk_ranges(view, Stage.PREFILLING_RECURRENT, view.limits.max_num_batched_tokens)
        return prompt_selection(view, ranges, comes_back=view.has_decode_work)
