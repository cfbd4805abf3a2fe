"""How our commands end: 0 done, 1 the run failed its check, 2 the input is wrong, with one line on stderr and
never a traceback."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from policies.core.errors import InputError, InvariantError, SelectionError, WriteError
from policies.process.interrupt import raise_on_signals
from policies.process.output import plain_warnings
from policies.process.sentences import one_line, shown
from policies.process.start import is_ours, missing


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, without the usage text before it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As inherited; a text that no system takes as a name is refused."""
        for text in sys.argv[1:] if args is None else args:
            if "\0" in text or any("\ud800" <= letter < "\udc80" for letter in text):
                self.error(f"{shown(text)}: expected a text without NUL and half characters")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, one_line(f"{self.prog}: {message}; see {self.prog} --help") + "\n")


def add_overrides(command: argparse.ArgumentParser, out: Path | None = None) -> None:
    """`--set a.b=c`, as often as one likes, and `--out DIR`, by default `out`."""
    command.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="override a config key; may be repeated"
    )
    command.add_argument("--out", type=Path, default=out, metavar="DIR")


def add_objectives(command: argparse.ArgumentParser) -> None:
    """`--slo ttft_ms=500,itl_ms=20`, among the overrides of `--set`."""
    command.add_argument(
        "--slo",
        dest="set",
        action="append",
        default=argparse.SUPPRESS,
        type=_slo_override,
        metavar="ttft_ms=500,itl_ms=20",
        help="objectives to judge by: ttft_ms, itl_ms, tpot_ms, e2e_ms, share",
    )


def _slo_override(text: str) -> str:
    """The override that sets all of `slo`."""
    parts = [part.partition("=") for part in text.split(",")]
    if not all(key.strip() and equals and value.strip() for key, equals, value in parts):
        raise argparse.ArgumentTypeError(f"{shown(text)}, expected like ttft_ms=500,itl_ms=20")
    return "slo={" + ", ".join(f"{key.strip()}: {value.strip()}" for key, _, value in parts) + "}"


def exit_status(program: str, action: Callable[[], int]) -> int:
    """Run `action` and return the process's status: its own, 2 for an `InputError` or a missing package, 1
    for a broken rule or disk, 130 for Ctrl-C, SIGTERM and SIGHUP."""
    raise_on_signals()
    plain_warnings(program)
    try:
        return action()
    except InputError as error:
        print(one_line(f"{program}: {error}"), file=sys.stderr)
        return 2
    except (RecursionError, MemoryError, OverflowError) as error:
        if sys.flags.dev_mode:
            raise
        kind = type(error).__name__
        print(one_line(f"{program}: the input asks for too much ({kind}: {error})"), file=sys.stderr)
        return 2
    except (InvariantError, SelectionError) as error:
        print(f"{program}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except WriteError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if is_ours(error):
            raise
        print(missing(program, error), file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
