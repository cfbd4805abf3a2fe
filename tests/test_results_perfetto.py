"""The trace tells every piece of work exactly once, on the track of its depth."""

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from results_runs import REQUESTS, write_run

from results.load import Run
from results.perfetto import CODA_TID, DEPTH_TID, DEVICE_PID, PRELUDE_TID, REQUESTS_PID


def trace_of(run: Run) -> dict[str, Any]:
    with gzip.open(run.path / "trace.json.gz", "rt") as file:
        return json.load(file)  # type: ignore[no-any-return]


def slices_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("policy", ["atomic", "split", "mixed", "wcpb"])
def test_every_token_and_depth_appears_exactly_once(tmp_path: Path, policy: str) -> None:
    trace = trace_of(write_run(tmp_path / "run", policy=policy))
    seen: Counter[tuple[int, int, int]] = Counter()
    for event in slices_of(trace):
        args = event["args"]
        if DEPTH_TID <= event["tid"] < CODA_TID:
            assert event["tid"] == DEPTH_TID + args["depth"]
            request_id = int(event["name"].split()[0][1:])
            seen.update(
                (request_id, token, args["depth"])
                for token in range(args["token_start"], args["token_start"] + args["tokens"])
            )
    expected = {
        (request.request_id, token, depth)
        for request in REQUESTS
        for token in range(request.prompt_tokens + request.max_tokens - 1)
        for depth in range(4)
    }
    assert set(seen) == expected and set(seen.values()) == {1}


def test_slices_are_named_by_chunk_and_position_and_coda_and_prelude_have_tracks(tmp_path: Path) -> None:
    slices = slices_of(trace_of(write_run(tmp_path / "run")))
    by_track: dict[int, set[str]] = {}
    for event in slices:
        by_track.setdefault(event["tid"], set()).add(event["name"])
    assert {"r0 c0", "r0 c4", "r2 c8", "r0 @20", "r1 @9"} <= by_track[DEPTH_TID]
    assert by_track[CODA_TID] == {
        "r0 @19",
        "r0 @20",
        "r0 @21",
        "r1 @8",
        "r1 @9",
        "r1 @10",
        "r1 @11",
        "r2 @32",
    }
    assert by_track[PRELUDE_TID] == {"r0 @20", "r0 @21", "r1 @9", "r1 @10", "r1 @11"}


def test_slices_of_one_track_never_overlap_unless_they_share_their_time(tmp_path: Path) -> None:
    spans: dict[int, set[tuple[float, float]]] = {}
    for event in slices_of(trace_of(write_run(tmp_path / "run", policy="split"))):
        spans.setdefault(event["tid"], set()).add((event["ts"], event["ts"] + event["dur"]))
    for track in spans.values():
        ordered = sorted(track)
        assert all(earlier[1] <= later[0] + 1e-6 for earlier, later in itertools.pairwise(ordered))


def test_requests_have_slices_from_arrival_to_finish(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    finished_ns = run.requests().set_index("request_id")["finished_ns"]
    events = [
        event
        for event in trace_of(run)["traceEvents"]
        if event["pid"] == REQUESTS_PID and event["ph"] in "be"
    ]
    assert sum(event["ph"] == "b" for event in events) == sum(event["ph"] == "e" for event in events)
    for request in REQUESTS:
        mine = [event for event in events if event["name"] == f"r{request.request_id}"]
        assert [event["ph"] for event in mine] == ["b", "e"]
        assert mine[0]["ts"] * 1000 == pytest.approx(request.arrival_ns)
        assert mine[1]["ts"] * 1000 == pytest.approx(finished_ns[request.request_id])
        parts = {event["name"] for event in events if event["id"] == request.request_id}
        assert parts == {f"r{request.request_id}", "queue", "prefill"} | (
            {"decode"} if request.max_tokens > 1 else set()
        )


def test_counters_add_up_to_the_rows_of_the_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    counters = [event for event in trace_of(run)["traceEvents"] if event["ph"] == "C"]
    rows = [event["args"] for event in counters if event["name"] == "rows per invocation"]
    assert len(rows) == run.summary["recurrent_invocations"]
    assert sum(item["prompt"] + item["decode"] for item in rows) == sum(
        batch.loop_count * batch.rows for batch in run.batches()
    )
    assert [event["args"]["requests"] for event in counters if event["name"] == "requests in service"][
        -1
    ] == 0


def test_a_cut_trace_says_so_everywhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", trace_max_batches=5)
    trace = trace_of(run)
    assert {event["args"]["batch"] for event in slices_of(trace)} == set(range(5))
    assert trace["otherData"]["holds"] == "the first 5 batches; the rest is in batches.csv"
    assert any(event["ph"] == "i" and event["pid"] == DEVICE_PID for event in trace["traceEvents"])
    assert run.summary["notes"] == [
        f"trace.json.gz holds the first 5 of {run.summary['num_batches']} batches"
    ]
