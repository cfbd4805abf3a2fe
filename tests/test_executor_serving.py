"""A loaded model behind OpenAI's API, on a CPU: text in, text out, and the same tokens whoever else asks."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from checkpoints import write_checkpoint  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from servers import CONFIG, Served, events, served  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from executor.model.reference import dense_forward  # noqa: E402
from policies.core.models.shape import OURO_TINY  # noqa: E402
from results.load import load_run  # noqa: E402
from sim.replay import replay  # noqa: E402
from workloads.text import HALF  # noqa: E402

EOS = [1, *range(60, 120)]
SECONDS, CLIENTS = float(os.environ.get("STORM_SECONDS", "1.5")), int(os.environ.get("STORM_CLIENTS", "30"))
"""How long and with how many connections the storm below blows: 60 and 500 for whoever has the patience."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ouro") / "ouro-made", eos=EOS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    config = CONFIG.replace("ouro-tiny", str(folder))
    options = ("--device", "cpu", "--max-outstanding", str(CLIENTS * 2 // 3))
    with served("executor", folder.parent, *options, config=config) as found:
        yield found


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """What the dense float64 model goes on with."""
    tensors = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    for _ in range(count):
        logits = dense_forward(OURO_TINY, tensors, torch.tensor(ids)).logits[-1]
        ids = [*ids, int(logits.argmax())]
    return ids[-count:]


def choice(server: Served, **body: Any) -> dict[str, Any]:
    response = server.ask(return_token_ids=True, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_text_is_tokenised_and_answered_as_the_published_description_says(
    server: Served, folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("Ann has 3 apples").ids
    expected = greedy(folder, ids, 5)
    body = {"max_tokens": 5, "ignore_eos": True}
    found = choice(server, prompt="Ann has 3 apples", **body)
    assert found["token_ids"] == expected == choice(server, prompt=ids, **body)["token_ids"]
    assert found["text"] == tokenizer.decode(expected) and found["finish_reason"] == "length"
    body |= {"prompt": ids, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert "".join(event["choices"][0]["text"] for event in events(response)) == found["text"]


def test_a_chat_is_the_templates_prompt(server: Served, folder: Path) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4}
    body |= {"ignore_eos": True, "return_token_ids": True, "temperature": 0}
    whole = server.client.post("/v1/chat/completions", json=body).json()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("user: hi\nassistant:", add_special_tokens=False).ids
    assert whole["choices"][0]["token_ids"] == greedy(folder, ids, 4)
    assert whole["usage"]["prompt_tokens"] == len(ids)
    with server.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        found = [event["choices"][0] for event in events(response)]
    assert found[0]["delta"]["role"] == "assistant"
    text = "".join(item["delta"]["content"] for item in found)
    assert text == whole["choices"][0]["message"]["content"]


def test_an_answer_ends_at_an_end_of_sequence_or_a_stop_string(server: Served) -> None:
    drawn = {"prompt": "Ann", "max_tokens": 12, "temperature": 1.5}
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(lambda seed: choice(server, **drawn, seed=seed), range(6)))
    for found in ends:
        assert not {*EOS} & {*found["token_ids"][:-1]}
        is_whole = len(found["token_ids"]) == 12 and found["token_ids"][-1] not in EOS
        assert found["finish_reason"] == ("length" if is_whole else "stop")
    seed = next(seed for seed, found in enumerate(ends) if found["token_ids"][-1] in EOS)
    longer = choice(server, **drawn, seed=seed, ignore_eos=True)
    assert longer["token_ids"][: len(ends[seed]["token_ids"])] == ends[seed]["token_ids"]
    assert len(longer["token_ids"]) == 12 and longer["finish_reason"] == "length"
    mark = next(letter for letter in longer["text"][1:] if letter != HALF)
    cut = choice(server, **drawn, seed=seed, ignore_eos=True, stop=[mark, "no such text"])
    assert cut["text"] == longer["text"][: longer["text"].index(mark)] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == longer["token_ids"][: len(cut["token_ids"])]


def test_a_seeded_request_repeats_itself_alone_and_in_company(server: Served) -> None:
    body = {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 7}
    body |= {"ignore_eos": True}
    calm = {"prompt": [9] * 30, "max_tokens": 4, "ignore_eos": True}
    alone, calm_alone = choice(server, **body)["token_ids"], choice(server, **calm)["token_ids"]

    asked = [body, calm, {**body, "seed": 8}, {**calm, "temperature": 1.0}, {**body, "top_k": 1}]
    with ThreadPoolExecutor(5) as pool:
        found = [item["token_ids"] for item in pool.map(lambda item: choice(server, **item), asked)]
    assert found[0] == alone and found[1] == calm_alone
    assert alone not in (found[2], found[4]) and found[3] != calm_alone


def test_a_storm_of_clients_who_come_and_go_leaves_nothing_behind(server: Served) -> None:
    """Every connection is answered or closed by its client, and what is counted adds up. Ends the server."""
    outcomes: list[str] = []

    async def client(number: int, until: float) -> None:
        chance = random.Random(number)
        loop = asyncio.get_running_loop()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            while loop.time() < until:
                await asyncio.sleep(chance.random() * CLIENTS / 100)
                body = {"prompt": [chance.randrange(400)] * chance.randint(1, 40), "ignore_eos": True}
                body |= {"max_tokens": chance.randint(1, 6), "stream": chance.random() < 0.7}
                patience_s = chance.choice([None, 0.001, 0.05, 0.3, 2.0])
                try:
                    async with asyncio.timeout(patience_s):
                        response = await http.post("/v1/completions", json=body)
                    outcomes.append(str(response.status_code))
                    assert response.status_code in (200, 429)
                    if response.status_code == 200 and body["stream"]:
                        assert len(events(response)) == body["max_tokens"] + 1
                except TimeoutError:
                    outcomes.append("left")

    async def storm() -> None:
        until = asyncio.get_running_loop().time() + SECONDS
        await asyncio.gather(*(client(number, until) for number in range(CLIENTS)))

    asyncio.run(storm())
    print(Counter(outcomes))
    assert outcomes.count("200") and outcomes.count("left")
    assert server.stop() == 0
    run = load_run(server.out)
    summary, requests = run.summary, run.requests()
    ended = summary["num_finished"] + summary["num_cancelled"] + summary["num_refused"]
    assert summary["status"] == "complete" and ended == len(requests) == summary["num_requests"]
    assert summary["num_refused"] == 0 and summary["num_finished"] >= outcomes.count("200")
    outcome = replay(server.out)
    assert outcome.difference is None and outcome.num_batches == summary["num_batches"]
