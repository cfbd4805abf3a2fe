"""What can go wrong after a run has begun. Imports no torch, so that the commands can name it before torch is
there."""


class RunError(Exception):
    """A run ended before its work did. The message says why and where what had finished lies, marked
    `failed`."""


class AuditError(Exception):
    """An address is not what the design says. Names batch, request, position, depth, and both values."""


class KernelError(RuntimeError):
    """A kernel in CUDA C++ cannot be compiled, loaded or launched; the kernels it stands in for can."""
