"""Every error a caller can meet, by whose mistake it is.

`InputError` is the user's: a command prints it as one line and exits with status 2. The others are ours or a
policy's: they mean that a rule of the scheduler was broken, and a run that raises one has no result.
"""


class InputError(Exception):
    """A file, a config key or an argument is wrong. The message is one sentence naming what, where and what
    was expected."""


class WriteError(Exception):
    """The disk did not take a run's output. The message names the file and the reason, and what is left of
    the run."""


class SelectionError(Exception):
    """A policy proposed something that its view does not allow. The message names the request, the range and
    the frontier."""


class InvariantError(Exception):
    """One of the nine invariants does not hold. The message starts with the invariant's number and shows both
    sides."""


class StuckError(InvariantError):
    """Ready work and capacity exist and no batch was formed (invariant 9). The message names the stuck
    requests."""
