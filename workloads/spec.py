"""The `workload` section of a configuration, as checked, frozen values.

Knows the keys and their ranges, and turns every mistake into one sentence. Opens no file and draws no random
number.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from policies.core.errors import InputError
from policies.process.documents import LARGEST_INT
from policies.process.sentences import expectation, nearest, shown

Spec = TypeVar("Spec")
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


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Burst(_Checked):
    """Everything arrives at once."""

    process: Literal["burst"] = "burst"
    concurrency: Count | None = None


class Poisson(_Checked):
    """Independent arrivals, `rate` a second: exponential gaps, cv 1."""

    process: Literal["poisson"] = "poisson"
    rate: Positive
    concurrency: Count | None = None


class Gamma(_Checked):
    """Gamma gaps of mean 1/`rate` seconds and coefficient of variation `cv`; cv 1 is poisson, above 1 is
    bursty."""

    process: Literal["gamma"] = "gamma"
    rate: Positive
    cv: Annotated[float, Field(strict=True, ge=1e-9, le=1e9)]
    concurrency: Count | None = None


class Constant(_Checked):
    """One arrival every 1/`rate` seconds."""

    process: Literal["constant"] = "constant"
    rate: Positive
    concurrency: Count | None = None


class Closed(_Checked):
    """A closed loop: `concurrency` clients, each of which sends its next request when its last one has
    ended."""

    process: Literal["closed"] = "closed"
    concurrency: Count


class Lognormal(_Checked):
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


class Uniform(_Checked):
    """Every whole number of tokens from `min` to `max`, both included, alike."""

    distribution: Literal["uniform"] = "uniform"
    min: Tokens
    max: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> "Uniform":
        _check_ordered(self.min, self.max)
        return self


class Choice(_Checked):
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


class SharedPrefix(_Checked):
    """Prompts begin with one of `groups` texts of `tokens` tokens, each as likely: system prompts, documents
    asked about."""

    groups: Count
    tokens: Tokens


class TraceColumns(_Checked):
    """Which columns of a file in no known format say what. Without `arrival` it has lengths only."""

    arrival: Text | None = None
    prompt_tokens: Text
    output_tokens: Text
    max_tokens: Text | None = None
    priority: Text | None = None
    hash_ids: Text | None = None


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


class TraceSpec(_Checked):
    """`kind: trace`: requests from a file. Recorded times and lengths are taken as they are, but for the keys
    given here.

    `start_s` and `end_s` cut out a window in the trace's own time, in seconds after its first request (of a
    ServeGen file, after its beginning); `limit` takes the first so many usable rows of it in file order and
    reads no further; `repeat` runs them so many times over. `jitter_s` makes every arrival up to so many
    seconds later, then `time_scale` multiplies it (2 is half the load), or `rate` says the requests a second
    to stretch or squeeze the whole to. `arrival` replaces recorded times and is needed for files that have
    none. `columns` names the columns of a file in no known format. `max_tokens`
    is what the client asks for: true outputs above it are cut to it; null asks for exactly the true output.
    `max_context` drops nothing here: the engine refuses requests above it, so that counts add up.
    `patience_ms` is how many milliseconds after its arrival a client hangs up, drawn like lengths, not
    scaled; it replaces a recorded `cancel_ns`. `timestamp_unit` (or `unit`) and `block_tokens` (prompt tokens
    of one hash id) replace the format's own. `dataset` belongs to ServeGen files.
    """

    kind: Literal["trace"] = "trace"
    path: Text
    format: Literal["auto", "azure", "mooncake", "burstgpt", "vidur", "servegen", "plain"] = "auto"
    limit: Annotated[int, Field(strict=True, ge=1, le=LARGEST_INT)] | None = None
    repeat: Requests = 1
    jitter_s: Annotated[float, Field(strict=True, ge=0, le=1e9)] = 0.0
    time_scale: Positive = 1.0
    rate: Positive | None = None
    columns: TraceColumns | None = None
    timestamp_unit: Annotated[
        Literal["auto", "s", "ms", "us", "ns"], Field(validation_alias=AliasChoices("timestamp_unit", "unit"))
    ] = "auto"
    block_tokens: Tokens | None = None
    arrival: Arrival | None = None
    concurrency: Count | None = None
    max_tokens: Tokens | None = None
    max_context: Tokens | None = None
    patience_ms: Lengths | None = None
    dataset: Text | None = None
    start_s: NotNegative | None = None
    end_s: Positive | None = None

    @model_validator(mode="after")
    def _one_say(self) -> "TraceSpec":
        if self.rate is not None and (self.time_scale != 1 or self.arrival is not None):
            other = "arrival" if self.arrival is not None else f"time_scale {self.time_scale:g}"
            raise ValueError(f"expected rate or {other.split()[0]}, found rate {self.rate:g} and {other}")
        if self.columns is not None and self.format != "auto":
            raise ValueError(f"expected columns or format, found columns and format {self.format}")
        if self.end_s is not None and self.end_s <= (self.start_s or 0):
            raise ValueError(f"expected start_s < end_s, found {self.start_s or 0:g} and {self.end_s:g}")
        return self

    @model_validator(mode="after")
    def _one_concurrency(self) -> "TraceSpec":
        inner = None if self.arrival is None else self.arrival.concurrency
        if None is not self.concurrency != inner is not None:
            raise ValueError(
                f"expected concurrency or arrival.concurrency, found {self.concurrency} and {inner}"
            )
        return self


class SyntheticSpec(_Checked):
    """`kind: synthetic`: `num_requests` requests by an arrival process and two length rules. The rest as in
    `TraceSpec`.

    `exit_loops` are the loops of every decoded token, in order of request and position: for `exit.mode:
    trace`.
    """

    kind: Literal["synthetic"] = "synthetic"
    num_requests: Requests
    arrival: Arrival = Burst()
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: SharedPrefix | None = None
    exit_loops: Lengths | None = None
    max_tokens: Tokens | None = None
    max_context: Tokens | None = None
    patience_ms: Lengths | None = None


class PresetSpec(_Checked):
    """`kind: preset`: a shipped workload by `name`. Every synthetic key given here replaces the preset's own.

    `rate` and `concurrency` are short for the same keys inside the preset's `arrival`.
    """

    kind: Literal["preset"] = "preset"
    name: Text
    num_requests: Requests | None = None
    arrival: Arrival | None = None
    prompt_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    shared_prefix: SharedPrefix | None = None
    exit_loops: Lengths | None = None
    max_tokens: Tokens | None = None
    max_context: Tokens | None = None
    patience_ms: Lengths | None = None
    rate: Positive | None = None
    concurrency: Count | None = None


class PromptsSpec(_Checked):
    """`kind: prompts`: what `path` says, JSON lines with `prompt` (a text or token ids) and perhaps
    `max_tokens`, `answer` and `priority`.

    `max_tokens` is for lines that name none. `tokenizer` is as in `LiveSpec`. Answers end at the model's end
    of sequence unless `ignore_eos`; a simulation samples nothing, and its answers get `max_tokens` long.
    """

    kind: Literal["prompts"] = "prompts"
    path: Text
    limit: Requests | None = None
    arrival: Arrival = Burst()
    max_tokens: Tokens = 256
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    tokenizer: Text | None = None
    max_context: Tokens | None = None
    patience_ms: Lengths | None = None


class LiveSpec(_Checked):
    """`kind: live`: requests of the clients of a server.

    `max_context` bounds prompt and answer together. `tokenizer` is a `tokenizer.json`, or a folder with one,
    where the model has none of its own. `output_tokens` says how long answers get in a simulation to requests
    that do not `ignore_eos`, at most their `max_tokens`; without it all are that long.
    """

    kind: Literal["live"] = "live"
    max_context: Tokens = 4096
    tokenizer: Text | None = None
    output_tokens: Lengths | None = None


WorkloadSpec = TraceSpec | SyntheticSpec | PresetSpec | PromptsSpec | LiveSpec
WORKLOAD_ADAPTER: TypeAdapter[WorkloadSpec] = TypeAdapter(
    Annotated[WorkloadSpec, Field(discriminator="kind")]
)
SYNTHETIC_ADAPTER: TypeAdapter[SyntheticSpec] = TypeAdapter(SyntheticSpec)

_BY_TAG: dict[str, type[BaseModel]] = {
    "trace": TraceSpec, "synthetic": SyntheticSpec, "preset": PresetSpec, "prompts": PromptsSpec,
    "live": LiveSpec, "burst": Burst, "poisson": Poisson, "gamma": Gamma, "constant": Constant,
    "closed": Closed, "lognormal": Lognormal, "uniform": Uniform, "choice": Choice,
    "shared_prefix": SharedPrefix, "columns": TraceColumns,
}  # fmt: skip
_TAGS = {*_BY_TAG, "integer", "list"} - {"shared_prefix", "columns"}
_EXAMPLES = {
    "trace": "{kind: trace, path: t.csv}",
    "synthetic": "{kind: synthetic, num_requests: 100, prompt_tokens: 512, output_tokens: 64}",
    "preset": "{kind: preset, name: chat}",
    "prompts": "{kind: prompts, path: p.jsonl}",
    "live": "{kind: live}",
}


def parse_workload(raw: object, where: str, section: str = "workload") -> WorkloadSpec:
    """The checked form of a raw `workload` mapping.

    `where` names the file in errors. Raises `InputError` with one sentence: the key, its value and what was
    expected; an unknown key also gets the nearest known one.
    """
    return _validated(WORKLOAD_ADAPTER, raw, where, section)


def parse_synthetic(raw: object, where: str, section: str = "workload") -> SyntheticSpec:
    """`parse_workload` for a mapping that can only be synthetic: the body of a preset. Raises
    `InputError`."""
    return _validated(SYNTHETIC_ADAPTER, raw, where, section)


def _validated(adapter: TypeAdapter[Spec], raw: object, where: str, section: str) -> Spec:
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    problem = next((item for item in problems if item["type"] == "extra_forbidden"), problems[0])
    *outer, last = problem["loc"] or ("",)
    key = ".".join([section, *(str(part) for part in outer if part not in _TAGS), shown(last).strip("'")])
    if problem["type"] == "extra_forbidden":
        raise InputError(f"{where}: {_unknown_key(key, str(last), [str(part) for part in outer])}")
    if problem["type"] == "missing":
        raise InputError(f"{where}: {key}: missing, expected a value")
    if problem["type"] in ("union_tag_not_found", "union_tag_invalid") or not isinstance(raw, Mapping):
        found = raw.get("kind") if isinstance(raw, Mapping) else raw
        raise InputError(
            f"{where}: {section}.kind: {shown(found)}, expected trace, synthetic, preset, prompts or live"
        )
    if last in _TAGS or last == "":
        key = key.rpartition(".")[0]
    raise InputError(f"{where}: {key}: {shown(problem['input'])}, {expectation(problem['msg'])}")


def _unknown_key(key: str, name: str, outer: list[str]) -> str:
    """The sentence for a key that its mapping does not have; `outer` leads there."""
    known = list(
        _BY_TAG[next((part for part in reversed(outer) if part in _BY_TAG), "synthetic")].model_fields
    )
    others = [kind for kind in _EXAMPLES if name in _BY_TAG[kind].model_fields]
    if outer and outer[-1] in _EXAMPLES and others:
        return (
            f"unknown key {key!r} of kind {outer[-1]}, it belongs to {' and '.join(others)}; another kind "
            f"needs the whole section, like --set 'workload={_EXAMPLES[outer[-1]]}'; expected one of "
            f"{', '.join(known)}"
        )
    return f"unknown key {key!r}{nearest(name, known)}"
