"""Triton when it is installed, and a stand-in that lets the modules of this folder be imported when it is not.

Without Triton the decorated functions are never called: only the torch twins run.
"""

from typing import Any

tl: Any
jit: Any

try:
    import triton
    import triton.language

    tl, jit = triton.language, triton.jit
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Language:
        constexpr = int

    def _undecorated(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else _undecorated

    tl, jit = _Language(), _undecorated


def block_for(size: int) -> int:
    """The block that holds a row of `size` elements: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
