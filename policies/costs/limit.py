"""The physical limit of a batch: the time below which no implementation can run it on a given device.

Bytes over bandwidth or FLOPs over peak, whichever is larger: linear layers, attention, LM head, embedding and
exit copies in turn. Shared by the simulator (which predicts) and the executor (which measures), so that
`limit_fraction` means the same thing in both.
"""

from dataclasses import dataclass
from typing import NamedTuple

from policies.core.models.shape import ModelShape
from policies.core.seam.batch import Stage, Work


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Ceilings of one device, as data: bytes per second, dense FLOPs per second, bytes of memory, and where
    they come from.

    `host_bandwidth_bytes_per_s` is between device and host memory, in one direction at a time.
    """

    name: str
    bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    memory_bytes: int
    source: str
    host_bandwidth_bytes_per_s: float = 25e9

    def kv_blocks(self, model: ModelShape, block_size: int, memory_fraction: float = 0.9) -> int:
        """KV blocks (one depth plane each) that fit beside the weights in `memory_fraction` of the memory."""
        block_bytes = block_size * model.kv_bytes_per_token_and_depth
        return max(0, int(self.memory_bytes * memory_fraction - model.total_weight_bytes) // block_bytes)

    def transfer_ns(self, num_bytes: int) -> int:
        """Time to move `num_bytes` between device and host memory. 768 KiB at 25 GB/s: 31,457 ns."""
        return int(num_bytes * 1e9 / self.host_bandwidth_bytes_per_s)


class Parts(NamedTuple):
    """Nanoseconds of one batch by component, all of its invocations together."""

    embed: float
    linear: float
    attention: float
    lm_head: float
    copies: float = 0.0


class Roofline:
    """Limits of batches of one model on one device.

    A decode batch of 8 rows over 1,024 tokens of context each on an H200 (4.22 TB/s): 2.466 GB of weights
    take 0.584 ms and 8 x 1,024 x 196,608 B of KV take 0.382 ms, so 0.97 ms.
    """

    def __init__(self, model: ModelShape, device: DeviceFacts) -> None:
        self.model = model
        self.device = device
        self._ns_per_byte = 1e9 / device.bandwidth_bytes_per_s
        self._ns_per_flop = 1e9 / device.peak_flops_per_s
        self._weights_ns = model.recurrent_weight_bytes * self._ns_per_byte
        self._row_ns = model.linear_flops_per_row * self._ns_per_flop
        self._kv_token_ns = model.kv_bytes_per_token_and_depth * self._ns_per_byte
        self._lm_head_ns = model.lm_head_bytes * self._ns_per_byte
        self._lm_head_row_flops = model.lm_head_flops_per_row
        self._embedding_bytes = model.hidden_bytes_per_row
        self._pair_ns = model.attention_flops_per_pair * self._ns_per_flop
        self.decode_token_ns = max(self._kv_token_ns, self._pair_ns)
        """Attention of decode rows, which read each token for one pair, by token read."""

    def linear_ns(self, rows: int) -> float:
        """Linear layers of one invocation: all weights once, or the arithmetic of `rows` rows."""
        return max(self._weights_ns, rows * self._row_ns)

    def attention_ns(self, kv_tokens: int, pairs: int) -> float:
        """Attention of one invocation: each segment's K/V once, or the arithmetic of its (query, key)
        pairs."""
        return max(kv_tokens * self._kv_token_ns, pairs * self._pair_ns)

    def lm_head_ns(self, rows: int) -> float:
        return max(self._lm_head_ns, rows * self._lm_head_row_flops * self._ns_per_flop)

    def embed_ns(self, rows: int) -> float:
        """Read `rows` embedding rows and write them once."""
        return 2 * rows * self._embedding_bytes * self._ns_per_byte

    def copies_ns(self, work: Work) -> float:
        """Exit copies of a CODA batch: a token's K/V is read once and written to every plane that it
        skipped."""
        num_loops = self.model.num_loops
        return sum([num_loops - depth + 1 for depth in work.exit_depths]) * self._kv_token_ns

    def limit_ns(self, work: Work) -> int:
        """The limit of `work`, all components together."""
        return int(sum(self.parts(work)))

    def parts(self, work: Work) -> Parts:
        """The limit of `work` by component; its sum is the batch's limit."""
        if work.stage is Stage.CODA:
            return Parts(0.0, 0.0, 0.0, self.lm_head_ns(work.rows), self.copies_ns(work))
        if work.loop_count == 0:
            return Parts(self.embed_ns(work.rows), 0.0, 0.0, 0.0)
        return self.recurrent_parts(work.loop_count, work.rows, *work.attention_work())

    def recurrent_parts(self, loops: int, rows: int, kv_tokens: int, pairs: int) -> Parts:
        return Parts(0.0, loops * self.linear_ns(rows), loops * self.attention_ns(kv_tokens, pairs), 0.0)
