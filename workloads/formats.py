"""The trace formats that are known, by the names of their columns, and how one is recognised. Data; reads no
row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.core.errors import InputError
from workloads.spec import TraceColumns


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format: which column says what. Names are compared without case and outer blanks, in any order.

    `arrival` maps each column that can hold the arrival time to the unit of its numbers: a fixed one, or None
    for `unit`, the format's default, which `timestamp_unit` and the size of epoch numbers override;
    `block_tokens` is such a default, too. A file need not have the columns after `unit`.
    """

    name: str
    arrival: Mapping[str, str | None]
    prompt: str
    output: str
    unit: str = "s"
    max_tokens: str | None = None
    priority: str | None = None
    blocks: str | None = None
    block_tokens: int = 0
    cancel: str | None = None
    exit_loops: str | None = None
    guessed: str | None = None

    @property
    def header(self) -> str:
        return f"{self.name} ({'|'.join(self.arrival)},{self.prompt},{self.output})"


FORMATS = (
    TraceFormat("azure", {"TIMESTAMP": None}, "ContextTokens", "GeneratedTokens"),
    TraceFormat(
        "mooncake",
        {"timestamp": None},
        "input_length",
        "output_length",
        unit="ms",
        blocks="hash_ids",
        block_tokens=512,
    ),
    TraceFormat("burstgpt", {"Timestamp": None}, "Request tokens", "Response tokens"),
    TraceFormat("vidur", {"arrived_at": None}, "num_prefill_tokens", "num_decode_tokens"),
    TraceFormat(
        "plain",
        {"arrival_s": "s", "arrival_ms": "ms", "arrival_ns": "ns", "arrival": None},
        "prompt_tokens",
        "output_tokens",
        max_tokens="max_tokens",
        priority="priority",
        cancel="cancel_ns",
        exit_loops="exit_loops",
        guessed="guessed",
    ),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A format as one file has it: the arrival column that is there (None: lengths only) and the unit of its
    numbers, if fixed."""

    format: TraceFormat
    arrival: str | None
    fixed_unit: str | None = field(default=None)


def mapped(columns: TraceColumns, names: Sequence[str], where: str) -> Layout:
    """The layout that a user's `columns` describe, of a file with columns `names`. Raises `InputError` for
    one that the file does not have, or has twice."""
    present = [normalise(name) for name in names]
    for key, name in columns:
        if name is not None and present.count(normalise(name)) != 1:
            found = f"{_shown(names)} have {present.count(normalise(name)) or 'no'} {name!r}"
            raise InputError(f"{where}: columns {found}, expected the one that workload.columns.{key} names")
    optional = (columns.max_tokens, columns.priority, columns.hash_ids)
    max_tokens, priority, blocks = (normalise(name) if name else None for name in optional)
    arrivals: dict[str, str | None] = {columns.arrival: None} if columns.arrival else {}
    chosen = TraceFormat(
        "columns",
        arrivals,
        columns.prompt_tokens,
        columns.output_tokens,
        max_tokens=max_tokens,
        priority=priority,
        blocks=blocks,
        block_tokens=512 if blocks else 0,
    )
    return Layout(chosen, columns.arrival)


def normalise(name: str) -> str:
    return name.strip().lower()


def recognise(columns: Sequence[str], wanted: str, where: str) -> Layout:
    """The layout of a file with these column names.

    `wanted` is a format's name, or auto for whichever fits; `where` names file and line in errors. Raises
    `InputError` when none fits (the sentence lists the known formats), when several do, and when the wanted
    one lacks a column.
    """
    names = [normalise(name) for name in columns]
    fits = [item for item in FORMATS if normalise(item.prompt) in names and normalise(item.output) in names]
    if wanted == "auto":
        if len(fits) > 1:
            which = " and ".join(item.name for item in fits)
            raise InputError(f"{where}: columns fit {which}, expected workload.format to say which")
        if not fits:
            known = "; ".join(item.header for item in FORMATS)
            raise InputError(
                f"{where}: unknown columns {_shown(columns)}, expected one of {known}; or a ServeGen "
                "*-trace.csv"
            )
        chosen = fits[0]
    else:
        chosen = next(item for item in FORMATS if item.name == wanted)
        if chosen not in fits:
            raise InputError(
                f"{where}: columns {_shown(columns)} are not {chosen.name}, expected {chosen.header}"
            )
    times = [name for name in chosen.arrival if normalise(name) in names]
    if len(times) > 1:
        raise InputError(f"{where}: columns {' and '.join(times)} both hold arrival times, expected one")
    optional = (
        chosen.max_tokens, chosen.priority, chosen.blocks, chosen.cancel, chosen.exit_loops, chosen.guessed
    )  # fmt: skip
    for used in (*times, chosen.prompt, chosen.output, *filter(None, optional)):
        if names.count(normalise(used)) > 1:
            raise InputError(
                f"{where}: column {used!r} occurs {names.count(normalise(used))} times, expected once"
            )
    if not times:
        return Layout(chosen, None)
    return Layout(chosen, times[0], chosen.arrival[times[0]])


def _shown(columns: Sequence[str]) -> str:
    text = ascii(",".join(columns))
    return text if len(text) <= 80 else f"{text[:76]}...'"
