"""The `workload` section of a configuration, as checked, frozen values.

Knows the keys (what is drawn is `workloads.drawn`'s), and turns every mistake into one sentence. Opens no
file.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError, model_validator

from policies.core.errors import InputError
from policies.process.documents import LARGEST_INT
from policies.process.sentences import expectation, nearest, shown
from workloads.drawn import (
    Arrival,
    Burst,
    Checked,
    Choice,
    Closed,
    Constant,
    Count,
    Gamma,
    Lengths,
    Lognormal,
    NotNegative,
    Poisson,
    Positive,
    Requests,
    SharedPrefix,
    Text,
    Tokens,
    Uniform,
)

Spec = TypeVar("Spec")


class TraceColumns(Checked):
    """Which columns of a file in no known format say what. Without `arrival` it has lengths only."""

    arrival: Text | None = None
    prompt_tokens: Text
    output_tokens: Text
    max_tokens: Text | None = None
    priority: Text | None = None
    hash_ids: Text | None = None


class TraceSpec(Checked):
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


class SyntheticSpec(Checked):
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


class PresetSpec(Checked):
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


class PromptsSpec(Checked):
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


class LiveSpec(Checked):
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
