"""What a policy may read: requests, their prompts, and the scheduler's limits. Nothing of it can be written.

Requests and prompts are the engine's live objects under read-only types, so a view costs no copies of them;
assigning to a member fails in fact as well as in mypy. A view itself is a named tuple of one selection.
Whatever a policy does, its proposal is validated against the frontiers before anything moves.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from policies.core.seam.batch import ExecutionBatch
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import CODA, PRELUDE, PROMPT, RECURRENT, Phase
from policies.core.seam.settings import SchedulerSettings


class PromptView(Protocol):
    """Scheduled progress of a prompt; see `policies.core.progress.frontier.PromptProgress` for the contract
    of every member."""

    @property
    def num_preluded_tokens(self) -> int: ...
    @property
    def num_prefilled_tokens(self) -> int: ...
    @property
    def prefill_reclaimable_tokens(self) -> int: ...

    def chunk_start(self, token: int) -> int: ...
    def chunk_end(self, token: int) -> int: ...
    def ready(self, depth: int, fuse_prelude: bool = True) -> tuple[int, int]: ...
    def deepest_ready(self) -> tuple[int, int, int]: ...
    def stageable(self) -> tuple[int, int]: ...


class RequestView(Protocol):
    """One running request; see `policies.core.progress.state.RequestState`."""

    @property
    def request_id(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def prompt(self) -> PromptView: ...
    @property
    def position(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def last_seq(self) -> int: ...
    @property
    def order(self) -> tuple[int, int]: ...
    @property
    def admitted_seq(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_scheduled_outputs(self) -> int: ...
    @property
    def last_token_ns(self) -> int: ...
    @property
    def num_before(self) -> int: ...


class View(NamedTuple):
    """The scheduler's state as a policy may read it at one selection.

    `running` is in the order of admission (`policies.core.memory.admission.Rank`); `prompts`, `preludes`,
    `codas` and `looping` are its members by what they need next. Frontiers are scheduled progress: work
    already submitted counts as done, because the device is a FIFO. `exits` says after how many loops decoded
    tokens may leave, so which depth boundaries decode rows need; when they do is not known here. Where tokens
    are guessed each row of a request is a member of its own, told by its position; one that has `num_before`
    rows of its request before it may run no depth that these have not run, or run with it. `drafts` are those
    from which the next token may be guessed now, together with the `codas`. `prompt_batches_since_decode` are
    prompt batches submitted since decode rows last ran a recurrent depth. `seq` is the number of the batch
    that is formed now. `in_flight` are the batches before it that are not collected, and `device_free_ns` is
    when the device ended the last one that is: what of the present is not yet in a frontier.
    """

    now_ns: int
    limits: SchedulerSettings
    num_loops: int
    exits: ExitRule
    running: tuple[RequestView, ...]
    prompts: tuple[RequestView, ...]
    preludes: tuple[RequestView, ...]
    codas: tuple[RequestView, ...]
    looping: tuple[RequestView, ...]
    prompt_batches_since_decode: int = 0
    free_blocks: int = 0
    free_ring_slots: int = 0
    seq: int = 0
    in_flight: tuple[ExecutionBatch, ...] = ()
    device_free_ns: int = 0
    drafts: tuple[RequestView, ...] = ()


Members = tuple[RequestView, ...]
ByPhase = tuple[Members, Members, Members, Members]


def by_phase(running: Iterable[RequestView]) -> ByPhase:
    """(prompts, preludes, codas, looping) of `running`, in its order."""
    prompts: list[RequestView] = []
    preludes: list[RequestView] = []
    codas: list[RequestView] = []
    looping: list[RequestView] = []
    for request in running:
        phase = request.phase
        if phase is RECURRENT:
            looping.append(request)
        elif phase is PROMPT:
            prompts.append(request)
        elif phase is CODA:
            codas.append(request)
        elif phase is PRELUDE:
            preludes.append(request)
    return tuple(prompts), tuple(preludes), tuple(codas), tuple(looping)
