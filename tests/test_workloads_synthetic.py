"""Generated workloads: exact values, the statistics they promise, streams that do not disturb each other, and
refused keys."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.errors import InputError
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

ROOT = Path(__file__).parent.parent
SECOND = 10**9


def synthetic(seed: int = 0, **keys: Any) -> Workload:
    body = {"kind": "synthetic", "num_requests": 5, "prompt_tokens": 10, "output_tokens": 2, **keys}
    return load_workload(parse_workload(body, "test"), seed)


def arrivals(workload: Workload) -> list[int]:
    return [request.arrival_ns for request in workload.requests]


def prompts(workload: Workload) -> list[int]:
    return [request.prompt_tokens for request in workload.requests]


def outputs(workload: Workload) -> list[int]:
    return [workload.oracle.output_tokens(request.request_id) for request in workload.requests]


def test_burst_constant_and_closed_arrivals_are_exact() -> None:
    assert arrivals(synthetic()) == [0] * 5
    assert arrivals(synthetic(arrival={"process": "constant", "rate": 2})) == [
        0,
        SECOND // 2,
        SECOND,
        3 * SECOND // 2,
        2 * SECOND,
    ]
    assert arrivals(synthetic(arrival={"process": "constant", "rate": 3})) == [
        0,
        333333333,
        666666666,
        SECOND,
        1333333333,
    ]
    closed = synthetic(arrival={"process": "closed", "concurrency": 3})
    assert arrivals(closed) == [0] * 5
    assert closed.concurrency == 3
    assert synthetic(arrival={"process": "poisson", "rate": 2, "concurrency": 4}).concurrency == 4


@pytest.mark.parametrize(
    ("process", "cv"), [("poisson", 1.0), ("gamma", 0.25), ("gamma", 1.0), ("gamma", 3.0)]
)
def test_random_arrivals_have_the_stated_rate_and_cv(process: str, cv: float) -> None:
    keys = {"cv": cv} if process == "gamma" else {}
    times = arrivals(synthetic(num_requests=40_000, arrival={"process": process, "rate": 5.0, **keys}))
    gaps = np.diff(times) / 1e9
    assert times[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_gamma_with_cv_1_is_poisson() -> None:
    gamma = synthetic(arrival={"process": "gamma", "rate": 2.0, "cv": 1})
    assert arrivals(gamma) == arrivals(synthetic(arrival={"process": "poisson", "rate": 2.0}))


WILD = {"distribution": "lognormal", "median": 9, "sigma": 1e6}


def test_lengths_are_a_number_a_cycle_or_drawn() -> None:
    assert prompts(synthetic(prompt_tokens=[256, 512, 768])) == [256, 512, 768, 256, 512]
    many = synthetic(
        num_requests=20_000,
        prompt_tokens={"distribution": "lognormal", "median": 1020, "sigma": 0.843, "min": 2, "max": 14050},
        output_tokens={"distribution": "choice", "values": [5, 7, 9], "weights": [1, 0, 3]},
    )
    drawn = np.array(prompts(many))
    assert np.median(drawn) == pytest.approx(1020, rel=0.03)
    assert np.percentile(drawn, 95) == pytest.approx(4083, rel=0.05)
    assert drawn.min() >= 2 and drawn.max() <= 14050
    counts = {value: outputs(many).count(value) for value in (5, 7, 9)}
    assert counts[7] == 0 and counts[5] / 20_000 == pytest.approx(0.25, abs=0.02)
    uniform = set(
        prompts(synthetic(num_requests=500, prompt_tokens={"distribution": "uniform", "min": 3, "max": 6}))
    )
    assert uniform == {3, 4, 5, 6}
    assert set(prompts(synthetic(num_requests=50, prompt_tokens={**WILD, "max": 50}))) == {1, 50}


DRAWN = {"distribution": "uniform", "min": 1, "max": 1000}


@given(st.integers(0, 2**40), st.integers(1, 60), st.integers(1, 60))
def test_streams_are_independent_and_longer_runs_begin_alike(seed: int, short: int, longer: int) -> None:
    keys: dict[str, Any] = {
        "arrival": {"process": "gamma", "rate": 2.0, "cv": 2.0},
        "prompt_tokens": DRAWN,
        "output_tokens": DRAWN,
    }
    base = synthetic(seed, num_requests=short, **keys)
    grown = synthetic(seed, num_requests=short + longer, **keys)
    assert grown.requests[:short] == base.requests
    assert prompts(
        synthetic(seed, num_requests=short, **{**keys, "arrival": {"process": "burst"}})
    ) == prompts(base)
    assert outputs(synthetic(seed, num_requests=short, **{**keys, "prompt_tokens": 7})) == outputs(base)
    assert arrivals(synthetic(seed, num_requests=short, **{**keys, "output_tokens": 7})) == arrivals(base)


def test_seeds_and_subsystems_differ() -> None:
    keys: dict[str, Any] = {"num_requests": 50, "prompt_tokens": DRAWN, "output_tokens": DRAWN}
    assert prompts(synthetic(0, **keys)) != prompts(synthetic(1, **keys))
    assert prompts(synthetic(0, **keys)) != outputs(synthetic(0, **keys))


def test_the_same_seed_gives_the_same_workload_in_every_process() -> None:
    program = (
        "from workloads.spec import parse_workload as p; from workloads.workload import load_workload as l;"
        "w = l(p({'kind': 'preset', 'name': 'chat', 'num_requests': 40}, ''), 7);"
        "print([(r, w.oracle.output_tokens(r.request_id)) for r in w.requests])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("0", "1", "random")
    }
    assert len(texts) == 1 and "Request(" in texts.pop()


def test_max_tokens_asks_for_more_or_cuts() -> None:
    workload = synthetic(output_tokens=[10, 80], max_tokens=64)
    assert {request.max_tokens for request in workload.requests} == {64}
    assert outputs(workload) == [10, 64, 10, 64, 10]


NAN, INF = math.nan, math.inf
REFUSED: list[tuple[Any, str]] = [
    (None, "workload.kind: None, expected trace, synthetic, preset, prompts or live"),
    ({}, "workload.kind: None, expected trace, synthetic, preset, prompts or live"),
    ({"kind": "traces"}, "workload.kind: 'traces', expected trace, synthetic, preset, prompts or live"),
    ({"kind": "trace"}, "workload.path: missing"),
    ({"kind": "trace", "path": "t", "limt": 3}, "unknown key 'workload.limt', expected one of kind, path"),
    (
        {"kind": "trace", "path": "t", "limit": 0},
        "workload.limit: 0, expected at least 1",
    ),
    (
        {"kind": "trace", "path": "t", "time_scale": 0},
        "workload.time_scale: 0, expected above 0",
    ),
    ({"kind": "trace", "path": "t", "time_scale": NAN}, "workload.time_scale: nan, expected a finite number"),
    ({"kind": "trace", "path": "t", "format": "azur"}, "workload.format: 'azur', expected 'auto', 'azure'"),
    (
        {"kind": "trace", "path": "t", "max_context": -1},
        "workload.max_context: -1, expected at least 1",
    ),
    ({"num_requests": 0}, "workload.num_requests: 0, expected"),
    ({"num_requests": True}, "workload.num_requests: True, expected a valid integer"),
    ({"prompt_tokens": 0}, "workload.prompt_tokens: 0, expected at least 1"),
    (
        {"prompt_tokens": [5, -2]},
        "workload.prompt_tokens.1: -2, expected at least 1",
    ),
    ({"prompt_tokens": []}, "workload.prompt_tokens: [], expected a list of at least 1 item"),
    ({"prompt_tokens": "512"}, "workload.prompt_tokens: '512', expected a valid integer"),
    ({"output_tokens": NAN}, "workload.output_tokens: nan, expected a valid integer"),
    (
        {"output_tokens": {"distribution": "normal"}},
        "expected an integer, a list of integers or a mapping with distribution: lognormal",
    ),
    (
        {"output_tokens": {"distribution": "lognormal", "median": 0, "sigma": 1}},
        "workload.output_tokens.median: 0, expected above 0",
    ),
    (
        {"output_tokens": {"distribution": "lognormal", "median": 9, "sigma": INF}},
        "workload.output_tokens.sigma: inf, expected a finite number",
    ),
    (
        {"output_tokens": {"distribution": "uniform", "min": 0, "max": 5}},
        "workload.output_tokens.min: 0, expected",
    ),
    ({"output_tokens": {"distribution": "uniform", "min": 9, "max": 5}}, "expected min (9) <= max (5)"),
    (
        {"output_tokens": {"distribution": "choice", "values": [1, 0]}},
        "workload.output_tokens.values.1: 0, expected",
    ),
    (
        {"output_tokens": {"distribution": "choice", "values": [1, 2], "weights": [1]}},
        "expected one weight for each of the 2 values, found 1",
    ),
    (
        {"output_tokens": {"distribution": "choice", "values": [1], "weights": [0]}},
        "expected weights with a finite sum above 0",
    ),
    (
        {"output_tokens": {"distribution": "choice", "values": [1], "weights": [-1]}},
        "workload.output_tokens.weights.0: -1, expected",
    ),
    (
        {"arrival": "burst"},
        "workload.arrival: 'burst', expected a mapping with process: burst, poisson, gamma, constant or "
        "closed",
    ),
    ({"arrival": {"process": "poison"}}, "expected a mapping with process: burst, poisson"),
    ({"arrival": {"process": "poisson"}}, "workload.arrival.rate: missing"),
    (
        {"arrival": {"process": "poisson", "rate": NAN}},
        "workload.arrival.rate: nan, expected a finite number",
    ),
    (
        {"arrival": {"process": "poisson", "rate": INF}},
        "workload.arrival.rate: inf, expected a finite number",
    ),
    (
        {"arrival": {"process": "poisson", "rate": -1}},
        "workload.arrival.rate: -1, expected above 0",
    ),
    (
        {"arrival": {"process": "poisson", "rate": 1e-300}},
        "workload.arrival.rate: 1e-300, expected a rate at which all requests arrive within 146 years",
    ),
    (
        {"arrival": {"process": "constant", "rate": 1e-300}},
        "expected a rate at which all requests arrive within 146 years",
    ),
    (
        {"arrival": {"process": "gamma", "rate": 1, "cv": 0}},
        "workload.arrival.cv: 0, expected at least 0.000000001",
    ),
    (
        {"arrival": {"process": "gamma", "rate": 1, "cv": 1e200}},
        "workload.arrival.cv: 1e+200, expected at most 1000000000",
    ),
    ({"arrival": {"process": "closed"}}, "workload.arrival.concurrency: missing"),
    ({"arrival": {"process": "closed", "concurrency": 0}}, "workload.arrival.concurrency: 0, expected"),
    (
        {"arrival": {"process": "burst", "rat": 1}},
        "unknown key 'workload.arrival.rat', expected one of process, concurrency",
    ),
    (
        {"kind": "preset", "name": "seed-32-mix"},
        "workload.name: unknown preset 'seed-32-mix', expected one of chat",
    ),
    ({"kind": "preset", "name": "seed-32-mix"}, "did you mean 'seed-32-mixed'?"),
    (
        {"kind": "preset", "name": "seed-32-mixed", "rate": 2},
        "expected none: the burst arrivals of seed-32-mixed have no rate",
    ),
    ({"kind": "preset", "name": "../../etc/passwd"}, "unknown preset '../../etc/passwd'"),
]


@pytest.mark.parametrize(("keys", "sentence"), REFUSED)
def test_a_wrong_key_is_one_sentence(keys: Any, sentence: str) -> None:
    if keys and "kind" not in keys:
        keys = {"kind": "synthetic", "num_requests": 5, "prompt_tokens": 10, "output_tokens": 2, **keys}
    with pytest.raises(InputError) as caught:
        load_workload(parse_workload(keys, "run.yaml"), 0)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
