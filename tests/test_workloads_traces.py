"""The real traces of ../shared/traces, with their published counts, and ServeGen's statistics drawn from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.core.errors import InputError
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the shared traces are not at {TRACES}")
SMALL, REASONING = "servegen_m-small_chunk-27-trace.csv", "servegen_deepseek-r1_chunk-48-trace.csv"


def load(path: str, folder: Path = TRACES, seed: int = 0, **keys: Any) -> Workload:
    return load_workload(parse_workload({"kind": "trace", "path": path, **keys}, "test"), seed, folder)


def summary(workload: Workload) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Requests, span in ns, and min / median / p95 / max of prompts and outputs by nearest rank, as the
    traces' README has them."""
    columns = (
        sorted(request.prompt_tokens for request in workload.requests),
        sorted(workload.oracle.output_tokens(request.request_id) for request in workload.requests),
    )
    last = len(workload.requests) - 1
    ranks = (0, int(0.5 * last + 0.5), int(0.95 * last + 0.5), last)
    prompts, outputs = (tuple(column[rank] for rank in ranks) for column in columns)
    return len(workload.requests), workload.requests[-1].arrival_ns, prompts, outputs


@needs_traces
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "AzureLLMInferenceTrace_code.csv",
            (8819, 3_435_948_056_000, (3, 1469, 7302, 7437), (6, 13, 90, 1899)),
        ),
        (
            "AzureLLMInferenceTrace_conv.csv",
            (19366, 3_501_721_937_000, (2, 1020, 4083, 14050), (7, 129, 451, 1000)),
        ),
        (
            "mooncake_conversation_trace.jsonl",
            (12031, 3_536_999_000_000, (891, 6909, 39552, 126195), (1, 350, 698, 2000)),
        ),
        (
            "mooncake_synthetic_trace.jsonl",
            (3993, 1_022_025_000_000, (13, 11587, 48835, 191378), (1, 69, 519, 893)),
        ),
    ],
)
def test_recorded_traces_have_their_published_counts(path: str, expected: Any) -> None:
    workload = load(path)
    assert summary(workload) == expected
    assert (workload.skipped_rows, len(workload.notes), workload.concurrency) == (0, 1, None)
    assert workload.requests[0].arrival_ns == 0
    assert all(
        request.max_tokens == workload.oracle.output_tokens(request.request_id)
        for request in workload.requests
    )


@needs_traces
def test_azure_arrivals_are_exact_to_the_last_digit() -> None:
    first = [request.arrival_ns for request in load("AzureLLMInferenceTrace_conv.csv", limit=3).requests]
    assert first == [0, 4_314_579_000, 4_541_877_000]


