"""A hash of the source that decides what a batch costs the device, so that measured times are not used for
other kernels."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent
FILES = ("model/forward.py", "packing.py", "programs.py")


def kernel_sha256() -> str:
    """SHA-256 over the names and bytes of all kernels, the forward pass, packing and programs."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "kernels").glob("*.py"), *(ROOT / name for name in FILES)]):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
