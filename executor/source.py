"""Hashes of what measured times follow from: the kernels alone, so that a latency model is not used for
others, and everything, so that a sweep does not take an old run for a new one."""

import hashlib
from pathlib import Path

import torch

from policies.config.provenance import result_sha256
from policies.config.runconfig import RunConfig

ROOT = Path(__file__).parent
FILES = ("model/forward.py", "packing.py", "programs.py")


def kernel_sha256() -> str:
    """SHA-256 over the names and bytes of all kernels, the forward pass, packing and programs."""
    digest = hashlib.sha256()
    kernels = [path for folder in ("kernels", "cuda") for path in (ROOT / folder).glob("*.*")]
    for path in sorted([*kernels, *(ROOT / name for name in FILES)]):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def inputs_sha256(config: RunConfig, uses_graphs: bool) -> str:
    """A hash of all that a run follows from beside its config and its device."""
    return result_sha256(config, "executor", torch.__version__, uses_graphs)
