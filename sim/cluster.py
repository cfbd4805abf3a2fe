"""Workers of a Dask scheduler as joblib's. They read the same files and write the same run directories, so
they must see the same folders and run the same source; versions of libraries may differ, and that is said."""

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joblib
from distributed import Client

from policies.config.provenance import ROOT, source_sha256
from policies.core.errors import InputError
from policies.process.sentences import shown

SCHEME = "dask://"
ANSWER_S = 10.0
"""How long a scheduler may take to answer."""
ROOMS = ("policies", "workloads", "results", "sim")
LIBRARIES = ("python", "numpy", "simpy", "pydantic", "joblib", "scipy", "dask", "distributed")


@contextmanager
def workers_of(address: str, shared: Path) -> Iterator[None]:
    """While entered, joblib's work goes to the workers of the scheduler at `address`, `dask://host:port`. A
    worker that dies has its cells done by others.

    Raises `InputError` when nobody answers there, or a worker cannot do what this process would do.
    """
    client = _client(address)
    try:
        _check(client, address, shared)
        with joblib.parallel_config(backend="dask", client=client, pure=False):
            yield
    finally:
        client.close()


def check_address(address: str) -> None:
    """Raise `InputError` for what is no address of a cluster."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    if not address.startswith(SCHEME) or not host or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--cluster {shown(address)}: expected dask://HOST:PORT of a running scheduler")


def _client(address: str) -> Any:
    check_address(address)
    try:
        return Client(  # type: ignore[no-untyped-call]
            f"tcp://{address.removeprefix(SCHEME)}", timeout=ANSWER_S, set_as_default=False
        )
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError(
            f"--cluster {address}: no scheduler answers there within {ANSWER_S:g} s "
            f"({type(error).__name__}), expected one started by `dask scheduler`"
        ) from None


def _check(client: Any, address: str, shared: Path) -> None:
    """Ask every worker for its source, its libraries and a file in `shared`."""
    shared.mkdir(parents=True, exist_ok=True)
    token = shared.resolve() / f".seen-{uuid.uuid4().hex}"
    token.write_text("")
    try:
        found: dict[str, tuple[str | None, bool, dict[str, str]]] = client.run(
            _describe, str(token), on_error="return"
        )
    finally:
        token.unlink(missing_ok=True)
    if not found:
        raise InputError(f"--cluster {address}: has no workers, expected some started by `dask worker`")
    ours, _, libraries = _describe("")
    for worker, answer in sorted(found.items()):
        if isinstance(answer, BaseException) or answer[0] is None:
            raise InputError(
                f"--cluster {address}: {worker} cannot import this project, expected it to run there"
            )
        source, sees, theirs = answer
        if source != ours:
            raise InputError(
                f"--cluster {address}: {worker} runs other source than this, expected the same commit"
            )
        if not sees:
            raise InputError(
                f"--cluster {address}: {worker} does not see {shared.resolve()}, expected a folder that all "
                "share"
            )
        other = [
            f"{name} {theirs[name]} ({libraries[name]} here)"
            for name in LIBRARIES
            if theirs[name] != libraries[name]
        ]
        if other:
            print(
                f"note: {worker} has {', '.join(other)}; figures may differ in the last digit",
                file=sys.stderr,
            )


def _describe(token: str) -> tuple[str | None, bool, dict[str, str]]:
    """The source that a process runs, whether it sees the file, and its libraries."""
    import platform
    from importlib.metadata import version

    libraries = {name: version(name) for name in LIBRARIES[1:]}
    return (
        source_sha256(ROOT, ROOMS),
        os.path.exists(token),
        {"python": platform.python_version(), **libraries},
    )
