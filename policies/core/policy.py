"""What a policy sees and what it must answer. The whole contract between the menu and the engine room.

A policy is a pure choice: the same view gives the same selection. It keeps no state, reads no clock, and never sees output
lengths or exit depths. Whatever it proposes is validated; see `policies.core.scheduler`.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from policies.core.batch import ScheduledRange, Selection, Stage
from policies.core.errors import InputError
from policies.core.model import ModelShape
from policies.core.request import Phase, RequestState
from policies.core.settings import CacheSettings, SchedulerSettings


class View:
    """The scheduler's state as a policy may read it, rebuilt before every selection.

    `running` is in admission order, (arrival, id) under fcfs; `prompts`, `preludes`, `codas` and `looping` are its members by what
    they need next. Frontiers are scheduled progress: work already submitted counts as done, because the device is a FIFO.
    """

    __slots__ = (
        "codas", "free_blocks", "free_ring_slots", "has_exit_decisions", "limits", "looping", "now_ns", "num_loops",
        "preludes", "prompt_batches_since_decode", "prompts", "running",
    )  # fmt: skip

    now_ns: int
    limits: SchedulerSettings
    num_loops: int
    running: tuple[RequestState, ...]
    prompts: tuple[RequestState, ...]
    preludes: tuple[RequestState, ...]
    codas: tuple[RequestState, ...]
    looping: tuple[RequestState, ...]
    free_blocks: int
    free_ring_slots: int
    has_exit_decisions: bool
    """True when tokens may leave before the last depth, so that decode rows need every depth boundary."""
    prompt_batches_since_decode: int
    """Prompt batches submitted since decode rows last ran a recurrent depth."""

    def bucket(self, running: tuple[RequestState, ...]) -> None:
        """Set `running` and sort its members by phase, keeping their order."""
        prompts, preludes, codas, looping = [], [], [], []
        for request in running:
            phase = request.phase
            if phase is Phase.RECURRENT:
                looping.append(request)
            elif phase is Phase.PROMPT:
                prompts.append(request)
            elif phase is Phase.CODA:
                codas.append(request)
            elif phase is Phase.PRELUDE:
                preludes.append(request)
        self.running = running
        self.prompts, self.preludes = tuple(prompts), tuple(preludes)
        self.codas, self.looping = tuple(codas), tuple(looping)

    @property
    def has_decode_work(self) -> bool:
        """Some request has a sampled token to embed, loop, or turn into the next one."""
        return bool(self.looping or self.preludes or self.codas)


class Policy(ABC):
    """One scheduling policy. A subclass is one file in `policies/` and one line in `policies.registry`."""

    name: ClassVar[str]
    splits_prefill: ClassVar[bool] = True
    """Whether prompts may return to the scheduler between depths; such policies need a model and a KV layout that allow it."""
    is_wavefront: ClassVar[bool] = False
    """Whether a request may have one chunk in flight per depth, and so needs a hidden ring of that many slots."""

    def resident_chunks(self, num_loops: int) -> int:
        """Chunks of one prompt that may be between their first staging and their last depth: slots of a hidden ring."""
        return num_loops if self.is_wavefront else 1

    @abstractmethod
    def select(self, view: View) -> Selection | None:
        """Propose the next batch, or None when no running request has anything left to schedule."""

    def check(self, model: ModelShape, scheduler: SchedulerSettings, cache: CacheSettings) -> None:
        """Raise `InputError` when this policy cannot run with that model or cache."""
        if not self.splits_prefill:
            return
        if cache.layout == "shared":
            raise InputError(
                f"policy {self.name} cannot run with cache.layout shared: a prompt token needs the final K/V of the tokens before "
                "it at every depth, so prompts cannot stop between depths; use atomic or last_exited"
            )
        if model.atomic_prefill_only:
            raise InputError(f"policy {self.name} cannot run model {model.name}, which needs atomic prefill; use atomic")


_new_range = tuple.__new__
"""Makes a named tuple from a plain one without its Python-level constructor: one is made for every decode row of every batch."""


def decode_row(request: RequestState, stage: Stage) -> ScheduledRange:
    """The one row of a request that decodes, at its position and depth."""
    return _new_range(ScheduledRange, (request.request_id, stage, request.depth, request.position, 1, 0, None, False))


def prompt_range(request: RequestState, stage: Stage, depth: int, start: int, end: int) -> ScheduledRange:
    """Prompt tokens `[start, end)` of `request` at `depth`; a depth-0 range beyond the staged frontier embeds itself."""
    prompt = request.prompt
    return ScheduledRange(
        request.request_id, stage, depth, start, end - start, prompt.chunk_start(start), prompt.hidden_row_offset(start),
        depth == 0 and start >= prompt.num_preluded_tokens,
    )  # fmt: skip
