"""Standard output and error that end no command: for readers that have left, full devices and any
characters."""

import errno
import io
import os
import sys
import warnings
from typing import TextIO

from policies.core.errors import WriteError


class Output(io.TextIOWrapper):
    """A standard stream. Once its reader has left, what is written is dropped and the command goes on.

    What its encoding lacks is written as an escape. Another failure is a `WriteError` where `is_vital`.
    """

    def __init__(self, stream: TextIO, is_vital: bool) -> None:
        encoding, is_line_wise = stream.encoding, getattr(stream, "line_buffering", True)
        super().__init__(
            stream.detach(),  # type: ignore[attr-defined]
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=is_line_wise,
        )
        self._is_vital = is_vital

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._drop_from_now_on(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._drop_from_now_on(error)

    def _drop_from_now_on(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self._is_vital and error.errno != errno.EPIPE:
            raise WriteError(f"standard output: {error.strerror}") from None


def plain_warnings(program: str) -> None:
    """Let a warning be one line, without the line of our source that gave it."""
    warnings.formatwarning = lambda message, *_, **__: f"{program}: warning: {message}\n"


def open_outputs() -> None:
    """Replace `sys.stdout` and `sys.stderr`; one that is closed is a device that takes everything."""
    for name, is_vital in (("stdout", True), ("stderr", False)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
        setattr(sys, name, Output(stream, is_vital))
