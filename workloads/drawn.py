"""What a workload draws, as checked, frozen values: when requests come, how long they are, what they share;
and the ranges of numbers in a `workload` section. Draws nothing."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

MAX_TOKENS = 2**31 - 1
"""The largest token count that is read as one; anything above is a damaged file or a typing mistake."""

MAX_REQUESTS = 5_000_000
"""Requests of a workload: each is an object of the engine, and more are not held at a time."""

Count = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
Requests = Annotated[int, Field(strict=True, ge=1, le=MAX_REQUESTS)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True, min_length=1)]


def _check_ordered(low: int, high: int) -> None:
    if low > high:
        raise ValueError(f"expected min ({low}) <= max ({high})")


class Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Burst(Checked):
    """Everything arrives at once."""

    process: Literal["burst"] = "burst"
    concurrency: Count | None = None


class Poisson(Checked):
    """Independent arrivals, `rate` a second: exponential gaps, cv 1."""

    process: Literal["poisson"] = "poisson"
    rate: Positive
    concurrency: Count | None = None


class Gamma(Checked):
    """Gamma gaps of mean 1/`rate` seconds and coefficient of variation `cv`; cv 1 is poisson, above 1 is
    bursty."""

    process: Literal["gamma"] = "gamma"
    rate: Positive
    cv: Annotated[float, Field(strict=True, ge=1e-9, le=1e9)]
    concurrency: Count | None = None


class Constant(Checked):
    """One arrival every 1/`rate` seconds."""

    process: Literal["constant"] = "constant"
    rate: Positive
    concurrency: Count | None = None


class Closed(Checked):
    """A closed loop: `concurrency` clients, each of which sends its next request when its last one has
    ended."""

    process: Literal["closed"] = "closed"
    concurrency: Count


class Lognormal(Checked):
    """exp(normal(ln `median`, `sigma`)) tokens, rounded, and clipped to [`min`, `max`].

    From a published median and p95: sigma = ln(p95 / median) / 1.645. Median 1020 and p95 4083 give 0.843.
    """

    distribution: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: NotNegative
    min: Tokens = 1
    max: Tokens = MAX_TOKENS

    @model_validator(mode="after")
    def _ordered(self) -> "Lognormal":
        _check_ordered(self.min, self.max)
        return self


class Uniform(Checked):
    """Every whole number of tokens from `min` to `max`, both included, alike."""

    distribution: Literal["uniform"] = "uniform"
    min: Tokens
    max: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> "Uniform":
        _check_ordered(self.min, self.max)
        return self


class Choice(Checked):
    """One of `values`, each with its weight (alike when `weights` is absent); weights need not add up to
    1."""

    distribution: Literal["choice"] = "choice"
    values: Annotated[tuple[Tokens, ...], Field(min_length=1)]
    weights: tuple[NotNegative, ...] | None = None

    @model_validator(mode="after")
    def _weighted(self) -> "Choice":
        if self.weights is not None and len(self.weights) != len(self.values):
            raise ValueError(
                f"expected one weight for each of the {len(self.values)} values, found {len(self.weights)}"
            )
        if self.weights is not None and not 0 < sum(self.weights) < float("inf"):
            raise ValueError("expected weights with a finite sum above 0")
        return self


class SharedPrefix(Checked):
    """Prompts begin with one of `groups` texts of `tokens` tokens, each as likely: system prompts, documents
    asked about."""

    groups: Count
    tokens: Tokens


def _process_of(value: Any) -> str | None:
    return _member(value, "process")


def _token_kind_of(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return "list"
    return _member(value, "distribution") if isinstance(value, Mapping | BaseModel) else "integer"


def _member(value: Any, key: str) -> str | None:
    found = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return found if isinstance(found, str) else None


Arrival = Annotated[
    Annotated[Burst, Tag("burst")]
    | Annotated[Poisson, Tag("poisson")]
    | Annotated[Gamma, Tag("gamma")]
    | Annotated[Constant, Tag("constant")]
    | Annotated[Closed, Tag("closed")],
    Discriminator(
        _process_of,
        custom_error_type="arrival",
        custom_error_message="expected a mapping with process: burst, poisson, gamma, constant or closed",
    ),
]
Lengths = Annotated[
    Annotated[Tokens, Tag("integer")]
    | Annotated[Annotated[tuple[Tokens, ...], Field(min_length=1)], Tag("list")]
    | Annotated[Lognormal, Tag("lognormal")]
    | Annotated[Uniform, Tag("uniform")]
    | Annotated[Choice, Tag("choice")],
    Discriminator(
        _token_kind_of,
        custom_error_type="lengths",
        custom_error_message=(
            "expected an integer, a list of integers or a mapping with distribution: lognormal, uniform or "
            "choice"
        ),
    ),
]
"""A whole number for each request (tokens, milliseconds): an integer, a list to cycle, or a distribution to
draw from."""
