"""sjf: wcpb with shortest job first: a short prompt is let in before a long one, within bounds."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.core.bounds import Within
from policies.core.seam.batch import Selection
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request
from policies.core.seam.view import View
from policies.wcpb import Wavefront

WAVEFRONT = Wavefront()


@dataclass(frozen=True)
class ShortestFirst(Policy):
    """Forms batches as wcpb does. A request ranks as though it had come `ms_per_token` later for every token
    of its prompt; outputs do not count, nobody knows them.

    So one of 1,000 tokens is overtaken by those of 100 that come less than 900 x `ms_per_token` after it, and
    by nobody who comes 1,000 x `ms_per_token` after it or later. With 0 this is wcpb.
    """

    name: ClassVar[str] = "sjf"
    repeats: ClassVar[bool] = True
    is_wavefront: ClassVar[bool] = True

    ms_per_token: Annotated[float, Within(0, le=1e6)] = 1.0

    def select(self, view: View) -> Selection | None:
        return WAVEFRONT.select(view)

    def admission_rank(self, request: Request) -> int:
        return request.arrival_ns + round(self.ms_per_token * 1e6) * request.prompt_tokens
