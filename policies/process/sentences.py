"""Parts of the one sentence that a wrong input gets."""

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError

QUOTED = 120
"""Characters of a value that a sentence quotes."""
LINE = 390
"""Characters of a whole sentence: what is longer loses its middle, where paths and values are."""
_WORDS = (
    ("Value error, ", ""),
    ("Input should be greater than or equal to", "expected at least"),
    ("Input should be less than or equal to", "expected at most"),
    ("Input should be greater than", "expected above"),
    ("Input should be less than", "expected below"),
    ("Input should be", "expected"),
    ("Tuple should have at least 1 item", "expected a list of at least 1 item"),
    ("String should have at least 1 character", "expected a text that is not empty"),
)


_ALTERNATIVE = re.compile(r"constrained-\w+|(function-[\w-]+|tuple|list|dict|literal|nullable)\[.*")
"""What pydantic puts into a location for a member of a union, where nobody wrote a key."""
_OTHER_KIND = re.compile(r"\w+_type|literal_error|none_required")
"""Findings that say only that a value is of another kind than this member of a union."""


def first_problem(error: ValidationError, section: str) -> str:
    """The first of pydantic's findings as `section.key: value, what was expected`. Of a key that may be of
    several kinds it is the finding about the kind that the value is of."""
    found = error.errors(include_url=False)
    same_key = [problem for problem in found if problem["loc"][:1] == found[0]["loc"][:1]]
    problem = next((one for one in same_key if not _OTHER_KIND.fullmatch(one["type"])), found[0])
    parts = [str(part) for part in problem["loc"] if not _ALTERNATIVE.fullmatch(str(part))]
    key = ".".join([*filter(None, [section]), *(part[:40] for part in parts)])
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key}: is missing, expected a value"
    return f"{key}: {shown(problem['input'])}, {expectation(problem['msg'])}"


def expectation(message: str) -> str:
    """Pydantic's sentence in our words: "Input should be greater than 0" is "expected above 0"."""
    for start, ours in _WORDS:
        if message.startswith(start):
            return ours + message[len(start) :].removesuffix(" after validation, not 0")
    return message[0].lower() + message[1:]


def shown(value: object) -> str:
    """`value` as a sentence quotes it: in Python's notation, cut."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."


def one_line(text: object) -> str:
    """`text` without line ends and what no terminal shows, its middle left out when it is long."""
    line = " ".join(str(text).encode("utf-8", "backslashreplace").decode().split())
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    return line if len(line) <= LINE else f"{line[: LINE - 150]} ... {line[-145:]}"


def nearest(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """`, expected one of` the valid names, and `; did you mean 'x'?`, to end an error sentence. `others` are
    suggested but not listed."""
    known = list(known)
    close = difflib.get_close_matches(name[:QUOTED], [*known, *others], n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f", expected {'one of ' + ', '.join(known) if known else 'none'}{hint}"
