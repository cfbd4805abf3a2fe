"""One set of operations per device: Triton and cuBLAS on CUDA, the torch twins on a CPU. The model is written
against this."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from executor.kernels import attention as attn
from executor.kernels import (
    drop_left,
    embed_rows,
    exit_copy,
    gate,
    gather_rows,
    linear,
    residual_norms,
    rms_norm,
    scatter_rows,
)
from executor.kernels.worklist import CUT_MARGIN
from policies.core.models.shape import BF16_BYTES, ModelShape

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Ops:
    """Arguments and effects of each are those of the launcher named like it in its own file.

    `tile_classes` are the query-tile heights that `attention` accepts, `attention_slots` the work units that
    run at once and `tall_margin` where tall tiles are cut; all three go to the packer.
    """

    linear: Op
    linear_rope: Op
    linear_swiglu: Op
    rms_norm: Op
    residual_norms: Op
    attention: Op
    gate: Op
    embed_rows: Op
    gather_rows: Op
    scatter_rows: Op
    exit_copy: Op
    drop_left: Op
    tile_classes: tuple[int, ...]
    attention_slots: int
    kernels: str
    tall_margin: float = CUT_MARGIN


def torch_ops() -> Ops:
    """The twins: any device; what a CPU runs. Their products are exact, so bits never change."""
    return Ops(
        linear=linear.linear_torch,
        linear_rope=linear.linear_rope_torch,
        linear_swiglu=linear.linear_swiglu_torch,
        rms_norm=rms_norm.rms_norm_torch,
        residual_norms=residual_norms.residual_norms_torch,
        attention=attn.attention_torch,
        gate=gate.gate_torch,
        embed_rows=embed_rows.embed_rows_torch,
        gather_rows=gather_rows.gather_rows_torch,
        scatter_rows=scatter_rows.scatter_rows_torch,
        exit_copy=exit_copy.exit_copy_torch,
        drop_left=drop_left.drop_left_torch,
        tile_classes=(16,),
        attention_slots=1,
        kernels="torch",
    )


def triton_ops(workspace: attn.Workspace, num_sms: int, dtype: torch.dtype) -> Ops:
    """The kernels for activations of `dtype` (bfloat16 or float32), attention's partial results in
    `workspace`, grids for `num_sms` multiprocessors."""
    return Ops(
        linear=linear.linear_cublas,
        linear_rope=linear.linear_rope,
        linear_swiglu=linear.linear_swiglu,
        rms_norm=rms_norm.rms_norm_triton,
        residual_norms=residual_norms.residual_norms_triton,
        attention=attn.AttentionLauncher(workspace, num_sms),
        gate=gate.gate_triton,
        embed_rows=embed_rows.embed_rows_triton,
        gather_rows=gather_rows.gather_rows_triton,
        scatter_rows=scatter_rows.scatter_rows_triton,
        exit_copy=exit_copy.exit_copy_triton,
        drop_left=drop_left.drop_left_triton,
        tile_classes=attn.TILE_CLASSES[dtype],
        attention_slots=2 * num_sms,
        kernels="Triton and cuBLAS",
    )


def select_ops(shape: ModelShape, max_partials: int, device: torch.device) -> Ops:
    """The operations for `device`; on CUDA this allocates the attention workspace. The dtype is that of
    `shape.dtype_bytes`."""
    if device.type == "cpu":
        return torch_ops()
    dtype = torch.bfloat16 if shape.dtype_bytes == BF16_BYTES else torch.float32
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return triton_ops(attn.Workspace.allocate(shape, max_partials, device), num_sms, dtype)
