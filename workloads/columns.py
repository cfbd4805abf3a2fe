"""Requests on their way to a `Workload`: columns of whole numbers, one entry a request, in source order.

Every source (trace, ServeGen, synthetic) fills these; `workloads.workload` sorts, rebases and cuts once for
all of them.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


def int_column() -> "array[int]":
    return array("q")


class IntLists(Mapping[int, tuple[int, ...]]):
    """Some whole numbers from 0 to 2**64 - 1 for each request, in one flat array: request i has
    `values[ends[i-1]:ends[i]]`."""

    __slots__ = ("_ends", "_values")

    def __init__(self) -> None:
        self._values = array("Q")
        self._ends = int_column()

    def append(self, values: Sequence[int]) -> None:
        """Give the next request its values."""
        self._values.extend(values)
        self._ends.append(len(self._values))

    def __getitem__(self, request_id: int) -> tuple[int, ...]:
        if not 0 <= request_id < len(self._ends):
            raise KeyError(request_id)
        return tuple(self._values[self._ends[request_id - 1] if request_id else 0 : self._ends[request_id]])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._ends)))

    def __len__(self) -> int:
        return len(self._ends)


@dataclass(slots=True)
class Columns:
    """What a source knows. `arrival_ns` needs no common origin; `max_tokens` is None where the source names
    none.

    `prefix_blocks` are content ids, one for every `block_tokens` prompt tokens (see `Request.content_ids`).
    `patience_ns` is how long after its arrival a request's client hangs up, by index, for those whose does.
    """

    name: str
    arrival_ns: "array[int]" = field(default_factory=int_column)
    prompt_tokens: "array[int]" = field(default_factory=int_column)
    output_tokens: "array[int]" = field(default_factory=int_column)
    max_tokens: list[int | None] = field(default_factory=list)
    priority: "array[int]" = field(default_factory=int_column)
    prefix_blocks: IntLists | None = None
    block_tokens: int = 0
    exit_loops: IntLists | None = None
    guessed: IntLists | None = None
    patience_ns: dict[int, int] = field(default_factory=dict)
    concurrency: int | None = None
    skipped_rows: int = 0
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def append(
        self, prompt_tokens: int, output_tokens: int, max_tokens: int | None = None, priority: int = 0
    ) -> None:
        """Add a request; its arrival, prefix blocks and exit loops are appended by whoever knows them."""
        self.prompt_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens)
        self.max_tokens.append(max_tokens)
        self.priority.append(priority)
