"""Puts the CUDA kernels into a set of operations where card, dtype and model allow it, and says which run.

A card that was never seen with this source is checked once, and its verdict is kept beside the machine code.
"""

import dataclasses

import torch

from executor.cuda import cache, nvrtc
from executor.cuda.attention import SOURCE, Attention
from executor.cuda.check import differing, differing_attention, differing_norms
from executor.cuda.driver import Module
from executor.cuda.norms import SOURCE as NORMS_SOURCE
from executor.cuda.norms import ResidualNorms
from executor.cuda.plan import SERVED_ROWS, plan_products
from executor.cuda.products import OPTIONS, Products, source_of
from executor.errors import KernelError
from executor.kernels.lang import triton_version
from executor.kernels.ops import Ops
from policies.core.models.shape import BF16_BYTES, ModelShape

CAPABILITY = (9, 0)


def with_few_rows(base: Ops, shape: ModelShape, device: torch.device) -> Ops:
    """`base` with what few rows run replaced; as it is, but for the sentence in `kernels`, where the CUDA
    kernels cannot run or do not keep the bits."""
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        return _without(base, f"the card has compute capability {found[0]}.{found[1]}, not 9.0")
    plans = plan_products(shape)
    if plans is None or shape.dtype_bytes != BF16_BYTES:
        return _without(base, f"not made for {shape.name} in {8 * shape.dtype_bytes} bits")
    try:
        compiler = nvrtc.version()
        norms = ResidualNorms(_module(NORMS_SOURCE, compiler))
        products = Products(plans, _module(source_of(plans), compiler))
        attention = Attention.load(base.attention, _module(SOURCE, compiler))
        key = cache.key_of(
            source_of(plans), SOURCE, NORMS_SOURCE, *OPTIONS, compiler, torch.cuda.get_device_name(device),
            torch.__version__, triton_version(),
        )  # fmt: skip

        def check() -> bytes:
            found = differing(products, plans, shape)
            found += differing_attention(attention, shape) + differing_norms(norms, shape)
            torch.cuda.empty_cache()
            return ", ".join(found).encode()

        verdict = cache.cached(key, check)
    except KernelError as error:
        return _without(base, str(error))
    if verdict:
        return _without(base, f"bits differ in {verdict.decode()}")
    return dataclasses.replace(
        base,
        linear=products.linear,
        linear_rope=products.linear_rope,
        linear_swiglu=products.linear_swiglu,
        attention=attention,
        residual_norms=norms,
        kernels=f"CUDA C++ (NVRTC {compiler}) up to {SERVED_ROWS} rows, {base.kernels} for the rest",
    )


def _module(source: str, compiler: str) -> Module:
    key = cache.key_of(source, *OPTIONS, compiler)
    return Module(cache.cached(key, lambda: nvrtc.compile_cubin(source, OPTIONS)))


def _without(base: Ops, reason: str) -> Ops:
    return dataclasses.replace(base, kernels=f"{base.kernels} (no CUDA C++: {reason})")
