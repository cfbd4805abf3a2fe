"""split: a prompt chunk returns at every depth after which decode work may go; prompt and decode rows never
share a batch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from policies.building_blocks import (
    decode_comes_next,
    drafts_first,
    in_stage_order,
    oldest_chunks,
    prompt_selection,
)
from policies.core.seam.batch import Selection
from policies.core.seam.policy import Policy
from policies.core.seam.view import View


@dataclass(frozen=True)
class Split(Policy):
    """A decode row waits for one depth of a chunk and not for four. Without decode work it is atomic."""

    name: ClassVar[str] = "split"
    guesses: ClassVar[Literal["wavefront", "drafts", "never"]] = "drafts"
    repeats: ClassVar[bool] = True

    def select(self, view: View) -> Selection | None:
        return in_stage_order(drafts_first(view), self._prompt_batch)

    def _prompt_batch(self, view: View) -> Selection | None:
        ranges = oldest_chunks(view, view.limits.max_num_batched_tokens)
        return prompt_selection(ranges, comes_back=decode_comes_next(view))
