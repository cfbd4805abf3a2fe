"""The twin as a server, asked over HTTP by a client that knows nothing of us."""

import csv
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import CONFIG, Served, events, served

from sim.cli import main
from sim.replay import replay


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--max-outstanding", "6", "--max-body-bytes", "20000", "--body-s", "0.5", "--header-s", "0.5")
    config = CONFIG.replace("ouro-tiny", "ouro-1.4b").replace("max_num_seqs: 4", "max_num_seqs: 8")
    with served("sim", tmp_path_factory.mktemp("twin"), *options, config=config) as found:
        yield found


GOOD: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 2}


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"prompt": "text"}, 400, "no tokenizer.json, expected a list of token ids"),
        ({"prompt": []}, 400, "prompt: is empty"),
        ({"prompt": [5, 100_000]}, 400, "token id 100000, expected ids below"),
        ({"prompt": [-1]}, 400, "prompt: "),
        ({"prompt": [[1, 2], [3]]}, 400, "2 prompts, expected one"),
        ({"prompt": [1.5]}, 400, "prompt: "),
        ({"prompt": None}, 400, "prompt: "),
        ({"prompt": [1] * 250, "max_tokens": 7}, 400, "more than the context of 256"),
        ({"max_tokens": 0}, 400, "max_tokens: 0, expected at least 1"),
        ({"max_tokens": "5"}, 400, "max_tokens: '5'"),
        ({"temperature": -1}, 400, "temperature: -1, expected at least 0"),
        ({"temperature": 1e999}, 400, "the body"),
        ({"top_p": 0}, 400, "top_p: 0, expected above 0"),
        ({"top_k": 1.5}, 400, "top_k: 1.5"),
        ({"seed": 2**63}, 400, "seed: "),
        ({"n": 2}, 400, "n: 2, expected 1"),
        ({"best_of": 3}, 400, "best_of: 3"),
        ({"logprobs": 5}, 400, "logprobs: 5"),
        ({"echo": True}, 400, "echo: True"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"stop": ""}, 400, "stop"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty: 0.5"),
        ({"logit_bias": {"5": 1}}, 400, "unknown key 'logit_bias'"),
        ({"stream_options": {"include_usage": True}}, 400, "without stream"),
        ({"stream": True, "stream_options": {"usage": True}}, 400, "unknown key 'stream_options.usage'"),
        ({"model": "gpt-5\nINFO injected"}, 404, r"'gpt-5\\nINFO injected'"),
    ],
)
def test_what_is_not_served_is_refused_in_one_sentence(
    twin: Served, change: dict[str, Any], code: int, sentence: str
) -> None:
    import json

    text = json.dumps({**GOOD, **change}).replace("Infinity", "1e999")
    response = twin.client.post("/v1/completions", content=text)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (code, code)
    assert sentence.replace("\\\\", "\\") in error["message"] and len(error["message"]) < 400
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": [1], "prompt": [2]}', b"[" * 9000]
)
def test_a_body_that_is_no_json_object_is_refused(twin: Served, body: bytes) -> None:
    response = twin.client.post("/v1/completions", content=body)
    assert response.status_code == 400 and len(response.json()["error"]["message"]) < 400


def test_paths_methods_headers_and_sizes_are_refused(twin: Served) -> None:
    client = twin.client
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/../../etc/passwd").status_code == 404
    assert client.get("/v1/models/other").status_code == 404
    response = client.post("/v1/completions", json=GOOD, headers={"x-priority": "high"})
    assert response.status_code == 400 and "x-priority: 'high'" in response.json()["error"]["message"]
    assert client.post("/v1/completions", content=b"x" * 20_001).status_code == 413
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert chat.status_code == 400 and "no chat template" in chat.json()["error"]["message"]


def test_a_client_that_dawdles_over_its_head_or_body_is_not_waited_for(twin: Served) -> None:
    address = (httpx.URL(twin.url).host, httpx.URL(twin.url).port)
    with socket.create_connection(address) as slow, socket.create_connection(address) as slower:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
        slower.sendall(b"POST /v1/comp")
        slow.settimeout(5), slower.settimeout(5)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        assert slower.recv(1000) == b""


def test_models_health_and_metrics(twin: Served) -> None:
    client = twin.client
    assert [item["id"] for item in client.get("/v1/models").json()["data"]] == ["ouro-1.4b"]
    assert client.get("/v1/models/ouro-1.4b").json()["max_model_len"] == 256
    assert client.get("/health").json()["status"] == "ok"
    assert twin.ask(**GOOD).status_code == 200
    text = client.get("/metrics").text
    assert 'loop_requests_total{status="finished"}' in text and "loop_ttft_seconds_bucket" in text


