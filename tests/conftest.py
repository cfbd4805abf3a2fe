"""Runs Triton kernels in its interpreter on machines without an NVIDIA GPU; it must be chosen before triton
is first imported. `SCRAMBLE_PRODUCTS=1` runs every test on torch products that no machine has."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator

import pytest

# A shell starts what runs behind it with Ctrl-C ignored, nohup with SIGHUP, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """All tests are imported: a million objects that no collection of garbage need walk again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Triton's bindings report what is still frozen at the end of the process as leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def scrambled_products() -> Iterator[None]:
    """See `tests/other_machines.py`."""
    if not os.environ.get("SCRAMBLE_PRODUCTS"):
        yield
        return
    from products import ScrambledProducts

    with ScrambledProducts():
        yield
