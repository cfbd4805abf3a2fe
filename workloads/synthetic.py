"""Generated requests: arrival processes and token lengths drawn from seeded streams, one stream for each of
the three.

A longer workload with the same seed begins with the shorter one, and another rate stretches the same
arrivals.
"""

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice

import numpy as np
import numpy.typing as npt

from policies.core.errors import InputError
from workloads.columns import Columns, IntLists, int_column
from workloads.drawn import (
    MAX_TOKENS,
    Arrival,
    Burst,
    Choice,
    Closed,
    Constant,
    Gamma,
    Lengths,
    Lognormal,
    Uniform,
)
from workloads.rng import stream
from workloads.spec import SyntheticSpec
from workloads.timestamps import MAX_SPAN_NS

MAX_EXITS = 50_000_000
"""Tokens whose loops are drawn before a run."""


def generate(spec: SyntheticSpec, seed: int, name: str = "synthetic") -> Columns:
    """The columns of `spec.num_requests` generated requests. Raises `InputError` when arrivals would pass 292
    years."""
    columns = Columns(name, concurrency=spec.arrival.concurrency)
    columns.arrival_ns = arrival_times(spec.arrival, spec.num_requests, seed)
    prompts = draw_lengths(spec.prompt_tokens, spec.num_requests, stream(seed, "prompt_tokens"))
    outputs = draw_lengths(spec.output_tokens, spec.num_requests, stream(seed, "output_tokens"))
    for prompt_tokens, output_tokens in zip(prompts, outputs, strict=True):
        columns.append(prompt_tokens, output_tokens)
    if spec.shared_prefix is not None:
        columns.prefix_blocks, columns.block_tokens = IntLists(), spec.shared_prefix.tokens
        for group in stream(seed, "shared_prefix").integers(0, spec.shared_prefix.groups, spec.num_requests):
            columns.prefix_blocks.append((int(group),))
    if spec.exit_loops is not None:
        if sum(outputs) > MAX_EXITS:
            raise InputError(
                f"workload.exit_loops: {sum(outputs)} output tokens, expected at most {MAX_EXITS}"
            )
        columns.exit_loops = IntLists()
        loops = iter(draw_lengths(spec.exit_loops, sum(outputs) - len(outputs), stream(seed, "exit_loops")))
        for output_tokens in outputs:
            columns.exit_loops.append(list(islice(loops, output_tokens - 1)))
    return columns


def arrival_times(arrival: Arrival, count: int, seed: int) -> "array[int]":
    """Nanoseconds of `count` arrivals, the first at 0, never falling.

    At 2 a second, constant arrivals are 0, 500,000,000, 1,000,000,000. Raises `InputError` past 292 years.
    """
    if isinstance(arrival, Burst | Closed):
        return array("q", bytes(8 * count))
    if isinstance(arrival, Constant):
        gap_ns = Fraction(10**9) / Fraction(str(arrival.rate))
        _check_span((count - 1) * gap_ns, arrival.rate)
        return array("q", (index * gap_ns.numerator // gap_ns.denominator for index in range(count)))
    rng = stream(seed, "arrivals")
    cv = arrival.cv if isinstance(arrival, Gamma) else 1.0
    shape = 1.0 / (cv * cv)
    # Unit-mean gaps: cv 1 is the exponential distribution itself, so that gamma with cv 1 is poisson.
    gaps = rng.standard_exponential(count) if cv == 1.0 else rng.standard_gamma(shape, count) / shape
    with np.errstate(over="ignore"):
        times_s = np.cumsum(gaps) / arrival.rate
    times_s -= times_s[0]
    _check_span(float(times_s[-1]) * 1e9, arrival.rate)
    return to_ns(times_s)


def _check_span(span_ns: float | Fraction, rate: float) -> None:
    if not span_ns < MAX_SPAN_NS:
        raise InputError(
            f"workload.arrival.rate: {rate}, expected a rate at which all requests arrive within 146 years"
        )


def to_ns(times_s: npt.NDArray[np.float64]) -> "array[int]":
    """Seconds as whole nanoseconds, rounded to the nearest."""
    return _column(np.rint(times_s * 1e9))


def draw_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> "array[int]":
    """Tokens of `count` requests: one number, a list cycled, or draws from a distribution."""
    if isinstance(lengths, int):
        return array("q", [lengths]) * count
    if isinstance(lengths, tuple):
        return array("q", (lengths[index % len(lengths)] for index in range(count)))
    if isinstance(lengths, Lognormal):
        with np.errstate(over="ignore"):
            drawn = np.exp(math.log(lengths.median) + lengths.sigma * rng.standard_normal(count))
        return _column(np.clip(np.rint(drawn), lengths.min, min(lengths.max, MAX_TOKENS)))
    if isinstance(lengths, Uniform):
        return _column(lengths.min + np.floor(rng.random(count) * (lengths.max - lengths.min + 1)))
    assert isinstance(lengths, Choice)
    return draw_values(lengths.values, lengths.weights or (1.0,) * len(lengths.values), count, rng)


def draw_values(
    values: Sequence[int], weights: Sequence[float], count: int, rng: np.random.Generator
) -> "array[int]":
    """`count` draws of `values`, each as often as its weight says. A value of weight 0 is never drawn."""
    bounds = np.cumsum(np.asarray(weights, dtype=np.float64))
    index = np.searchsorted(bounds / bounds[-1], rng.random(count), side="right")
    return _column(np.asarray(values, dtype=np.int64)[index])


def _column(values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> "array[int]":
    column = int_column()
    column.frombytes(values.astype(np.int64).tobytes())
    return column
