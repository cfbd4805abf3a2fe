"""Disks that are full at a chosen moment, for tests of both worlds."""

import errno
import os
from itertools import count
from pathlib import Path

import pytest

from policies.core.errors import WriteError
from results.files import GrowingFile

FULL = OSError(errno.ENOSPC, "No space left on device")


def full_for(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the disk be full when files of these names are to take their places."""
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name in names:
            raise FULL
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)


def full_after(monkeypatch: pytest.MonkeyPatch, name: str, num_lines: int) -> None:
    """Let the disk be full once the file of this name has its header and `num_lines` lines."""
    real, calls = GrowingFile.write, count()

    def write(self: GrowingFile, text: str) -> None:
        if self._path.name == name and next(calls) > num_lines:
            raise WriteError(f"{self._path}: {FULL.strerror}")
        real(self, text)

    monkeypatch.setattr(GrowingFile, "write", write)
