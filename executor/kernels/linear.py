"""`x @ w.T` and what follows it, so that a row's bits do not depend on the rows beside it.

On CUDA the qkv and gate+up products of few rows go to the fused kernels of `executor.kernels.product`, all
else to cuBLAS under the environment of `executor.environment`, and what follows to a kernel of its own; both
give the same bits. The twins' products are exact (`executor.kernels.exact`).
"""

import torch

from executor.kernels.exact import exact_linear
from executor.kernels.product import ProductConfig, rope_product_triton, swiglu_product_triton
from executor.kernels.rope_write import rope_write_torch, rope_write_triton
from executor.kernels.swiglu import swiglu_torch, swiglu_triton

FUSED = ProductConfig(block_m=16, block_n=16, block_k=256, num_warps=4, num_stages=4)
CONFIGS: dict[str, dict[int, ProductConfig | None]] = {"rope": {16: FUSED}, "swiglu": {4: None, 16: FUSED}}
"""Of bfloat16 on an H200, by the largest row count that each serves; None and above: cuBLAS. By
`executor.lab.tune layer`."""


def config_for(kind: str, x: torch.Tensor, columns: int) -> ProductConfig | None:
    """The fused kernel's configuration, or None where cuBLAS is to run: by the table, in other dtypes, and
    where its tiles do not divide `columns` or the inner size."""
    rows, size_in = x.shape
    config = next((config for limit, config in CONFIGS[kind].items() if rows <= limit), None)
    if config is None or x.dtype != torch.bfloat16 or size_in % config.block_k or columns % config.block_n:
        return None
    return config


def linear_cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [rows, in], weight [out, in], out [rows, out]; nothing is allocated."""
    torch.mm(x, weight.t(), out=out)


def linear_swiglu(x: torch.Tensor, gate_up: torch.Tensor, merged: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(x @ gate.T) * (x @ up.T): x [rows, in], gate_up [2 * intermediate, in], out [rows,
    intermediate].

    `merged` [rows, 2 * intermediate] is scratch: it may or may not be written.
    """
    config = config_for("swiglu", x, out.shape[1])
    if config is None:
        linear_cublas(x, gate_up, merged)
        swiglu_triton(merged, out)
    else:
        swiglu_product_triton(x, gate_up, out, config)


def linear_rope(
    x: torch.Tensor, weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor,
    slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, depth_offset: int, qkv: torch.Tensor,
) -> None:  # fmt: skip
    """The rotated q of `x @ weight.T` to its place in `qkv`, rotated k and v to the pools; of `qkv` only q is
    defined afterwards.

    x [rows, in], weight and qkv [.., (heads + 2 * kv_heads) * head_dim]; the rest as for `rope_write_triton`.
    """
    config = config_for("rope", x, k.shape[3] // 2)
    if config is None:
        linear_cublas(x, weight, qkv)
        rope_write_triton(qkv, rope, positions, slots, k, v, depth_offset)
    else:
        rope_product_triton(x, weight, rope, positions, slots, k, v, depth_offset, qkv, config)


def linear_torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Twin of `linear_cublas`."""
    out.copy_(exact_linear(x, weight))


def linear_swiglu_torch(
    x: torch.Tensor, gate_up: torch.Tensor, merged: torch.Tensor, out: torch.Tensor
) -> None:
    """Twin of `linear_swiglu`."""
    linear_torch(x, gate_up, merged)
    swiglu_torch(merged, out)


def linear_rope_torch(
    x: torch.Tensor, weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor,
    slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, depth_offset: int, qkv: torch.Tensor,
) -> None:  # fmt: skip
    """Twin of `linear_rope`."""
    linear_torch(x, weight, qkv)
    rope_write_torch(qkv, rope, positions, slots, k, v, depth_offset)
