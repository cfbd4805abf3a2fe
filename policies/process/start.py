"""How `python -m sim`, `executor` and `results` begin: in good order before anything large is imported.

Imports the standard library alone, because what it is for are packages that are missing and a Ctrl-C that
comes while they are loaded.
"""

import importlib
import os
import signal
import sys
from types import FrameType

from policies.core.errors import WriteError
from policies.process.interrupt import SIGNALS
from policies.process.output import open_outputs

OURS = ("policies", "workloads", "results", "sim", "executor")


def start(program: str) -> int:
    """Import `<program>.cli`, run its `main` on the command line, and return the exit status."""

    def quit_at_once(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)  # nothing is open yet; an exception would come out of the middle of somebody's import

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, quit_at_once)
    open_outputs()
    try:
        main = importlib.import_module(f"{program}.cli").main
        for number, handler in previous.items():
            signal.signal(number, handler)
        status = int(main(sys.argv[1:]))
    except ModuleNotFoundError as error:
        if is_ours(error):
            raise
        print(missing(program, error), file=sys.stderr)
        status = 2
    except SystemExit as error:  # argparse's
        status = error.code if isinstance(error.code, int) else 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except WriteError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return status or 1
    return status


def is_ours(error: ModuleNotFoundError) -> bool:
    """Whether the module that was not found is part of the project, which is a mistake in it."""
    return (error.name or "").partition(".")[0] in OURS


def missing(program: str, error: ModuleNotFoundError) -> str:
    """The sentence for a package that is not installed."""
    return (
        f"{program}: the Python package {error.name} is not installed for {sys.executable}: "
        "run `make setup`, then `. .venv/bin/activate`"
    )
