"""prefix_affinity: where a prompt's beginning has been before, as long as nobody has much less to do."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.core.bounds import LARGEST, Within
from policies.core.memory.prefixes import block_keys
from policies.core.seam.request import Request
from policies.routing.least_loaded import least_loaded
from policies.routing.router import Choose, Load, Router


@dataclass(frozen=True)
class PrefixAffinity(Router):
    """The replica that was sent the longest beginning of this prompt, in whole spans of content ids, among
    those with at most `max_lead` requests more than the least loaded one; of equal ones the least loaded.

    It remembers the last `memory` spans that it sent to each, as a replica's pool keeps the last it used.
    """

    name: ClassVar[str] = "prefix_affinity"
    max_lead: Annotated[int, Within(0, LARGEST)] = 4
    memory: Annotated[int, Within(1, LARGEST)] = 4096

    def chooser(self, num_replicas: int, seed: int) -> Choose:
        known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_replicas)]

        def choose(request: Request, loads: Sequence[Load]) -> int:
            keys = block_keys(request, request.content_tokens) if request.content_ids else []
            found = [_leading(keys, spans) for spans in known]
            best = least_loaded(request, loads)
            most = loads[best].requests + self.max_lead
            for at, load in enumerate(loads):
                if load.requests <= most and (found[at], -load.requests) > (
                    found[best],
                    -loads[best].requests,
                ):
                    best = at
            spans = known[best]
            for key in reversed(keys):  # the beginning is used last, and forgotten last
                spans[key] = None
                spans.move_to_end(key)
            while len(spans) > self.memory:
                spans.popitem(last=False)
            return best

        return choose


def _leading(keys: Sequence[bytes], known: OrderedDict[bytes, None]) -> int:
    """How many of the leading `keys` are known."""
    return next((at for at, key in enumerate(keys) if key not in known), len(keys))
