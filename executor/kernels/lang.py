"""Triton when it is installed, and a stand-in that lets the modules of this folder be imported when it is not.

Without Triton the decorated functions are never called: `executor.kernels.ops` then offers only the torch twins.
"""

from typing import Any

try:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Language:
        constexpr = int

    tl = _Language()

    def jit(function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda decorated: decorated


def block_for(size: int) -> int:
    """The block that holds a row of `size` elements: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
