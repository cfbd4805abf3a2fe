"""What passes between an engine and the world: events in, commands out.

Two ways lead in. `Mail` (a request arrives, a client hangs up) waits in the engine's inbox until its time has
come; see `policies.core.seam.inbox`. What happens on the device, and time, is sent to the engine's generator
as the answer to the command that it yielded: `Submit` is answered with a `Tick` (the time once the batch is
launched) and `Wait` with a `Completion` or, when mail or `until_ns` comes first, a `Tick`. A backend that
knows the future may be asked to `Repeat` batches instead.

At equal times the order is total: arrivals, hang-ups, news of transfers, completions; among arrivals
(arrival, id), among hang-ups the id, among news as it was posted.

An engine that does one part of its requests (`Role`) speaks to others through three commands, answered with a
`Tick`: `Reserve` once a request that another engine computes has room here, `Send` for what is ready to go
there, `Import` for what has come. Mail tells it what became of it: `Sent`, `Received`, `Lost`.
"""

from typing import NamedTuple

from policies.core.seam.batch import ExecutionBatch, Work
from policies.core.seam.request import Request

COMPONENTS = ("embed", "linear", "attention", "lm_head", "copies", "launch")
"""Parts of a batch's device time, in the order of `Completion.components_ns`."""


class Submit(NamedTuple):
    """Run `batch` after everything submitted before it."""

    batch: ExecutionBatch


class Wait(NamedTuple):
    """Report the next completion, or the time once `until_ns` has come, when the next known mail is due
    (None: none is known). New mail may end the wait earlier."""

    until_ns: int | None


class Foresee(NamedTuple):
    """Say whether the oldest batch in flight will be collected before `until_ns` and makes no request's last
    token: else there is no use in asking to `Repeat`. Answered with `Foreseen`."""

    until_ns: int | None


class Repeat(NamedTuple):
    """Run the batches of `works`, again and again, each time every row a token further, `most` at most, from
    number `first_seq` on, submitting one whenever one is collected: as long as what is collected makes no
    request's last token, and is collected before `until_ns`. Answered with a `Stretch`."""

    first_seq: int
    works: tuple[Work, ...]
    most: int
    until_ns: int | None


class Reserve(NamedTuple):
    """There is room for the whole prompt of a request that another engine is to compute: it may begin."""

    request_id: int


class Send(NamedTuple):
    """Send the K/V of prompt tokens `[start, end)` in all depth planes: one or more complete chunks, whose
    rows are done. They lie in `block_groups`, the first of which holds token `start`. With the prompt's end
    (`is_last`) goes the hidden state of its last token, from its own row in ring `ring_id`. What was sent
    stays as it is until the whole prompt is `Sent`, or its client hangs up."""

    request_id: int
    start: int
    end: int
    block_groups: tuple[int, ...]
    ring_id: int
    is_last: bool


class Import(NamedTuple):
    """Put what was received into its blocks: the fields are those of `Send`, here."""

    request_id: int
    start: int
    end: int
    block_groups: tuple[int, ...]
    ring_id: int
    is_last: bool


class Tick(NamedTuple):
    """Nothing happened but time."""

    now_ns: int


class Completion(NamedTuple):
    """The oldest submitted batch is done and the engine learns of it at `now_ns`.

    `started_ns` and `finished_ns` are device times. `stops` names the requests whose CODA row sampled their
    last token (its last one in the batch, or the refused one), `exits` those whose decode row decided to
    leave after the depths that this batch ran, before `max_loops`. A decision is reported once: batches in
    flight may hold rows of the token one and more depths further, and those surplus rows decide nothing.
    `refused` has (request, position) of VERIFY rows whose token is not the one guessed, or is the request's
    last; of surplus rows nobody listens. `select_ns` is what choosing the batch took, `host_ns` preparing and
    launching it, `limit_ns` its physical limit; `components_ns` splits the device time as a model predicts it
    (empty when measured as a whole).
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
    refused: frozenset[tuple[int, int]] = frozenset()


class Foreseen(NamedTuple):
    """The answer to `Foresee`."""

    is_free: bool


class Times(NamedTuple):
    """What completions say of batches one after another, as columns; see `Completion`."""

    now_ns: list[int]
    started_ns: list[int]
    finished_ns: list[int]
    select_ns: list[int]
    host_ns: list[int]
    limit_ns: list[int]
    components_ns: list[tuple[int, ...]]


class Stretch(NamedTuple):
    """Batches were submitted, the first at once, each of the others when one before it was collected, until
    as many were collected as were submitted: `earlier` ones, which had been in flight, the oldest first, and
    then the first of those submitted at `times`. There may be none."""

    earlier: list[Completion]
    times: Times

    @property
    def num_batches(self) -> int:
        return len(self.earlier) + len(self.times.now_ns)


class Arrival(NamedTuple):
    """A request arrives at `at_ns`, its own `arrival_ns` unless it had to wait for somebody else's end."""

    at_ns: int
    request: Request


class HangUp(NamedTuple):
    """The client of a request hangs up at `at_ns`. Of one that has ended already it means nothing."""

    at_ns: int
    request_id: int


class Sent(NamedTuple):
    """The last chunk of a prompt has left: nothing of it is needed here any more."""

    at_ns: int
    request_id: int


class Received(NamedTuple):
    """Prompt tokens up to `end` are here, from where the last ones ended. They come in order."""

    at_ns: int
    request_id: int
    end: int


class Lost(NamedTuple):
    """No more of a prompt will come: what has not been received is computed here."""

    at_ns: int
    request_id: int


Mail = Arrival | HangUp | Sent | Received | Lost
Handed = Reserve | Send | Import
Command = Submit | Wait | Foresee | Repeat | Handed
Event = Tick | Completion | Foreseen | Stretch
