"""Runs Triton kernels in its interpreter on machines without an NVIDIA GPU; it must be chosen before triton
is first imported."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
