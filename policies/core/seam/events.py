"""What passes between the engine and a backend: `Submit` and `Wait` out, the time or a `Completion` back in.

The engine's generator yields a command and is sent an event. A backend answers `Submit` with a `Tick` (the
time once the batch is launched) and `Wait` with a `Completion` or, when none comes before `until_ns`, a
`Tick` at or after it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from policies.core.seam.batch import ExecutionBatch

COMPONENTS = ("embed", "linear", "attention", "lm_head", "copies", "launch")
"""Parts of a batch's device time, in the order of `Completion.components_ns`."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Run `batch` after everything submitted before it."""

    batch: ExecutionBatch


@dataclass(frozen=True, slots=True)
class Wait:
    """Report the next completion, or the time once `until_ns` has come; with None only a completion ends the
    wait."""

    until_ns: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but time."""

    now_ns: int


class Completion(NamedTuple):
    """The oldest submitted batch is done and the engine learns of it at `now_ns`.

    `started_ns` and `finished_ns` are device times. `stops` names the requests whose CODA row sampled their
    last token, `exits` those whose decode row decided to leave after the depths that this batch ran, before
    `max_loops`. A decision is reported once: batches in flight may hold rows of the token one and more depths
    further, and those surplus rows decide nothing. `select_ns` is what choosing the batch took, `host_ns`
    preparing and launching it, `limit_ns` its physical limit; `components_ns` splits the device time as a
    model predicts it (empty when measured as a whole).
    """

    seq: int
    now_ns: int
    started_ns: int
    finished_ns: int
    stops: frozenset[int] = frozenset()
    select_ns: int = 0
    host_ns: int = 0
    limit_ns: int = 0
    components_ns: tuple[int, ...] = ()
    exits: frozenset[int] = frozenset()


Command = Submit | Wait
Event = Tick | Completion
