"""Parts of the one sentence that a wrong input gets."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


def first_problem(error: ValidationError, section: str) -> str:
    """The first of pydantic's findings as `section.key: value, what was expected`."""
    problem = error.errors(include_url=False)[0]
    key = ".".join([section, *(str(part) for part in problem["loc"])])
    message = problem["msg"]
    return f"{key}: {problem['input']!r}, {message[0].lower()}{message[1:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` and the list of valid names, to end an error sentence."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f", expected {'one of ' + ', '.join(known) if known else 'none'}{hint}"
