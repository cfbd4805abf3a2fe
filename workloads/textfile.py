"""Opening a trace as text: plain or gzip, with or without a byte order mark, whatever the line ends. Knows no
format."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from policies.core.errors import InputError
from policies.process.documents import open_regular

_GZIP_MAGIC = b"\x1f\x8b"
_PEEK_BYTES = 65536
MAX_LINE = 4_000_000
MAX_LINES = 5_000_000


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Yield `path` as a stream of text with its line ends kept, unpacked on the way when it is gzip (known by
    content, not name).

    Raises `InputError` for a missing file, a folder, an empty file, binary content, and for gzip data that
    breaks off while it is read. Stray bytes that are not UTF-8 become surrogates, so that a damaged cell is
    reported where it stands.
    """
    with open_regular(path, "a trace") as raw:
        try:
            buffered = cast(BinaryIO, gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP_MAGIC else raw)
            _check_text(path, cast(io.BufferedReader, buffered).peek(_PEEK_BYTES))
            yield io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: damaged gzip data ({error})") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error})") from None


def bounded_lines(path: Path, text: TextIO) -> Iterator[str]:
    """The lines of `text`. Raises `InputError` where a line or their number passes every trace: a small gzip
    may unpack to terabytes."""
    for _ in range(MAX_LINES):
        line = text.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise InputError(f"{path}: has a line of more than {MAX_LINE:,} characters, expected a trace")
        if not line:
            return
        yield line
    if text.readline(1):
        raise InputError(f"{path}: has more than {MAX_LINES:,} lines, expected a shorter trace")


def _check_text(path: Path, head: bytes) -> None:
    if not head:
        raise InputError(f"{path}: is empty, expected a trace")
    text = head.decode("utf-8", errors="surrogateescape")
    num_stray_bytes = sum("\udc80" <= character <= "\udcff" for character in text)
    if b"\0" in head or num_stray_bytes > len(text) // 10:
        raise InputError(f"{path}: is binary, expected CSV or JSON lines in UTF-8")
