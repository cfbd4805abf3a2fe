"""`x @ w.T` and what follows it, so that a row's bits do not depend on the rows beside it.

On CUDA few rows go to the fused kernels of `executor.kernels.product`, more to cuBLAS under the environment of `executor.environment`
and then to a kernel of its own; both give the same bits. On a CPU the bits of a product depend on its row count, so every product
there is made of tiles of exactly TILE_ROWS rows.
"""

import torch

from executor.kernels.product import ProductConfig, linear_triton, rope_product_triton, swiglu_product_triton
from executor.kernels.rope_write import rope_write_torch, rope_write_triton
from executor.kernels.swiglu import swiglu_torch, swiglu_triton

TILE_ROWS = 16
DEEP = 4096
"""Inner sizes above this have configurations of their own."""

# fmt: off
CONFIGS: dict[str, dict[int, ProductConfig]] = {
    "plain": {
        16: ProductConfig(16, 16, 256, 4, 4), 32: ProductConfig(32, 16, 256, 4, 4), 64: ProductConfig(64, 16, 128, 4, 4),
    },
    "plain, deep": {
        16: ProductConfig(16, 16, 256, 4, 4), 32: ProductConfig(32, 16, 256, 4, 4), 64: ProductConfig(64, 16, 128, 4, 4),
    },
    "rope": {
        16: ProductConfig(16, 32, 128, 4, 5), 32: ProductConfig(32, 32, 128, 4, 5), 64: ProductConfig(64, 32, 128, 4, 4),
    },
    "swiglu": {
        16: ProductConfig(16, 32, 128, 4, 5), 32: ProductConfig(32, 32, 128, 4, 5), 64: ProductConfig(64, 32, 128, 4, 4),
    },
}
# fmt: on
"""Of bfloat16 on an H200, by the largest row count that each serves; found by `python -m executor.tune`."""


def config_for(kind: str, x: torch.Tensor, weight: torch.Tensor, pair: int = 1) -> ProductConfig | None:
    """The fused kernel's configuration, or None where cuBLAS is to run: many rows, another dtype, sizes that tiles do not divide.

    A column tile holds `BLOCK_N / pair` neighbouring columns, which must divide what they are cut from.
    """
    rows, size_in = x.shape
    if x.dtype != torch.bfloat16:
        return None
    table = CONFIGS[f"{kind}, deep" if size_in > DEEP and kind == "plain" else kind]
    config = next((config for limit, config in table.items() if rows <= limit), None)
    if config is None or size_in % config.block_k or weight.shape[0] % config.block_n or config.block_n % pair:
        return None
    return config


def linear_cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [rows, in], weight [out, in], out [rows, out]; nothing is allocated."""
    torch.mm(x, weight.t(), out=out)


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [rows, in], weight [out, in], out [rows, out], contiguous."""
    config = config_for("plain", x, weight)
    if config is None:
        linear_cublas(x, weight, out)
    else:
        linear_triton(x, weight, out, config)


def linear_swiglu(x: torch.Tensor, gate_up: torch.Tensor, merged: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(x @ gate.T) * (x @ up.T): x [rows, in], gate_up [2 * intermediate, in], out [rows, intermediate].

    `merged` [rows, 2 * intermediate] is scratch: it may or may not be written.
    """
    config = config_for("swiglu", x, gate_up, pair=2)
    if config is None:
        linear_cublas(x, gate_up, merged)
        swiglu_triton(merged, out)
    else:
        swiglu_product_triton(x, gate_up, out, config)


def linear_rope(
    x: torch.Tensor, weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, slots: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, depth_offset: int, qkv: torch.Tensor,
) -> None:  # fmt: skip
    """The rotated q of `x @ weight.T` to its place in `qkv`, rotated k and v to the pools; of `qkv` only q is defined afterwards.

    x [rows, in], weight and qkv [.., (heads + 2 * kv_heads) * head_dim]; the rest as for `rope_write_triton`.
    """
    config = config_for("rope", x, weight, pair=2)
    if config is None or k.shape[3] // 2 % (config.block_n // 2):
        linear_cublas(x, weight, qkv)
        rope_write_triton(qkv, rope, positions, slots, k, v, depth_offset)
    else:
        rope_product_triton(x, weight, rope, positions, slots, k, v, depth_offset, qkv, config)


def linear_tiled(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Twin of `linear` in tiles of TILE_ROWS rows, the last one padded with zero rows."""
    rows = x.shape[0]
    whole = rows // TILE_ROWS * TILE_ROWS
    for start in range(0, whole, TILE_ROWS):
        torch.mm(x[start : start + TILE_ROWS], weight.t(), out=out[start : start + TILE_ROWS])
    if whole < rows:
        tail = x.new_zeros(TILE_ROWS, x.shape[1])
        tail[: rows - whole] = x[whole:]
        out[whole:] = torch.mm(tail, weight.t())[: rows - whole]


def linear_swiglu_tiled(x: torch.Tensor, gate_up: torch.Tensor, merged: torch.Tensor, out: torch.Tensor) -> None:
    """Twin of `linear_swiglu`."""
    linear_tiled(x, gate_up, merged)
    swiglu_torch(merged, out)


def linear_rope_tiled(
    x: torch.Tensor, weight: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, slots: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, depth_offset: int, qkv: torch.Tensor,
) -> None:  # fmt: skip
    """Twin of `linear_rope`."""
    linear_tiled(x, weight, qkv)
    rope_write_torch(qkv, rope, positions, slots, k, v, depth_offset)