@needs_traces
def test_mooncake_keeps_a_block_id_for_every_512_tokens() -> None:
    workload = load("mooncake_conversation_trace.jsonl")
    blocks = {request.request_id: request.content_ids for request in workload.requests}
    assert len(blocks) == 12031 and {request.content_tokens for request in workload.requests} == {512}
    assert all(
        len(blocks[request.request_id]) == -(-request.prompt_tokens // 512) for request in workload.requests
    )
    assert sum(len(ids) for ids in blocks.values()) == 288_500
    assert all(ids[0] == 0 for ids in blocks.values())
    assert len({request.arrival_ns for request in workload.requests}) == 1180


@needs_traces
def test_vidur_lengths_take_an_arrival_process() -> None:
    path = "vidur_arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"
    with pytest.raises(InputError, match="has lengths and no arrival times"):
        load(path)
    count, _, prompts, outputs = summary(load(path, arrival={"process": "poisson", "rate": 2}))
    assert (count, prompts, outputs) == (28257, (1, 2730, 3813, 4054), (5, 167, 736, 4056))


@needs_traces
def test_servegen_windows_hold_rate_times_600_requests() -> None:
    workload = load(SMALL, end_s=1200)
    arrivals_s = np.array([request.arrival_ns for request in workload.requests]) / 1e9
    assert len(workload.requests) == 52836 + 51304  # 88.06 x 600 and 85.506... x 600
    assert arrivals_s[52835] == pytest.approx(600, abs=1)
    gaps = np.diff(arrivals_s[:52836])
    assert gaps.std() / gaps.mean() == pytest.approx(1.151, rel=0.03)
    assert {request.prompt_tokens for request in workload.requests} == {50, 51, 52, 53, 54}
    assert any("drawn independently" in note for note in workload.notes)


@needs_traces
def test_a_servegen_window_is_the_same_wherever_drawing_starts() -> None:
    whole, part = load(REASONING, end_s=2400), load(REASONING, start_s=600, end_s=1800)
    tail = [request for request in whole.requests if request.request_id >= round(2.533333333 * 600)]
    assert [request.prompt_tokens for request in part.requests] == [
        request.prompt_tokens for request in tail
    ][: len(part.requests)]
    assert load(REASONING, limit=500).requests == whole.requests[:500]
    assert load(REASONING, seed=1, limit=500).requests != whole.requests[:500]


@needs_traces
def test_servegen_needs_a_bound_when_there_is_no_end_in_sight() -> None:
    with pytest.raises(InputError, match=r"expected workload.limit or workload.end_s"):
        load(SMALL)
    with pytest.raises(InputError, match=r"no request from 1e\+08 s"):
        load(SMALL, start_s=1e8)


def servegen(
    folder: Path, rows: str, histogram: str = "{50: 0.25, 51: 0.75}", other: str = "{7: 1.0}"
) -> None:
    (folder / "c-trace.csv").write_text(rows, newline="")
    data = {
        "0": {"input_tokens": histogram, "output_tokens": other},
        "21600": {"input_tokens": "{}", "output_tokens": "{}"},
    }
    (folder / "c-dataset.json").write_text(json.dumps(data))


def test_servegen_rescales_fits_that_disagree_with_the_rate(tmp_path: Path) -> None:
    servegen(
        tmp_path,
        "0,0.5,132.7,Gamma,0.0000568,9000\r\n600,0,,,,\r\n1200,0.1,1,Weibull,1,913\r\n21600,0.1,1,Gamma,,2\r\n",
    )
    workload = load("c-trace.csv", tmp_path)
    assert len(workload.requests) == 300 + 60 + 60
    times = [request.arrival_ns for request in workload.requests]
    assert times == sorted(times) and times[300] - times[0] > 599 * 10**9
    assert workload.notes[-1] == "1 windows have arrivals but no length histogram and borrow a neighbour's"


@pytest.mark.parametrize(
    ("rows", "histogram", "sentence"),
    [
        (
            "0,1,1,Gamma,1,1\n600,x,1,Gamma,1,1\n",
            "{1: 1}",
            "c-trace.csv: line 2: rate: 'x', expected a number from 0 to 1e+06",
        ),
        ("0,1,1,Gamma,1,1\n600,-1,1,Gamma,1,1\n", "{1: 1}", "line 2: rate: '-1', expected"),
        ("0,1,1,Gamma,1,1\n600,nan,1,Gamma,1,1\n", "{1: 1}", "line 2: rate: 'nan', expected"),
        (
            "0,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n",
            "{1: 1}",
            "line 2: window start: 0, expected more than 0, the one before",
        ),
        (
            "0,1,1,Gamma,1,1\n600,1,1,Pareto,1,1\n",
            "{1: 1}",
            "line 2: family: 'Pareto', expected Gamma or Weibull",
        ),
        ("0,1,1,Weibull,-1,1\n", "{1: 1}", "line 1: shape: '-1', expected a number above 0"),
        (
            "0,1,1,Gamma,1,1\n",
            "__import__('os').abort()",
            "c-dataset.json: window 0: input_tokens: \"__import__('os').abort()\", expected text like",
        ),
        (
            "0,1,1,Gamma,1,1\n",
            "{50: 0.5, exit(): 0.5}",
            "input_tokens: 'exit(): 0.5', expected 'tokens: probability'",
        ),
        ("0,1,1,Gamma,1,1\n", "{50: nan}", "input_tokens: '50: nan', expected 'tokens: probability'"),
        ("0,1,1,Gamma,1,1\n", "{-5: 1.0}", "input_tokens: '-5: 1.0', expected 'tokens: probability'"),
        ("0,1,1,Gamma,1,1\n", "{50: 0}", "input_tokens: probabilities add up to 0"),
        ("0,1,1,Gamma,1,1\n", "{}", "no window has both lengths"),
    ],
)
def test_bad_servegen_files_are_one_sentence(
    tmp_path: Path, rows: str, histogram: str, sentence: str
) -> None:
    servegen(tmp_path, rows, histogram)
    with pytest.raises(InputError) as caught:
        load("c-trace.csv", tmp_path)
    assert sentence in str(caught.value)


def test_servegen_finds_its_dataset_or_says_what_it_looked_for(tmp_path: Path) -> None:
    servegen(tmp_path, "0,1,1,Gamma,1,1\n")
    (tmp_path / "c-dataset.json").rename(tmp_path / "lengths.json")
    with pytest.raises(InputError, match=r"c-dataset\.json: no such file"):
        load("c-trace.csv", tmp_path)
    assert len(load("c-trace.csv", tmp_path, dataset="lengths.json").requests) == 600
    (tmp_path / "c-trace.csv").rename(tmp_path / "c.csv")
    with pytest.raises(InputError, match=r"expected a name ending in -trace.csv, or workload.dataset"):
        load("c.csv", tmp_path)
    with pytest.raises(InputError, match="cannot replace the arrivals of a ServeGen trace"):
        load("c.csv", tmp_path, dataset="lengths.json", arrival={"process": "burst"})
