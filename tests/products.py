"""What matrix products are made of in tests, so that no expectation rests on one CPU's BLAS.

Triton's interpreter multiplies with numpy, whose bits follow the CPU and a row's place in its tile:
`in_order` replaces that product by one in the order of a tensor core, the same for every tile.
`ScrambledProducts` is the opposite, a BLAS as bad as one may be: every row of every product of torch is
summed in an order of its own, which follows its place and the number of rows. What must be the same bits has
to be so under it too.
"""

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a @ b` for a [m, k] and b [k, n], each element summed in order of k: elementwise operations alone."""
    terms = np.multiply(a.T[:, :, None], b[:, None, :], order="C")  # [k, m, n]
    return np.add.reduce(terms, axis=0)  # over the slowest axis numpy adds one slice after the other


def order_interpreted_products() -> None:
    """Let `tl.dot` of Triton's interpreter multiply by `in_order`."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, max_num_imprecise_acc: Any) -> Any:
        return TensorHandle(in_order(a.data, b.data).astype(d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


class ScrambledProducts(TorchDispatchMode):
    """While entered, torch's products sum the terms of row i of n from an offset that i and n decide, in a
    direction that they decide too. `count` says how many products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket
        if name not in (aten.mm, aten.bmm, aten.addmm, aten.mv, aten.dot, aten.baddbmm, aten.addmv):
            return function(*args, **(kwargs or {}))
        self.count += 1
        assert name in (aten.mm, aten.bmm, aten.mv), f"{name}: not scrambled, so nothing is shown"
        a, b = args
        result = scrambled(a, b[:, None])[:, 0] if name is aten.mv else scrambled(a, b)
        out = (kwargs or {}).get("out")
        return result if out is None else out.copy_(result)


def scrambled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` for a [.., m, k] and b [.., k, n], every row summed in its own order."""
    rows, terms = a.shape[-2:]
    place = torch.arange(rows)
    order = torch.arange(terms)[None] * torch.where(place % 2 == 0, 1, -1)[:, None]
    order = (order + (place * 7 + rows * 3)[:, None]) % terms  # [m, k]
    terms = a.gather(-1, order.expand(a.shape))[..., None] * b[..., order, :]  # [.., m, k, n]
    return terms.sum(-2)
