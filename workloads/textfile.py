"""Opening a trace as text: plain, gzip or Zstandard, with or without a byte order mark, whatever the line
ends. Knows no format."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from policies.core.errors import InputError
from policies.process.documents import open_regular

_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PEEK_BYTES, _ZSTD_BYTES = 65536, 1024
MAX_LINE = 4_000_000
MAX_LINES = 5_000_000


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Yield `path` as a stream of text with its line ends kept, unpacked on the way when it is gzip or
    Zstandard (known by content, not name).

    Raises `InputError` for a missing file, a folder, an empty file, binary content, and for packed data
    that breaks off while it is read. Stray bytes that are not UTF-8 become surrogates, so that a damaged cell
    is reported where it stands.
    """
    with open_regular(path, "a trace") as raw:
        try:
            buffered = _unpacked(path, raw)
            _check_text(path, cast(io.BufferedReader, buffered).peek(_PEEK_BYTES))
            yield io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: damaged gzip data ({error})") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error})") from None


def _unpacked(path: Path, raw: io.BufferedReader) -> BinaryIO:
    """`raw`, or what it packs. Reading damaged Zstandard data raises `InputError`."""
    head = raw.peek(4)[:4]
    if head[:2] == _GZIP_MAGIC:
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head != _ZSTD_MAGIC:
        return raw
    return io.BufferedReader(_Zstandard(path, raw))


class _Zstandard(io.RawIOBase):
    """The text that a Zstandard file of one frame or more packs, in pieces that a small file cannot make
    large."""

    def __init__(self, path: Path, raw: io.BufferedReader) -> None:
        import zstandard  # compiled code that few traces need

        self._path, self._raw, self._error = path, raw, zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._packed, self._text = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text and self._unpack():
            pass
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _unpack(self) -> bool:
        """Unpack a little more; False at the end of the file."""
        packed = self._packed or self._raw.read(_ZSTD_BYTES)
        if self._frame.eof and packed:
            self._frame = self._new_frame()
        try:
            self._text = memoryview(self._frame.decompress(packed)) if packed else self._text
        except self._error as error:
            raise InputError(f"{self._path}: damaged Zstandard data ({error})") from None
        if not packed and not self._frame.eof:
            raise InputError(f"{self._path}: damaged Zstandard data (it breaks off)")
        self._packed = self._frame.unused_data if self._frame.eof else b""
        return bool(packed)


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
