"""Traces as people have them: a part of a long one, columns of one's own, packed, and brought to a rate."""

import gzip
import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard

from policies.core.errors import InputError
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

TIMES_S = (100, 101, 101.5, 107, 130, 131)
TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{time},{at + 10},{at + 1}\n" for at, time in enumerate(TIMES_S)
)


def load(folder: Path, content: str | bytes = TRACE, name: str = "t.csv", **keys: Any) -> Workload:
    data = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(data)
    return load_workload(parse_workload({"kind": "trace", "path": name, **keys}, "test"), 0, folder)


def arrivals_s(workload: Workload) -> list[float]:
    return [request.arrival_ns / 1e9 for request in workload.requests]


def test_a_window_is_in_seconds_after_the_first_row(tmp_path: Path) -> None:
    workload = load(tmp_path, start_s=1.5, end_s=30)
    assert [request.prompt_tokens for request in workload.requests] == [12, 13]
    assert arrivals_s(workload) == [0, 5.5]
    assert "all 2 requests from 1.5 s to 30 s of t.csv" in workload.notes[0]
    assert arrivals_s(load(tmp_path, start_s=1.5, limit=1)) == [0]
    assert arrivals_s(load(tmp_path, end_s=1.5)) == [0, 1]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"start_s": 2, "end_s": 7}, r"no request from 2 s to 7 s.* which is from 0 to 31 s"),
        ({"start_s": 50}, r"no request from 50 s to its end"),
        ({"start_s": 5, "end_s": 5}, r"expected start_s < end_s, found 5 and 5"),
        ({"rate": 0}, r"workload.rate: 0, expected above 0"),
        ({"rate": 3, "limit": 1}, r"workload.rate: 3, expected arrivals at different times"),
        ({"rate": 3, "time_scale": 2.0}, r"expected rate or time_scale, found rate 3 and time_scale 2"),
        ({"rate": 3, "arrival": {"process": "burst"}}, r"expected rate or arrival"),
        (
            {"columns": {"arrival": "ts", "prompt_tokens": "in", "output_tokens": "out"}},
            r"t.csv: line 1: columns 'arrival_s,prompt_tokens,output_tokens' have no 'ts', expected the one "
            r"that workload.columns.arrival names",
        ),
        ({"columns": {"prompt_tokens": "prompt_tokens"}}, r"workload.columns.output_tokens: missing"),
        ({"columns": {"tokens": "a"}}, r"unknown key 'workload.columns.tokens', expected one of arrival, "),
        (
            {"columns": {"prompt_tokens": "prompt_tokens", "output_tokens": "output_tokens"}},
            r"has lengths and no arrival times, expected a column that workload.columns.arrival names",
        ),
        ({"unit": "h"}, r"workload.unit: 'h', expected 'auto', 's'"),
        ({"unit": "s", "timestamp_unit": "s"}, r"unknown key 'workload.unit'"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        load(tmp_path, **keys)
    assert len(str(caught.value)) - len(str(tmp_path)) < 400


def test_a_rate_stretches_every_gap_alike(tmp_path: Path) -> None:
    """Six requests in 31 s are 5/31 a second; at 2 a second they take 2.5 s, in the same proportions."""
    workload = load(tmp_path, rate=2.0)
    times_ns = [request.arrival_ns for request in workload.requests]
    scale = Fraction(5 * 10**9, 2) / (31 * 10**9)
    assert times_ns == [int((Fraction(str(time)) - 100) * 10**9 * scale) for time in TIMES_S]
    assert times_ns[-1] == 2_500_000_000
    recorded = arrivals_s(load(tmp_path))
    assert [round((later - earlier) / 2.5 * 31, 6) for earlier, later in pairwise(arrivals_s(workload))] == [
        later - earlier for earlier, later in pairwise(recorded)
    ]
    assert any("come at 2 requests/s instead of 0.1613" in note for note in workload.notes)


def test_a_rate_holds_for_what_is_left_after_window_and_repetition(tmp_path: Path) -> None:
    workload = load(tmp_path, end_s=8, repeat=3, rate=4.0)
    assert len(workload.requests) == 12
    assert workload.requests[-1].arrival_ns == 11 * 10**9 // 4


MAPPED = {"arrival": "ts", "prompt_tokens": "In", "output_tokens": "out"}


def test_columns_of_ones_own(tmp_path: Path) -> None:
    expected = load(tmp_path)
    csv = "model,TS,in,out\n" + "".join(
        f"a,{int(1000 * time)},{at + 10},{at + 1}\n" for at, time in enumerate(TIMES_S)
    )
    lines = "".join(
        json.dumps({"out": at + 1, "in": at + 10, "ts": 1000 * time, "ids": [at]}) + "\n"
        for at, time in enumerate(TIMES_S)
    )
    for text in (csv, lines):
        workload = load(tmp_path, text, "mine", columns=MAPPED, unit="ms")
        assert workload.requests == expected.requests
    with_ids = load(tmp_path, lines, "mine", columns={**MAPPED, "hash_ids": "ids"}, unit="ms")
    assert [request.content_ids for request in with_ids.requests] == [(at,) for at in range(6)]


def test_optional_columns_of_ones_own(tmp_path: Path) -> None:
    text = "ts,in,out,Most,Rank\n0,5,3,2,-1\n2,6,1,,\n"
    columns = {**MAPPED, "max_tokens": "Most", "priority": "RANK"}
    requests = load(tmp_path, text, columns=columns).requests
    assert [(request.max_tokens, request.priority) for request in requests] == [(2, -1), (1, 0)]


def test_packed_traces_are_the_same_and_damaged_ones_are_named(tmp_path: Path) -> None:
    expected = load(tmp_path).requests
    raw = TRACE.encode()
    packed = zstandard.compress(raw)
    two_frames = zstandard.compress(raw[:50]) + zstandard.compress(raw[50:])
    for data in (gzip.compress(raw), packed, two_frames):
        assert load(tmp_path, data, "whatever").requests == expected
    with pytest.raises(InputError, match=r"damaged Zstandard data \(it breaks off\)"):
        load(tmp_path, packed[:-4])
    with pytest.raises(InputError, match="damaged Zstandard data"):
        load(tmp_path, packed[:8] + b"\xff" * 40)
