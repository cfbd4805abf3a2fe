"""What requests ask of the device beside their lengths: prompts as token ids, how tokens are drawn, what ends
an answer."""

from typing import Protocol

import numpy as np

from executor.prompts import prompt_ids
from policies.config.runconfig import SamplingSettings
from policies.core.seam.request import Request
from workloads.asked import Sampling
from workloads.prompts import Prompts
from workloads.serving.inbox import LiveInbox
from workloads.serving.spelling import Spelling
from workloads.text import Tokenizer


class Asking(Protocol):
    def prompt(self, request: Request) -> np.ndarray:
        """[prompt_tokens] int32 token ids."""
        ...

    def sampling(self, request_id: int) -> Sampling: ...

    def is_last(self, request_id: int, token: int) -> bool:
        """Whether `token`, which the request has just been given, ends its answer. Asked once for each token
        of a request that has not ended."""
        ...

    def ended(self, request_id: int) -> None:
        """Nothing more is asked of a request."""
        ...


class AsConfigured:
    """Requests of a workload that knows lengths: drawn prompts, the config's sampling, ends known before."""

    def __init__(self, seed: int, vocab_size: int, sampling: SamplingSettings) -> None:
        self._seed, self._vocab_size = seed, vocab_size
        self._sampling = sampling_of(sampling)

    def prompt(self, request: Request) -> np.ndarray:
        return prompt_ids(self._seed, request, self._vocab_size)

    def sampling(self, request_id: int) -> Sampling:
        return self._sampling

    def is_last(self, request_id: int, token: int) -> bool:
        return False

    def ended(self, request_id: int) -> None:
        """Nothing was kept of it."""


class AsWritten(AsConfigured):
    """Requests of a workload that has prompts: an answer ends at one of `eos_ids` unless they are ignored."""

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        sampling: SamplingSettings,
        prompts: Prompts,
        eos_ids: tuple[int, ...],
    ) -> None:
        super().__init__(seed, vocab_size, sampling)
        self._prompts = prompts
        self._eos_ids = frozenset(() if prompts.ignore_eos else eos_ids)

    def prompt(self, request: Request) -> np.ndarray:
        return np.array(self._prompts.ids[request.request_id], dtype=np.int32)

    def is_last(self, request_id: int, token: int) -> bool:
        return token in self._eos_ids


class AsClientsSay:
    """Requests of clients who are connected. A stop string is looked for in the text that the client gets,
    with the same words."""

    def __init__(self, inbox: LiveInbox, eos_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> None:
        self._inbox, self._eos_ids, self._tokenizer = inbox, frozenset(eos_ids), tokenizer
        self._spelled: dict[int, Spelling] = {}

    def prompt(self, request: Request) -> np.ndarray:
        return np.array(self._inbox.asked(request.request_id).prompt, dtype=np.int32)

    def sampling(self, request_id: int) -> Sampling:
        return self._inbox.asked(request_id).sampling

    def is_last(self, request_id: int, token: int) -> bool:
        asked = self._inbox.asked(request_id)
        if token in self._eos_ids and not asked.ignore_eos:
            return True
        if not asked.stop:
            return False
        spelling = self._spelled.get(request_id)
        if spelling is None:
            spelling = self._spelled[request_id] = Spelling(self._tokenizer, None, asked.stop)
        spelling.push(token)
        return spelling.is_stopped

    def ended(self, request_id: int) -> None:
        self._spelled.pop(request_id, None)


def sampling_of(settings: SamplingSettings) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p)
