"""What a policy must answer. What it may read is `policies.core.seam.view`; together the whole contract with
the engine room.

A policy is a pure choice: the same view gives the same selection. It keeps no state, reads no clock, and
never sees output lengths or exit depths. Whatever it proposes is validated; see
`policies.core.engine.scheduler`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.core.seam.batch import Selection
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from policies.core.seam.view import View


class Policy(ABC):
    """One scheduling policy. A subclass is one file in `policies/` and one line in `policies.registry`."""

    name: ClassVar[str]
    splits_prefill: ClassVar[bool] = True
    """Whether prompts may return to the scheduler between depths; such policies need a model and a KV layout
    that allow it."""
    is_wavefront: ClassVar[bool] = False
    """Whether a request may have one chunk in flight per depth, and so needs a hidden ring of that many
    slots."""

    guesses: ClassVar[Literal["wavefront", "drafts", "never"]] = "wavefront"
    """How it runs tokens that are guessed: at several depths at once, or one after another as drafts that are
    then checked in one submission, or not at all."""

    repeats: ClassVar[bool] = False
    """Whether `select`, where the view has no prompts, looks at nothing but limits, exits, the order of
    requests, their phases and depths, and how many batches ago each was scheduled; and, where all rows fit
    into a batch, takes those alike who stand alike in these, whoever and (with `min_coda_batch_size` 1)
    however many they are. Then it decides alike, token after token, and a simulation need not ask it every
    time. One that reads times, positions or lengths must not say so."""

    def resident_chunks(self, num_loops: int) -> int:
        """Chunks of one prompt that may be between their first staging and their last depth: slots of a
        hidden ring."""
        return num_loops if self.is_wavefront else 1

    @abstractmethod
    def select(self, view: View) -> Selection | None:
        """Propose the next batch, or None when no running request has anything left to schedule."""

    def admission_rank(self, request: Request) -> int:
        """Where a request stands, lower first, among those of its priority: in whose order requests are let
        in, given blocks and, from the last on, preempted. It is asked when a request comes and must always
        say the same; equals go by arrival. A rank that grows with the arrival time keeps anybody from waiting
        for ever."""
        return 0

    def chooser(self, model: ModelShape) -> Callable[[View], Selection | None]:
        """What is asked in runs of `model`: `select`, unless a policy consults what depends on the model, and
        gets it ready here. Raises `InputError` when it cannot."""
        return self.select

    def notes(self, model: ModelShape) -> tuple[str, ...]:
        """What a summary should say of what the policy believes."""
        return ()

    def check_card(self, model: ModelShape, card: str) -> None:  # noqa: B027 - most believe nothing
        """Raise `InputError` when what the policy believes was not measured on `card`, on which it runs."""

    def check(self, model: ModelShape, scheduler: SchedulerSettings, cache: CacheSettings) -> None:
        """Raise `InputError` when this policy cannot run with that model or cache, or settings contradict
        each other."""
        if cache.allocation == "incremental" and cache.preemption == "off":
            raise InputError(
                "cache.allocation: incremental needs cache.preemption recompute or swap: when blocks run "
                "out, running requests would wait for each other's for ever"
            )
        if cache.layout == "shared" and cache.prefix_caching:
            raise InputError(
                "cache.prefix_caching: true cannot run with cache.layout shared: a prefix is reused from "
                "the planes of all depths, and shared keeps one; use last_exited"
            )
        if cache.layout == "shared" and self.splits_prefill:
            raise InputError(
                f"policy {self.name} cannot run with cache.layout shared: a prompt token needs the final K/V "
                "of the tokens before it at every depth, so prompts cannot stop between depths; use atomic "
                "or last_exited"
            )
        if cache.layout == "shared" and scheduler.chunk_tokens != 1:
            raise InputError(
                "cache.layout: shared runs a prompt token through all depths before the next one, which "
                f"reads its last K/V; expected scheduler.prefill_chunk_size 1, found {scheduler.chunk_tokens}"
            )
        if model.atomic_prefill_only and self.splits_prefill:
            raise InputError(
                f"policy {self.name} cannot run model {model.name}, which needs atomic prefill; use atomic"
            )
