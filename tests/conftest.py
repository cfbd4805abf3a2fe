"""Runs Triton kernels in its interpreter on machines without an NVIDIA GPU; it must be chosen before triton
is first imported. `SCRAMBLE_PRODUCTS=1` runs every test on torch products that no machine has."""

import os
import shutil
from collections.abc import Iterator

import pytest

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def scrambled_products() -> Iterator[None]:
    """See `tests/other_machines.py`."""
    if not os.environ.get("SCRAMBLE_PRODUCTS"):
        yield
        return
    from products import ScrambledProducts

    with ScrambledProducts():
        yield
