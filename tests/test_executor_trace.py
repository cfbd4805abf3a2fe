"""The account of a profiler trace, on a trace written by hand."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="the tracer is torch's")

from executor.lab.trace import Gaps, account_of


def call(name: str, ts: float, dur: float = 2.0) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur}


def work(ts: float, dur: float, correlation: int, name: str = "kernel") -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def test_calls_are_counted_between_the_first_and_the_last_launch_and_gaps_split_by_launch() -> None:
    events = [
        call("cudaDeviceSynchronize", 1.0),  # the profiler's own
        call("cudaGraphLaunch", 10.0, 4.0),
        work(12.0, 10.0, 1),
        work(23.0, 10.0, 1),  # 1 us after the one before, of the same launch
        call("cudaEventRecord", 30.0),
        call("cudaGraphLaunch", 40.0, 6.0),
        work(53.0, 10.0, 2),  # 20 us after the first launch's end
        work(60.0, 10.0, 2),  # overlaps
        call("cudaGraphLaunch", 100.0, 2.0),
        call("cudaDeviceSynchronize", 110.0),
        {"cat": "cpu_op", "name": "aten::copy_", "ts": 50.0, "dur": 1.0},
        {"ph": "M", "name": "process_name"},
    ]
    account = account_of(events, 3)
    assert account.calls == {"cudaGraphLaunch": (3, 4.0), "cudaEventRecord": (1, 2.0)}
    assert account.blocking == {}
    assert (account.window_us, account.busy_us) == (58.0, 37.0)
    assert account.gaps_within_launches == Gaps(1, 1.0, 1.0, 1.0)
    assert account.gaps_between_launches == Gaps(1, 20.0, 20.0, 20.0)


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaEventSynchronize", "cuCtxSynchronize", "cudaMemcpy", "cudaMalloc"]
)
def test_a_call_that_waits_for_the_device_is_named(name: str) -> None:
    events = [call("cudaGraphLaunch", 0.0), call(name, 5.0), work(6.0, 1.0, 1), call("cudaGraphLaunch", 10.0)]
    assert account_of(events, 2).blocking == {name: 1}


def test_a_copy_from_pageable_memory_waits_too() -> None:
    copy = {**work(6.0, 1.0, 1, "Memcpy HtoD (Pageable -> Device)"), "cat": "gpu_memcpy"}
    assert account_of([call("cudaGraphLaunch", 0.0), copy, call("cudaGraphLaunch", 10.0)], 2).blocking == {
        copy["name"]: 1
    }
