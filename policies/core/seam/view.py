"""What a policy may read: requests, their prompts, and the scheduler's limits. Read-only by type: a policy
that writes fails mypy.

The engine hands out its live objects under these types, so a view costs no copies; whatever a policy does,
its proposal is validated against the frontiers before anything moves.
"""

from collections.abc import Sequence
from typing import Protocol

from policies.core.memory.kv import BlockLedger
from policies.core.memory.ring import RingLedger
from policies.core.seam.exits import ExitRule
from policies.core.seam.request import CODA, PRELUDE, PROMPT, RECURRENT, Phase
from policies.core.seam.settings import SchedulerSettings


class PromptView(Protocol):
    """Scheduled progress of a prompt; see `policies.core.engine.frontier.PromptProgress` for the contract of
    every member."""

    @property
    def num_preluded_tokens(self) -> int: ...
    @property
    def num_prefilled_tokens(self) -> int: ...
    @property
    def prefill_reclaimable_tokens(self) -> int: ...

    def chunk_start(self, token: int) -> int: ...
    def chunk_end(self, token: int) -> int: ...
    def hidden_row_offset(self, token: int) -> int | None: ...
    def ready(self, depth: int, fuse_prelude: bool = True) -> tuple[int, int]: ...
    def deepest_ready(self) -> tuple[int, int, int]: ...
    def stageable(self) -> tuple[int, int]: ...


class RequestView(Protocol):
    """One running request; see `policies.core.seam.request.RequestState`."""

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


class View:
    """The scheduler's state as a policy may read it, rebuilt before every selection.

    `running` is in admission order, (arrival, id) under fcfs; `prompts`, `preludes`, `codas` and `looping`
    are its members by what they need next. Frontiers are scheduled progress: work already submitted counts as
    done, because the device is a FIFO.
    """

    __slots__ = (
        "_blocks", "_rings", "codas", "exits", "limits", "looping", "now_ns", "num_loops", "preludes",
        "prompt_batches_since_decode", "prompts", "running",
    )  # fmt: skip

    now_ns: int
    limits: SchedulerSettings
    num_loops: int
    running: Sequence[RequestView]
    prompts: Sequence[RequestView]
    preludes: Sequence[RequestView]
    codas: Sequence[RequestView]
    looping: Sequence[RequestView]
    exits: ExitRule
    """After how many loops decoded tokens may leave, so which depth boundaries decode rows need. When they do
    is not known here."""
    prompt_batches_since_decode: int
    """Prompt batches submitted since decode rows last ran a recurrent depth."""

    def __init__(
        self,
        limits: SchedulerSettings,
        num_loops: int,
        exits: ExitRule,
        blocks: BlockLedger,
        rings: RingLedger,
    ) -> None:
        self.limits = limits
        self.num_loops = num_loops
        self.exits = exits
        self.prompt_batches_since_decode = 0
        self._blocks = blocks
        self._rings = rings

    @property
    def free_blocks(self) -> int:
        return self._blocks.free_blocks

    @property
    def free_ring_slots(self) -> int:
        return self._rings.free_slots

    def bucket(self, running: Sequence[RequestView]) -> None:
        """Set `running` and sort its members by phase, keeping their order. The scheduler's, before every
        selection."""
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
        self.running = running
        self.prompts, self.preludes, self.codas, self.looping = prompts, preludes, codas, looping

    @property
    def has_decode_work(self) -> bool:
        """Some token can be embedded, looped, or turned into the next one now; codas count once enough of
        them wait."""
        return bool(self.looping or self.preludes) or len(self.codas) >= self.limits.min_coda_batch_size
