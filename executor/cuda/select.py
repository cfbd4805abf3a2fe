"""Puts the CUDA kernels into a set of operations where card, dtype and model allow it, and says which run.

A card that was never seen with this source is checked once, and its verdict is kept beside the machine code.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from executor.cuda import cache, nvrtc
from executor.cuda.attention import SOURCE, Attention
from executor.cuda.check import differing, differing_attention, differing_norms, differing_tall
from executor.cuda.driver import Module
from executor.cuda.norms import SOURCE as NORMS_SOURCE
from executor.cuda.norms import ResidualNorms
from executor.cuda.plan import SERVED_ROWS, plan_products
from executor.cuda.products import OPTIONS, Products, source_of
from executor.cuda.tall_attention import SOURCE as TALL_SOURCE
from executor.cuda.tall_attention import TALL_MARGIN, TILE_CLASSES, TallAttention
from executor.errors import KernelError
from executor.kernels.lang import triton_version
from executor.kernels.ops import Ops
from policies.core.errors import InputError
from policies.core.models.shape import BF16_BYTES, ModelShape

CAPABILITY = (9, 0)


def with_cuda(base: Ops, shape: ModelShape, device: torch.device, attention: str = "auto") -> Ops:
    """`base` with what few rows run replaced; as it is, but for the sentence in `kernels`, where the CUDA
    kernels cannot run or do not keep the bits.

    `attention` is `triton` for all of it by Triton, `cuda` for CUDA where a batch has few rows and in tall
    tiles, `auto` for the same as far as the bits allow. Raises `InputError` where it is
    to be `cuda` and cannot."""
    ops = _with_cuda(base, shape, device, attention)
    if attention == "cuda" and ops.tile_classes != TILE_CLASSES:
        raise InputError(f"attention: cuda cannot be had: {ops.kernels}")
    return ops


def _with_cuda(base: Ops, shape: ModelShape, device: torch.device, attention: str) -> Ops:
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
        tall = TallAttention.load(base.attention, _module(TALL_SOURCE, compiler))
        takes_tall = attention != "triton"
        few = Attention.load(tall if takes_tall else base.attention, _module(SOURCE, compiler))
        here = (*OPTIONS, compiler, torch.cuda.get_device_name(device), torch.__version__, triton_version())

        def verdict_on(sources: Sequence[str], differences: Callable[[], list[str]]) -> str:
            def check() -> bytes:
                found = ", ".join(differences()).encode()
                torch.cuda.empty_cache()
                return found

            return cache.cached(cache.key_of(*sources, *here), check).decode()

        verdict = verdict_on(
            (source_of(plans), SOURCE, NORMS_SOURCE),
            lambda: [
                *differing(products, plans, shape),
                *differing_attention(few, shape),
                *differing_norms(norms, shape),
            ],
        )
        of_tall = verdict_on((TALL_SOURCE,), lambda: differing_tall(tall, shape)) if takes_tall else ""
    except KernelError as error:
        return _without(base, str(error))
    if verdict:
        return _without(base, f"bits differ in {verdict}")
    rest = f"{base.kernels} for the rest"
    if of_tall:
        rest = f"{rest} (tall tiles too: bits differ in {of_tall})"
        few = dataclasses.replace(few, base=base.attention)
    ops = dataclasses.replace(
        base,
        linear=products.linear,
        linear_rope=products.linear_rope,
        linear_swiglu=products.linear_swiglu,
        residual_norms=norms,
        kernels=f"CUDA C++ (NVRTC {compiler}) up to {SERVED_ROWS} rows but for attention, {rest}",
    )
    if attention == "triton":
        return ops
    kernels = f"CUDA C++ (NVRTC {compiler}) up to {SERVED_ROWS} rows"
    if of_tall or not takes_tall:
        return dataclasses.replace(ops, attention=few, kernels=f"{kernels}, {rest}")
    return dataclasses.replace(
        ops,
        attention=few,
        tile_classes=TILE_CLASSES,
        tall_margin=TALL_MARGIN,
        kernels=f"{kernels} and for attention of ranges over 32 rows, {rest}",
    )


def _module(source: str, compiler: str) -> Module:
    key = cache.key_of(source, *OPTIONS, compiler)
    return Module(cache.cached(key, lambda: nvrtc.compile_cubin(source, OPTIONS)))


def _without(base: Ops, reason: str) -> Ops:
    return dataclasses.replace(base, kernels=f"{base.kernels} (no CUDA C++: {reason})")
