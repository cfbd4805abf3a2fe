"""Files that a full disk leaves whole: lines that are written as they come, and drafts that take their place
in one step."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.core.errors import InputError, WriteError

TAIL_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk says that takes no more."""


class GrowingFile:
    """A text file that is written line by line, `path`: always the beginning of what was written.

    Once the disk has not taken something the file takes nothing more, for that would follow a gap: it is
    closed and cut after its last whole line, and `write` and `flush` raise the first `WriteError` again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = io.FileIO(path, "w")
        self._file = io.TextIOWrapper(io.BufferedWriter(self._raw, 1 << 20), encoding="utf-8", newline="\n")
        self._fault: WriteError | None = None

    def write(self, text: str) -> None:
        if self._fault is not None:
            raise self._fault
        try:
            self._file.write(text)
        except OSError as error:
            raise self._failed(error) from error

    def flush(self) -> None:
        """Hand what was written until now to the system: it is there even if the process is killed."""
        if self._fault is not None:
            raise self._fault
        try:
            self._file.flush()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close it once; later calls, and calls after a `WriteError`, do nothing."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> WriteError:
        """Close without writing what is still buffered."""
        self._raw.close()
        _cut_to_lines(self._path)
        self._fault = WriteError(f"{self._path}: {error.strerror or error}")
        return self._fault


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Where to write what is to become `path`: a draft that takes its place when the block ends, and is gone
    when it fails. Two processes that write one file have a draft each; the last to end it stays."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        os.replace(draft, path)
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def user_file(path: Path) -> Iterator[Path]:
    """The same for a file whose place a user chose: its folder is made, a link is followed, and what is no
    regular file (`/dev/stdout`) is written to directly.

    Raises `InputError` where nothing can be written, `WriteError` when the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file() and not path.is_dir():
            yield path
            return
        with drafted(path.resolve()) as draft:
            yield draft
    except OSError as error:
        raise cannot_write(path, error) from None
    except WriteError as error:
        if isinstance(error.__cause__, OSError):
            raise cannot_write(path, error.__cause__) from None
        raise


def cannot_write(path: Path, error: OSError) -> InputError | WriteError:
    """The sentence for `path`: whose fault it is that it cannot be written, the disk's or the user's."""
    kind = WriteError if error.errno in FULL else InputError
    return kind(f"{path}: cannot be written: {error.strerror or error}")


def _cut_to_lines(path: Path) -> None:
    """Cut a file after its last whole line."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        file.truncate(end)
