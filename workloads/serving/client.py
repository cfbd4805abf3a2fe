"""A plain open-loop client of completions, for measuring a server: `python -m workloads.serving.client URL`.

Requests come at Poisson times of a seed, whatever the server does, and ask for token ids of that seed: two
servers get the same. What it saw goes to a CSV, times in seconds from its start.
"""

import argparse
import asyncio
import csv
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

COLUMNS = (
    "number",
    "rate",
    "prompt_tokens",
    "max_tokens",
    "sent_s",
    "first_s",
    "last_s",
    "tokens",
    "gaps_ms",
)
PROMPTS, OUTPUTS = (64, 128, 256, 512), (16, 32, 64, 96)


async def ask(
    http: Any, url: str, number: int, rate: float, seed: int, vocab_size: int
) -> tuple[object, ...]:
    """One streamed completion; what was seen of it."""
    chance = random.Random(f"{seed} {number}")
    prompt_tokens, max_tokens = chance.choice(PROMPTS), chance.choice(OUTPUTS)
    body = {
        "prompt": [chance.randrange(vocab_size) for _ in range(prompt_tokens)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    now = asyncio.get_running_loop().time
    sent_s, times = now(), list[float]()
    async with http.stream("POST", f"{url}/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(now())
    times.pop()  # the event that says why it ended
    gaps_ms = " ".join(f"{1e3 * (b - a):.3f}" for a, b in pairwise(times))
    return number, rate, prompt_tokens, max_tokens, sent_s, times[0], times[-1], len(times), gaps_ms


async def drive(url: str, rates: Sequence[float], count: int, seed: int, vocab_size: int) -> list[Any]:
    """`count` requests at each of `rates`, one rate after the other."""
    import httpx

    rows: list[Any] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        for at, rate in enumerate(rates):
            chance = random.Random(f"{seed} {at} arrivals")
            tasks = []
            for number in range(at * count, (at + 1) * count):
                tasks.append(asyncio.create_task(ask(http, url, number, rate, seed, vocab_size)))
                await asyncio.sleep(chance.expovariate(rate))
            rows += await asyncio.gather(*tasks)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="client", description=__doc__)
    parser.add_argument("url", help="of a server's API, like http://127.0.0.1:8000/v1")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=100, help="at each rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.csv")
    options = parser.parse_args()
    rows = asyncio.run(drive(options.url, options.rates, options.requests, options.seed, options.vocab_size))
    with open(options.out, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
