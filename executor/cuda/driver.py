"""Loads compiled kernels and launches them on torch's current stream, so that a CUDA graph captures them.

Launches carry the attribute that lets a kernel start while the one before it runs (`executor.kernels.lang`
says what each must do); torch's own launcher knows no attributes, hence the driver's interface itself.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from executor.errors import KernelError

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
PREFERRED_SHARED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent. All of a multiprocessor's memory that can
be shared is to be: blocks of two kernels run beside each other only where its division need not change."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""
BFLOAT16, SWIZZLES, L2_256B = 9, {128: 3, 64: 2}, 3
"""CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, _SWIZZLE_128B and _64B, _L2_PROMOTION_L2_256B"""
CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"""


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int * 16),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """One function of a loaded module; call `launch`."""

    handle: ctypes.c_void_p
    name: str

    def launch(
        self, blocks: int, threads: int, shared_bytes: int, arguments: tuple[Any, ...], cluster: int = 1
    ) -> None:
        """Enqueue on the current stream, overlapping with the kernel before. `arguments` are ctypes values,
        which the driver copies. Raises `KernelError`."""
        config = _configure(blocks, threads, shared_bytes, cluster)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        _check(_cuda().cuLaunchKernelEx(ctypes.byref(config), self.handle, pointers, None), self.name)

    def max_clusters(self, threads: int, shared_bytes: int, cluster: int) -> int:
        """How many clusters of `cluster` blocks the idle card runs at once. Raises `KernelError`."""
        found = ctypes.c_int()
        config = _configure(cluster, threads, shared_bytes, cluster)
        _check(
            _cuda().cuOccupancyMaxActiveClusters(ctypes.byref(found), self.handle, ctypes.byref(config)),
            self.name,
        )
        return found.value


def _configure(blocks: int, threads: int, shared_bytes: int, cluster: int) -> _Config:
    attributes = (_Attribute * 2)()
    attributes[0].id, attributes[0].value[0] = PROGRAMMATIC_STREAM_SERIALIZATION, 1
    attributes[1].id, attributes[1].value[0:3] = CLUSTER_DIMENSION, (cluster, 1, 1)
    return _Config(
        (blocks, 1, 1), (threads, 1, 1), shared_bytes, torch.cuda.current_stream().cuda_stream, attributes,
        1 if cluster == 1 else 2,
    )  # fmt: skip


class Module:
    """Machine code loaded into torch's context of the current device; stays loaded."""

    def __init__(self, cubin: bytes) -> None:
        torch.cuda.current_stream().synchronize()  # torch's context exists and is current
        self._handle = ctypes.c_void_p()
        _check(_cuda().cuModuleLoadData(ctypes.byref(self._handle), cubin), "loading the CUDA kernels")

    def kernel(self, name: str, shared_bytes: int) -> Kernel:
        """The function `name`, allowed up to `shared_bytes` of shared memory. Raises `KernelError`."""
        handle = ctypes.c_void_p()
        _check(_cuda().cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode()), name)
        _check(_cuda().cuFuncSetAttribute(handle, MAX_DYNAMIC_SHARED, shared_bytes), name)
        _check(_cuda().cuFuncSetAttribute(handle, PREFERRED_SHARED_CARVEOUT, 100), name)
        return Kernel(handle, name)


class TensorMap(ctypes.Structure):
    """How the copy engine finds boxes of a tensor: `CUtensorMap`, for a parameter `__grid_constant__`."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorMap:
    """Boxes of `box` elements (outermost first, the innermost 128 or 64 bytes wide) of a bfloat16 tensor of
    as many dimensions. In shared memory a box lies line after line, 16-byte chunks permuted within 128 bytes
    or 64."""
    dims = len(box)
    result = TensorMap()
    buffer = (ctypes.c_uint8 * 192)()
    aligned = -(-ctypes.addressof(buffer) // 64) * 64
    sizes = (ctypes.c_uint64 * dims)(*reversed(tensor.shape))
    strides = (ctypes.c_uint64 * (dims - 1))(*(2 * stride for stride in reversed(tensor.stride()[:-1])))
    _check(
        _cuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned), BFLOAT16, dims, ctypes.c_void_p(tensor.data_ptr()), sizes, strides,
            (ctypes.c_uint32 * dims)(*reversed(box)), (ctypes.c_uint32 * dims)(*([1] * dims)), 0,
            SWIZZLES[2 * box[-1]], L2_256B, 0,
        ),
        "describing a weight to the copy engine",
    )  # fmt: skip
    ctypes.memmove(ctypes.addressof(result), aligned, 128)
    return result


def _cuda() -> Any:
    global _library
    if _library is None:
        _library = ctypes.CDLL("libcuda.so.1")
    return _library


_library: Any = None


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(result, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {result}"
        raise KernelError(f"{what}: {reason}")
