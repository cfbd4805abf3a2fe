"""Prefixes that requests share: which published groups a prompt can begin with, and which of its own groups
are published when.

Knows what prompts say by their content ids alone (`Request.content_ids`); the groups are
`policies.core.memory.kv`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from policies.core.memory.kv import BlockLedger
from policies.core.progress.state import RequestState
from policies.core.seam.request import Request

KEY_BYTES = 16


def block_keys(request: Request, block_size: int) -> list[bytes]:
    """One key for each leading KV block of the prompt that content ids cover whole; each hashes the one
    before it too.

    Ids for 512 tokens each, blocks of 16: block 40 is tokens 128 to 144 of what the second id stands for, and
    its key is the hash of that and of block 39's key. A block that reaches into two ids hashes both parts.
    """
    covered = min(request.prompt_tokens, len(request.content_ids) * request.content_tokens)
    keys: list[bytes] = []
    key = b""
    for start in range(0, covered - block_size + 1, block_size):
        digest = blake2b(key, digest_size=KEY_BYTES)
        at, end = start, start + block_size
        while at < end:
            index, offset = divmod(at, request.content_tokens)
            until = min(end, (index + 1) * request.content_tokens)
            digest.update(b"%d:%d:%d;" % (request.content_ids[index], offset, until - at))
            at = until
        key = digest.digest()
        keys.append(key)
    return keys


@dataclass(slots=True)
class PrefixTotals:
    """Sums over first admissions: groups that prompts fill whole, and what of them was there already. What a
    request that comes back finds, most of it its own, is counted apart."""

    prompt_groups: int = 0
    reused_groups: int = 0
    reused_tokens: int = 0
    resumed_groups: int = 0


class Prefixes:
    """The prefix cache of one run over `blocks`; with `is_enabled` False nothing is ever shared."""

    def __init__(self, blocks: BlockLedger, is_enabled: bool) -> None:
        self.totals = PrefixTotals()
        self._blocks = blocks
        self._is_enabled = is_enabled
        self._keys: dict[int, list[bytes]] = {}

    def reusable(self, request: Request, prompt_tokens: int) -> Sequence[int]:
        """Published groups with the beginning of the `prompt_tokens` tokens that `request` is to compute, all
        but the last one."""
        if not self._is_enabled or not request.content_ids:
            return ()
        keys = self._keys.get(request.request_id)
        if keys is None:
            keys = self._keys[request.request_id] = block_keys(request, self._blocks.block_size)
        return self._blocks.published(keys[: (prompt_tokens - 1) // self._blocks.block_size])

    def started(self, state: RequestState, num_reused: int, is_resumed: bool) -> None:
        """`state` is let in to compute its prompt, but for what `num_reused` published groups hold."""
        state.published(num_reused)
        totals, block_size = self.totals, self._blocks.block_size
        if is_resumed:
            totals.resumed_groups += num_reused
            return
        totals.prompt_groups += state.request.prompt_tokens // block_size
        totals.reused_groups += num_reused
        totals.reused_tokens += num_reused * block_size

    def publish(self, state: RequestState, end: int) -> bool:
        """The prompt of `state` has been through all depths up to `end`, and that is collected: share its
        complete chunks.

        Returns whether there is anything new to reuse. Chunk 32, block 16, `end` 50: two groups, those of the
        first chunk.
        """
        complete = state.prompt.completed(end)
        keys = self._keys.get(state.request_id, ())
        has_new = False
        for index in range(state.num_published, min(len(keys), complete // self._blocks.block_size)):
            has_new |= self._blocks.publish(state.block_groups[index], keys[index])
            state.published(index + 1)
        return has_new

    def forget(self, request_id: int) -> None:
        """A request has ended; what it published stays."""
        self._keys.pop(request_id, None)
