"""Ranges of numbers, said where a number is declared and checked by whoever reads it from a file.

`Annotated[int, Within(1, 8)]` costs nothing when a value is made in code. Pydantic, which the core does not
import, finds `__get_pydantic_core_schema__` and refuses what lies outside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 100_000_000
"""Above any pool, budget or size that a device or a model could have: a larger number is a typing mistake."""


@dataclass(frozen=True, slots=True)
class Within:
    """At least `ge` (or above `gt`) and at most `le` (or below `lt`)."""

    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        bounds = {"ge": self.ge, "le": self.le, "gt": self.gt, "lt": self.lt}
        return {**handler(source), **{key: value for key, value in bounds.items() if value is not None}}
