"""The residual norms of few rows by the kernel of `norms.cu`: the bits of `executor.kernels.residual_norms`,
which serves the rest. A kernel of our own because the next product's blocks can only come after it, and a
kernel of Triton's asks for another division of a multiprocessor's memory."""

import ctypes
from pathlib import Path

import torch

from executor.cuda.driver import Kernel, Module
from executor.cuda.plan import SERVED_ROWS
from executor.kernels.residual_norms import residual_norms_triton

FOLDER = Path(__file__).parent
SIZE, THREADS = 2048, 128
SOURCE = "".join((FOLDER / name).read_text() for name in ("common.cuh", "norms.cu"))


class ResidualNorms:
    """Called like `residual_norms_triton`."""

    def __init__(self, module: Module) -> None:
        self._kernel: Kernel = module.kernel("residual_norms", 0)

    def __call__(
        self, x: torch.Tensor, h: torch.Tensor, w_post: torch.Tensor, w_next: torch.Tensor, eps: float,
        h_out: torch.Tensor, y: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `residual_norms_triton`."""
        rows, size = x.shape
        if size != SIZE or rows > SERVED_ROWS or x.dtype != torch.bfloat16:
            residual_norms_triton(x, h, w_post, w_next, eps, h_out, y)
            return
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, h, w_post, w_next, h_out, y))
        self._kernel.launch(rows, THREADS, 0, (*pointers, ctypes.c_float(eps)))