def test_an_answer_in_one_piece_and_one_event_for_each_token(twin: Served) -> None:
    whole = twin.ask(model="ouro-1.4b", prompt=[[1, 2, 3]], max_tokens=4, user="me").json()
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (" x x x x", "length")
    body = {**GOOD, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    with twin.client.stream("POST", "/v1/completions", json=body) as response:
        found = events(response)
    choices = [event["choices"][0] for event in found[:-1]]
    assert [len(choice["token_ids"]) for choice in choices] == [1, 1, 0]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert found[-1]["usage"]["completion_tokens"] == 2 and found[-1]["choices"] == []
    assert twin.ask(prompt=[7]).json()["usage"]["completion_tokens"] == 16


def test_a_full_house_answers_429_and_a_closed_connection_makes_room(twin: Served) -> None:
    long = {"prompt": [1], "max_tokens": 250, "stream": True}
    streams = [twin.client.stream("POST", "/v1/completions", json=long) for _ in range(6)]
    try:
        for stream in streams:
            stream.__enter__()
        refused = twin.ask(**GOOD)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
    until = time.monotonic() + 10
    while twin.client.get("/health").json()["outstanding"] and time.monotonic() < until:
        time.sleep(0.01)
    assert twin.ask(**GOOD).status_code == 200


BEHIND_NS = 200_000_000
"""A simulation runs behind the clock where it is slower (`sim/paced.py`), as on a busy machine."""


def test_the_run_directory_is_that_of_a_run_and_is_decided_again_from_its_log(tmp_path: Path) -> None:
    config = CONFIG.replace("256}", "256, output_tokens: [3, 5]}").replace(
        "inflight: 2", "admission: priority"
    )
    with served("sim", tmp_path, config=config) as twin:
        counts = [
            twin.ask(prompt=[1, 2], max_tokens=9).json()["usage"]["completion_tokens"] for _ in range(3)
        ]
        asked = {"prompt": [1] * 40, "max_tokens": 7, "ignore_eos": True}
        counts.append(twin.ask(**asked).json()["usage"]["completion_tokens"])
        twin.client.post("/v1/completions", json=GOOD, headers={"x-priority": "-4"})
        long = {"prompt": [1], "max_tokens": 200, "ignore_eos": True, "stream": True}
        with twin.client.stream("POST", "/v1/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
        assert twin.stop() == 0
    assert counts == [3, 5, 3, 7]
    assert twin.summary()["status"] == "complete" and twin.summary()["num_cancelled"] == 1
    outcome = replay(twin.out)
    assert outcome.difference is None and outcome.num_batches > 10
    lines = list(csv.DictReader((twin.out / "requests.csv").read_text().splitlines()))
    assert [line["priority"] for line in lines] == ["0"] * 4 + ["-4", "0"]
    for line in lines:
        assert 0 < int(line["http_received_ns"]) <= int(line["arrival_ns"]) + BEHIND_NS
        if line["status"] == "finished":
            assert int(line["finished_ns"]) <= int(line["http_finished_ns"])


def test_a_second_signal_stops_at_once_and_says_so(tmp_path: Path) -> None:
    config = CONFIG.replace("ouro-tiny", "ouro-2.6b").replace("256", "4096").replace("400", "4000")
    with served("sim", tmp_path, config=config) as twin:
        assert twin.ask(**GOOD).status_code == 200
        long = {"prompt": [1], "max_tokens": 4000, "stream": True}
        with twin.client.stream("POST", "/v1/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            twin.process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 10
            while not any("draining" in line for line in twin.lines) and time.monotonic() < until:
                time.sleep(0.01)
            assert twin.process.poll() is None
            twin.process.send_signal(signal.SIGTERM)
            assert twin.process.wait(20) == 130
    assert twin.summary()["status"] == "interrupted" and replay(twin.out).difference is None


def test_without_the_key_nobody_is_let_in_but_to_health(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open-sesame\n")
    with served("sim", tmp_path, "--api-key-file", str(tmp_path / "key")) as twin:
        assert twin.ask(**GOOD).status_code == 401
        assert twin.client.get("/metrics", headers={"authorization": "Bearer open"}).status_code == 401
        assert twin.client.get("/health").status_code == 200
        twin.client.headers["authorization"] = "Bearer open-sesame"
        assert twin.ask(**GOOD).status_code == 200
        assert twin.stop() == 0
    assert "open-sesame" not in "".join(twin.lines)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "--port: 70000, expected 0 to 65535"),
        (["--host", "no.such.host.invalid"], "--host 'no.such.host.invalid'"),
        (["--api-key-file", "nowhere"], "--api-key-file: nowhere: cannot be read"),
        (["--max-outstanding", "0"], "--max-outstanding: 0, expected above 0"),
        (["--set", "workload={kind: preset, name: chat}"], "expected live, or no workload, for serve"),
        (["--set", "workload.tokenizer=nowhere.json"], "nowhere.json: no such file"),
    ],
)
def test_wrong_options_end_with_one_sentence_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    (tmp_path / "serve.yaml").write_text(CONFIG)
    out = tmp_path / "run"
    assert main(["serve", str(tmp_path / "serve.yaml"), "--out", str(out), "--port", "0", *arguments]) == 2
    message = capsys.readouterr().err
    assert sentence in message and message.count("\n") == 1 and len(message) < 400
    assert not (out / "batches.csv").exists()


def test_a_run_takes_no_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serve.yaml").write_text(CONFIG)
    assert main(["run", str(tmp_path / "serve.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert "expected the command serve" in capsys.readouterr().err
