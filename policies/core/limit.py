"""The physical limit of a batch: the time below which no implementation can run it on a given device.

Bytes over bandwidth and FLOPs over peak, whichever is larger, for the linear layers, attention and the LM head in turn. Shared by
the simulator (which predicts) and the executor (which measures), so that `limit_fraction` means the same thing in both.
"""

from dataclasses import dataclass

from policies.core.batch import ExecutionBatch, Stage
from policies.core.model import ModelShape


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Ceilings of one device, as data: bytes per second, dense FLOPs per second, bytes of memory, and where they come from."""

    name: str
    bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    memory_bytes: int
    source: str


def batch_limit_ns(batch: ExecutionBatch, model: ModelShape, device: DeviceFacts) -> float:
    """Nanoseconds below which `batch` cannot run on `device`.

    A decode batch of 8 rows over 1,024 tokens of context on an H200 (4.22 TB/s): 2.466 GB of weights take 0.584 ms and
    8 x 1,024 x 196,608 B of KV take 0.382 ms, so 0.97 ms.
    """
    bandwidth, peak = device.bandwidth_bytes_per_s, device.peak_flops_per_s
    if batch.stage is Stage.CODA:
        return 1e9 * max(model.lm_head_bytes / bandwidth, batch.rows * model.lm_head_flops_per_row / peak)
    if batch.loop_count == 0:
        return 1e9 * 2 * batch.rows * model.hidden_bytes_per_row / bandwidth
    linear = max(model.recurrent_weight_bytes / bandwidth, batch.rows * model.linear_flops_per_row / peak)
    kv_tokens, pairs = batch.attention_work()
    attention = max(kv_tokens * model.kv_bytes_per_token_and_depth / bandwidth, pairs * model.attention_flops_per_pair / peak)
    return 1e9 * batch.loop_count * (linear + attention)
