"""A workload: who asks for what and when, and, for backends only, how much each request will really produce.

`load_workload` is the one way in, for traces, synthetic processes and presets. What a workload holds is
settled here: request ids in source order, times rebased to the first arrival, outputs cut to what the client
asked for.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from policies.core.errors import InputError
from policies.core.seam.clients import Clients
from policies.core.seam.guesses import AcceptanceOracle
from policies.core.seam.request import ExitOracle, Oracle, Request
from workloads.columns import Columns, IntLists
from workloads.drawn import MAX_TOKENS
from workloads.presets import generate_preset, resolve_preset
from workloads.prompts import Prompts, read_prompts
from workloads.repeat import repeat_columns
from workloads.rng import stream
from workloads.spec import LiveSpec, PresetSpec, PromptsSpec, SyntheticSpec, TraceSpec, WorkloadSpec
from workloads.synthetic import draw_lengths, generate
from workloads.timestamps import MAX_SPAN_NS
from workloads.trace import read_trace


@dataclass(frozen=True, slots=True)
class RecordedOutputs:
    """The oracle of a workload whose output lengths are known, by request id."""

    tokens: "array[int]" = field(repr=False)

    def output_tokens(self, request_id: int) -> int:
        """Tokens the request really produces, at least 1 and at most its `max_tokens`."""
        return self.tokens[request_id]


@dataclass(frozen=True, slots=True)
class RecordedExits:
    """Where tokens leave: `loops` of each request's decoded tokens in order, the last one repeated; none
    means never early."""

    loops: IntLists = field(repr=False)
    prompt_tokens: "array[int]" = field(repr=False)

    def exit_loops(self, request_id: int, position: int) -> int:
        """Loops after which the token at `position` leaves; the first decoded token is at the prompt's
        end."""
        loops = self.loops[request_id]
        return loops[min(position - self.prompt_tokens[request_id], len(loops) - 1)] if loops else MAX_TOKENS


@dataclass(frozen=True, slots=True)
class RecordedGuesses:
    """Which guesses are right: `guessed` has 1 or 0 for each request's tokens that can be guessed, in order,
    the last one repeated; none means none is right."""

    guessed: IntLists = field(repr=False)
    prompt_tokens: "array[int]" = field(repr=False)

    def is_right(self, request_id: int, position: int, rank: int) -> bool:
        """The first decoded token is at the prompt's end, and the first that can be guessed follows it."""
        guessed = self.guessed[request_id]
        at = position - self.prompt_tokens[request_id] - 1
        return bool(guessed) and guessed[min(at, len(guessed) - 1)] == 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of (arrival_ns, request_id), the first at 0 ns, with ids 0 .. n-1 in source order.

    With `concurrency` at most so many are outstanding at a time and `arrival_ns` is the earliest a request
    may arrive (0 for a pure closed loop). `skipped_rows` failed when they were recorded and are not among
    `requests`. `notes` are sentences for the user. `max_context` is the longest prompt plus `max_tokens` that
    the user allows; the engine refuses requests above it. `patience_ns` says of the requests in it how long
    after their arrival the client hangs up: the engine's to know, not the policies'. `exits` says where
    tokens leave and `guessed` which guesses are right, if the source knows it; for backends only. Requests of
    one that `is_live` are not known: a server's clients send them. `prompts` are what requests say, where the
    source has more than lengths.
    """

    name: str
    requests: Sequence[Request] = field(repr=False)
    oracle: Oracle = field(repr=False)
    concurrency: int | None = None
    skipped_rows: int = 0
    notes: tuple[str, ...] = ()
    max_context: int | None = None
    patience_ns: Mapping[int, int] | None = field(default=None, repr=False)
    exits: ExitOracle | None = field(default=None, repr=False)
    guessed: AcceptanceOracle | None = field(default=None, repr=False)
    is_live: bool = False
    prompts: Prompts | None = field(default=None, repr=False)

    def clients(self) -> Clients:
        """Whoever sends these requests: a fresh inbox for one run. Raises `InputError` where nobody here
        knows them."""
        self.check_live(False)
        return Clients(self.requests, self.concurrency, self.patience_ns)

    def check_live(self, is_served: bool) -> None:
        """Raise `InputError` unless requests come from where the command gets them."""
        if self.is_live and not is_served:
            raise InputError(
                "workload.kind: live, its requests come from clients: expected the command serve"
            )
        if is_served and not self.is_live:
            raise InputError(
                f"workload.kind: {self.name} knows its requests, expected live, or no workload, for serve"
            )

    def recorded_exits(self) -> ExitOracle:
        """`exits`. Raises `InputError` when the source does not know them."""
        if self.exits is None:
            raise InputError(
                "exit.mode: trace needs the loops of every token, expected a workload with exit_loops"
            )
        return self.exits


def load_workload(spec: WorkloadSpec, seed: int, base_dir: Path = Path(".")) -> Workload:
    """The workload that `spec` describes; paths in it are relative to `base_dir`.

    The same spec, files and seed give the same workload in every process. Raises `InputError` with one
    sentence for whatever in the files or keys cannot be used.
    """
    if isinstance(spec, LiveSpec):
        return Workload("live", (), RecordedOutputs(array("q")), max_context=spec.max_context, is_live=True)
    if isinstance(spec, PromptsSpec):
        columns, prompts = read_prompts(spec, seed, base_dir)
        return replace(_assemble(columns, spec, seed), prompts=prompts)
    if isinstance(spec, TraceSpec):
        columns = read_trace(spec, seed, base_dir)
        repeat_columns(columns, spec, seed)
        if spec.concurrency is not None:
            columns.concurrency = spec.concurrency
        return _assemble(columns, spec, seed, _time_scale(columns, spec))
    if isinstance(spec, PresetSpec):
        resolved = resolve_preset(spec)
        return _assemble(generate_preset(spec, seed), resolved, seed)
    return _assemble(generate(spec, seed), spec, seed)


def _assemble(
    columns: Columns,
    spec: TraceSpec | SyntheticSpec | PromptsSpec,
    seed: int,
    time_scale: Fraction = Fraction(1),
) -> Workload:
    max_tokens = spec.max_tokens
    notes = [*columns.notes]
    arrivals = _rebased(columns, time_scale)
    num_late = _count_out_of_order(arrivals)
    if num_late:
        notes.append(f"{num_late} rows were out of order and were sorted stably by arrival time")
    if columns.skipped_rows:
        notes.append(
            f"{columns.skipped_rows} failed rows (zero prompt or output tokens) were counted and not "
            "simulated"
        )
    requests, outputs, num_cut = [], array("q"), 0
    for request_id, true_tokens in enumerate(columns.output_tokens):
        asked = columns.max_tokens[request_id] or max_tokens or true_tokens
        num_cut += true_tokens > asked
        outputs.append(min(true_tokens, asked))
        requests.append(
            Request(
                request_id,
                arrivals[request_id],
                columns.prompt_tokens[request_id],
                asked,
                columns.priority[request_id],
                columns.prefix_blocks[request_id] if columns.prefix_blocks is not None else (),
                columns.block_tokens,
            )
        )
    if num_cut:
        notes.append(f"{num_cut} outputs were longer than max_tokens and were cut to it")
    requests.sort(key=lambda request: (request.arrival_ns, request.request_id))
    return Workload(
        columns.name,
        tuple(requests),
        RecordedOutputs(outputs),
        columns.concurrency,
        columns.skipped_rows,
        tuple(notes),
        spec.max_context,
        _patience(columns, spec, seed, time_scale),
        RecordedExits(columns.exit_loops, columns.prompt_tokens) if columns.exit_loops is not None else None,
        RecordedGuesses(columns.guessed, columns.prompt_tokens) if columns.guessed is not None else None,
    )


def _time_scale(columns: Columns, spec: TraceSpec) -> Fraction:
    """What every time is multiplied by, exactly: given, or what brings the mean rate, n - 1 gaps over the
    span, to the one that is asked for. All gaps change alike, so bursts stay bursts."""
    if spec.rate is None:
        return Fraction(str(spec.time_scale))
    num_gaps = len(columns) - 1
    span_ns = max(columns.arrival_ns) - min(columns.arrival_ns)
    if not span_ns:
        raise InputError(
            f"workload.rate: {spec.rate:g}, expected arrivals at different times, which can be stretched"
        )
    scale = Fraction(num_gaps * 10**9, span_ns) / Fraction(str(spec.rate))
    columns.notes.append(
        f"arrivals come at {spec.rate:g} requests/s instead of {1e9 * num_gaps / span_ns:.4g}: all times are "
        f"multiplied by {float(scale):.4g}"
    )
    return scale


def _patience(
    columns: Columns, spec: TraceSpec | SyntheticSpec | PromptsSpec, seed: int, scale: Fraction
) -> dict[int, int] | None:
    """Nanoseconds from arrival to hang-up by request id: drawn where the spec says so, else as recorded, on
    the scaled clock."""
    if spec.patience_ms is not None:
        drawn_ms = draw_lengths(spec.patience_ms, len(columns), stream(seed, "patience"))
        return {request_id: 1_000_000 * patience_ms for request_id, patience_ms in enumerate(drawn_ms)}
    return {
        key: value * scale.numerator // scale.denominator for key, value in columns.patience_ns.items()
    } or None


def _rebased(columns: Columns, scale: Fraction) -> "array[int]":
    """Arrival times from the first one on, times `scale`, in exact integer arithmetic, rounded down."""
    origin_ns = min(columns.arrival_ns)
    span_ns = max(columns.arrival_ns) - origin_ns + max(columns.patience_ns.values(), default=0)
    if span_ns * scale > MAX_SPAN_NS:
        raise InputError(
            f"workload.time_scale: {float(scale)}, expected a factor that keeps all arrivals and hang-ups "
            f"within 146 years, found {span_ns} ns times that"
        )
    return array(
        "q", ((time_ns - origin_ns) * scale.numerator // scale.denominator for time_ns in columns.arrival_ns)
    )


def _count_out_of_order(arrivals: Sequence[int]) -> int:
    latest = count = 0
    for arrival_ns in arrivals:
        count += arrival_ns < latest
        latest = max(latest, arrival_ns)
    return count
