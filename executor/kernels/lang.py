"""Triton when it is installed, and a stand-in that lets the modules of this folder be imported when it is
not.

Without Triton the decorated functions are never called: only the torch twins run.

**Overlapping launches.** Kernels of the layer loop are launched with `**OVERLAP` (programmatic dependent
launch, Hopper and later): one may start while the kernel before it still runs. Each calls `allow_next()`
first and `wait_for_inputs()` before it touches anything that an earlier kernel of the batch writes; weights,
rotation tables and metadata may be read before. A kernel launched without `**OVERLAP` waits for all of its
predecessor, as always.
"""

import os
from typing import Any

tl: Any
jit: Any
TensorDescriptor: Any

try:
    import triton
    import triton.language
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    tl, jit = triton.language, triton.jit
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Language:
        constexpr = int

    def _undecorated(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else _undecorated

    tl, jit, TensorDescriptor = _Language(), _undecorated, None

IS_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
"""False in Triton's interpreter, which knows no inline assembly."""
OVERLAP: dict[str, Any] = (
    {"launch_pdl": True} if HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") != "1" else {}
)


@jit
def allow_next():
    """Let the next kernel start once every program of this one has started; its own wait keeps the order."""
    if IS_COMPILED:
        gdc_launch_dependents()


@jit
def wait_for_inputs():
    """Wait until every earlier kernel has finished and its writes are visible."""
    if IS_COMPILED:
        gdc_wait()


def triton_version() -> str:
    """As in `3.6.0`; blank where Triton is not installed."""
    return triton.__version__ if HAS_TRITON else ""


def block_for(size: int) -> int:
    """The block that holds a row of `size` elements: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
