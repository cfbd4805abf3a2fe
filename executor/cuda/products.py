"""The four products of a layer for few rows, by the kernels of `products.cu`, with what follows them: RoPE
and the K/V write, SwiGLU. Bits are those of cuBLAS without a workspace and the separate kernels
(`executor.kernels.linear`), which serve all other row counts, dtypes and weights.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from executor.cuda.driver import Module, TensorMap, tensor_map
from executor.cuda.plan import BLOCKS, LINE, MAX_ROWS, SERVED_ROWS, ProductPlan
from executor.kernels import linear

FOLDER = Path(__file__).parent
HEAD_DIM = 128
PLAIN = ("o", "down")
OPTIONS = ("--gpu-architecture=sm_90a", "-fmad=false", "--std=c++17")
"""Contraction is spelled out in the source: a compiler that chose would choose differently elsewhere."""


class RopeWrite(ctypes.Structure):
    """As in `products.cu`."""

    _fields_ = (
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("slot_offset", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
    )


def source_of(plans: Mapping[str, ProductPlan]) -> str:
    """The source of the four products at the sizes of `plans`."""
    defines = f"#define BLOCKS {BLOCKS}\n" + "".join(plan.defines for plan in plans.values())
    return defines + "".join((FOLDER / name).read_text() for name in ("common.cuh", "products.cu"))


class Products:
    """Operations like those of `executor.kernels.linear`, by name."""

    def __init__(self, plans: Mapping[str, ProductPlan], module: Module, max_rows: int = SERVED_ROWS) -> None:
        self.max_rows = max_rows
        self._plans = plans
        self._blocks = max(BLOCKS, torch.cuda.get_device_properties("cuda").multi_processor_count)
        self._maps: dict[tuple[str, int], TensorMap] = {}
        self._plain = {(plan.columns, plan.size_in): name for name, plan in plans.items() if name in PLAIN}
        self._kernels = {
            name: module.kernel(name, plan.shared_bytes(MAX_ROWS)) for name, plan in plans.items()
        }

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `linear_cublas`."""
        name = self._plain.get((weight.shape[0], weight.shape[1]))
        if name is None or not self._serves(x):
            linear.linear_cublas(x, weight, out)
        else:
            self._launch(name, x, weight, out)

    def linear_swiglu(
        self, x: torch.Tensor, gate_up: torch.Tensor, merged: torch.Tensor, out: torch.Tensor
    ) -> None:
        """As `executor.kernels.linear.linear_swiglu`."""
        if self._serves(x):
            self._launch("swiglu", x, gate_up, out)
        else:
            linear.linear_swiglu(x, gate_up, merged, out)

    def linear_rope(
        self, x: torch.Tensor, weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, depth_offset: int,
        qkv: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `executor.kernels.linear.linear_rope`."""
        if self._serves(x):
            write = _rope_write(weight, rope, positions, slots, k, v, depth_offset)
            self._launch("rope", x, weight, qkv, write)
        else:
            linear.linear_rope(x, weight, rope, positions, slots, k, v, depth_offset, qkv)

    def _serves(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= self.max_rows and x.dtype == torch.bfloat16

    def _launch(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor,
        rope: RopeWrite | None = None,
    ) -> None:  # fmt: skip
        plan, rows = self._plans[name], x.shape[0]
        arguments: tuple[Any, ...] = (
            self._map(plan, weight), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(rows), ctypes.c_int(out.shape[1]), rope or RopeWrite(),
        )  # fmt: skip
        self._kernels[name].launch(self._blocks, plan.threads, plan.shared_bytes(rows), arguments)

    def _map(self, plan: ProductPlan, weight: torch.Tensor) -> TensorMap:
        """Of a weight that stays where it is. A box is a line of a block's column tiles, or of one tile where
        those of a block lie in two heads."""
        key = plan.name, weight.data_ptr()
        if key not in self._maps:
            if plan.name == "rope":
                view, box = weight.view(-1, 2, HEAD_DIM // 2, plan.size_in), (1, 2, 4, LINE)
            elif plan.name == "swiglu":
                view, box = weight.view(2, -1, plan.size_in), (2, 4 * plan.warps, LINE)
            else:
                view, box = weight, (8 * plan.warps, LINE)
            self._maps[key] = tensor_map(view, box)
        return self._maps[key]


def _rope_write(
    weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor,
    slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, depth_offset: int,
) -> RopeWrite:  # fmt: skip
    _, num_kv_heads, block_size, head_dim = k.shape
    addresses = (tensor.data_ptr() for tensor in (*rope, positions, slots, k, v))
    num_heads = weight.shape[0] // head_dim - 2 * num_kv_heads
    return RopeWrite(*addresses, depth_offset * block_size, block_size, num_heads, num_kv_heads)
