"""Compiled kernels on disk, by what they were compiled from. A file is its contents' checksum and the
contents: one that was cut, changed or written by something else is as good as none."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

DIGEST_BYTES = 32


def folder() -> Path:
    """`loop-twin` in the user's cache directory ($XDG_CACHE_HOME, or ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache") / "loop-twin"


def key_of(*parts: str) -> str:
    """A name for what `parts` determine: source, options, compiler, card."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:32]


def read(path: Path) -> bytes | None:
    """The contents that `write` left at `path`, None when there is no such file or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, contents = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return contents if hashlib.sha256(contents).digest() == digest else None


def write(path: Path, contents: bytes) -> None:
    """Leave `contents` at `path`, whole or not at all; a folder that cannot be written to changes nothing."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(contents).digest() + contents)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """What `make` returned the last time it was asked for `key`, or returns now."""
    path = folder() / f"{key}.bin"
    contents = read(path)
    if contents is None:
        contents = make()
        write(path, contents)
    return contents
