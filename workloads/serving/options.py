"""The options of `serve`, the same in both worlds. Imports nothing that only a server needs."""

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from policies.core.errors import InputError
from workloads.serving.settings import Limits

NEEDED = ("starlette", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens, and what bounds its clients."""

    host: str
    port: int
    limits: Limits
    api_key: str | None


def add_serve_options(command: argparse.ArgumentParser) -> None:
    """The options that both worlds have."""
    bounds = Limits()
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one")
    command.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="clients must send the key that is in it"
    )
    for name, text in (
        ("max_outstanding", "requests that wait or run before the next is answered 429"),
        ("max_connections", "open connections"),
        ("max_body_bytes", "size of a request's body"),
        ("header_s", "seconds for a request's head"),
        ("body_s", "seconds for its body"),
        ("idle_s", "seconds between two requests of a connection"),
        ("answer_s", "seconds for an answer, the wait included"),
    ):
        value = getattr(bounds, name)
        command.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"{text} (default: {value})"
        )


def place_of(options: argparse.Namespace) -> Place:
    """The checked options. Raises `InputError`, also where a package is missing."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        raise InputError(
            f"serve needs the package {absent[0]}, which is not installed: pip install '.[serve]'"
        )
    names = Limits.__dataclass_fields__
    limits = Limits(**{name: getattr(options, name) for name in names})
    for name in names:
        value = getattr(limits, name)
        if not 0 < value < 1e9:
            raise InputError(f"--{name.replace('_', '-')}: {value}, expected above 0 and below 1e9")
    if not 0 <= options.port < 65536:
        raise InputError(f"--port: {options.port}, expected 0 to 65535")
    return Place(options.host, options.port, limits, _api_key(options.api_key_file))


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-key-file: {path}: cannot be read ({error})") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key or len(key) > 1000:
        raise InputError(f"--api-key-file: {path}: expected one line of 1 to 1000 printable characters")
    return key
