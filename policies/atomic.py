"""atomic: a prompt chunk runs all depths in one submission; prompts and decode rows take turns."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from policies.building_blocks import drafts_first, in_stage_order, oldest_chunks, prompt_selection
from policies.core.seam.batch import Selection
from policies.core.seam.policy import Policy
from policies.core.seam.view import View


@dataclass(frozen=True)
class Atomic(Policy):
    """The baseline every engine has. Nothing interrupts a chunk, so a decode row waits for all T depths of
    it."""

    name: ClassVar[str] = "atomic"
    guesses: ClassVar[Literal["wavefront", "drafts", "never"]] = "drafts"
    repeats: ClassVar[bool] = True
    splits_prefill: ClassVar[bool] = False

    def select(self, view: View) -> Selection | None:
        return in_stage_order(drafts_first(view), self._prompt_batch)

    def _prompt_batch(self, view: View) -> Selection | None:
        ranges = oldest_chunks(view, view.limits.max_num_batched_tokens)
        return prompt_selection(ranges, comes_back=False)
