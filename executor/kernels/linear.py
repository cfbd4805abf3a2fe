"""`out = x @ w.T`, so that a row's bits do not depend on the rows beside it.

On CUDA that is cuBLAS under the environment of `executor.environment`. On a CPU the bits of a product depend on its row count, so
every product there is made of tiles of exactly TILE_ROWS rows.
"""

import torch

TILE_ROWS = 16


def linear_cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [rows, in], weight [out, in], out [rows, out]; nothing is allocated."""
    torch.mm(x, weight.t(), out=out)


def linear_tiled(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Twin of `linear_cublas` in tiles of TILE_ROWS rows, the last one padded with zero rows."""
    rows = x.shape[0]
    whole = rows // TILE_ROWS * TILE_ROWS
    for start in range(0, whole, TILE_ROWS):
        torch.mm(x[start : start + TILE_ROWS], weight.t(), out=out[start : start + TILE_ROWS])
    if whole < rows:
        tail = x.new_zeros(TILE_ROWS, x.shape[1])
        tail[: rows - whole] = x[whole:]
        out[whole:] = torch.mm(tail, weight.t())[: rows - whole]
