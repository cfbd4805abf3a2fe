"""Compiles CUDA C++ with the NVRTC library that torch brings. Knows no kernel and keeps nothing."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from executor.errors import KernelError

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")
"""Below a `nvidia` folder on the import path: where the packages that torch depends on put the library."""


def find_library() -> ctypes.CDLL:
    """The library, by its name where the loader knows it, otherwise from torch's packages. Raises
    `KernelError` when there is none."""
    places = [
        str(Path(folder) / "nvidia" / below / name)
        for name in NAMES
        for folder in sys.path
        for below in FOLDERS
        if (Path(folder) / "nvidia" / below / name).exists()
    ]
    for place in (*places, *NAMES):
        for builtins in sorted(Path(place).parent.glob("libnvrtc-builtins.so*")) if place in places else ():
            ctypes.CDLL(str(builtins))  # found by name from then on: the library does not look beside itself
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise KernelError(f"no NVRTC library: none of {', '.join(NAMES)} is installed beside torch")


def compile_cubin(source: str, options: tuple[str, ...]) -> bytes:
    """Machine code of `source`, which includes no header. Raises `KernelError` with the compiler's log."""
    library = find_library()
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None),
    )
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = library.nvrtcCompileProgram(program, len(options), arguments)
        if result:
            log = _text(library, program, "ProgramLog").decode(errors="replace").strip("\0\n ")
            raise KernelError(f"the CUDA kernels do not compile: {log or result}")
        return _text(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> str:
    """Of the library, as in `13.0`. Raises `KernelError` when there is none."""
    library = find_library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def _text(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw[: size.value]


def _check(library: Any, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelError(f"NVRTC: {os.fsdecode(library.nvrtcGetErrorString(result))}")
