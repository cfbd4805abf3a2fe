"""What a server is told when it starts, as it crosses to the HTTP process."""

from dataclasses import asdict, dataclass, field
from typing import Any

from workloads.asked import Sampling


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what one client, and all of them, may ask. Times are in seconds."""

    max_outstanding: int = 512
    """Requests that wait or run; the next one is answered 429."""
    max_connections: int = 1024
    max_body_bytes: int = 4_000_000
    header_s: float = 10.0
    """For a whole head, from the first byte or the opening of a connection."""
    body_s: float = 30.0
    idle_s: float = 60.0
    """Between two requests of a connection."""
    answer_s: float = 600.0
    """For all of an answer: a client that has not taken it by then is cut off."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`model` is the name that clients use. `tokenizer` is a path or None: then prompts are token ids and
    answers are spelled as ids, or where `placeholder` stands for every token, by that. `created_s` is the
    start in seconds since 1970, `origin_ns` where the run's clock was 0, on the system's monotonic clock."""

    model: str
    max_context: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling: Sampling
    tokenizer: str | None
    placeholder: str | None
    created_s: int
    origin_ns: int
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = field(default=None, repr=False)

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Settings":
        rest = {key: value for key, value in fields.items() if key not in ("sampling", "limits", "eos_ids")}
        return cls(
            sampling=Sampling(**fields["sampling"]),
            limits=Limits(**fields["limits"]),
            eos_ids=tuple(fields["eos_ids"]),
            **rest,
        )
