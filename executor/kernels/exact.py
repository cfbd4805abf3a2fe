"""Products whose bits no BLAS decides, for the torch twins.

A BLAS sums in an order that follows the CPU, the number of threads, the shape and a row's place in it. Here
both sides are first rounded to whole multiples of a power of two, so few bits each that every product and
every partial sum is a whole number below 2^53: float64 holds it exactly, and any order gives the same result.
Rounding costs about what float32 does: for 64 terms 23 bits of the largest element stay, for 5632 still 20.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

EXACT_BITS = 53
"""Whole numbers up to 2 to this power are exact in float64."""
KEPT_ELEMENTS = 1 << 20
"""A weight of up to so many keeps its steps: a small model's weights come again in every batch."""
_kept = WeakTensorKeyDictionary()


def exact_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`exact_product` for a weight [n, k] that comes again: rounded once, and anew when it has changed."""
    if weight.numel() > KEPT_ELEMENTS:
        return exact_product(x, weight)
    version, whole_weight, step_weight = _kept.get(weight, (None, None, None))
    if version != weight._version:
        whole_weight, step_weight = to_steps(weight, factor_bits(weight.shape[-1]))
        _kept[weight] = weight._version, whole_weight, step_weight
    return _times_steps(x, whole_weight, step_weight)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b.T` for a [.., m, k] and b [.., n, k]: [.., m, n] float64. An element depends on its own row of
    `a` and of `b` only."""
    return _times_steps(a, *to_steps(b, factor_bits(b.shape[-1])))


def _times_steps(a: torch.Tensor, whole_b: torch.Tensor, step_b: torch.Tensor) -> torch.Tensor:
    whole_a, step_a = to_steps(a, factor_bits(a.shape[-1]))
    return whole_a @ whole_b.mT * (step_a * step_b.mT)


def exact_mixture(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`weights @ values` for weights [.., m, k] and values [.., k, n]: [.., m, n] float64. A row of `values`
    whose weight is 0 changes nothing, so its step goes into the weights instead of being shared."""
    bits = factor_bits(values.shape[-2])
    whole_values, step_values = to_steps(values, bits)
    whole_weights, step_weights = to_steps(weights * step_values.mT, bits)
    return whole_weights @ whole_values * step_weights


def factor_bits(terms: int) -> int:
    """Bits of either factor such that `terms` products add up exactly."""
    return (EXACT_BITS - (terms - 1).bit_length()) // 2


def to_steps(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., k] as whole numbers of at most 2^bits, float64, and the power of two [.., 1] that they count; a
    row's largest element decides."""
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True).double()).exponent  # largest < 2^exponent
    step = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - bits)
    return torch.round(x / step), step
