"""What a client asks for, as it crosses from the HTTP process to the engine's."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: greedy at temperature 0; `top_k` 0 and `top_p` 1 keep every token. `seed` None:
    the run's, so that two requests differ; one that is given makes a request repeat itself."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its client put it. `number` is the HTTP process's own, counted from 0, and its id in the
    run: requests come to the engine in that order."""

    number: int
    prompt: "array[int]" = field(repr=False)
    max_tokens: int = 16
    priority: int = 0
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def fields(self) -> dict[str, Any]:
        """All but the prompt, as JSON holds it."""
        sampling = self.sampling
        return {
            "number": self.number,
            "max_tokens": self.max_tokens,
            "priority": self.priority,
            "sampling": [sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed],
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], prompt: bytes) -> "Asked":
        ids = array("i")
        ids.frombytes(prompt)
        return cls(
            fields["number"],
            ids,
            fields["max_tokens"],
            fields["priority"],
            Sampling(*fields["sampling"]),
            tuple(fields["stop"]),
            fields["ignore_eos"],
        )
