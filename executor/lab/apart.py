"""Two pools on one card beside one engine: are the tokens the same, and how fast is a copy beside its limit?

    python -m executor.lab.apart executor/configs/pd.yaml cuda OUT_DIR

Batches of both engines share a stream, as in a run; then each has one, so that their kernels run at the same
time: that is told, and fails nothing.

A copy reads and writes its bytes twice: gathered from the blocks of one pool into a buffer, and from there
into the blocks of the other. Its limit is that traffic over the card's memory bandwidth.
"""

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from executor.apart.copies import Copies
from executor.apart.run import in_threads, run_with
from executor.run import TOKENS, execute, read_tokens
from executor.session import Session
from policies.config.runconfig import load_config
from policies.core.seam.events import Import, Send
from results.files import user_file

SIZES = (16, 64, 256, 1024, 4096)
"""Tokens of the chunks whose copies are timed."""
REPEATS = 20
SHOWN = ("ttft_ms", "itl_ms", "output_token_throughput")


def main(arguments: Sequence[str]) -> int:
    """Run both, print what came out, leave `apart.json` and the run directories; 1 where a token differs."""
    path, device, out = Path(arguments[0]), arguments[1], Path(arguments[2])
    began = time.perf_counter()
    config = load_config(path, arguments[3:])
    whole = load_config(path, [*arguments[3:], "fleet=null"])
    first = Session([config.parts()[0], whole], device)
    _, summary, tokens = execute(first, first.runs[1], out / "one", plots=False)
    print(
        f"one engine: {summary['num_finished']} finished after {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    second = Session([config.parts()[1]], device, like=first)
    assert config.fleet is not None
    found, differing = dict[str, dict[str, Any]](), dict[str, int]()
    for name, streams_apart in (("one stream", False), ("a stream each", True)):
        join = partial(in_threads, fleet=config.fleet, others=[second], streams_apart=streams_apart)
        folder = out / name.replace(" ", "-").replace(",", "")
        _, found[name] = run_with(config, first, join, folder)
        others = read_tokens(folder / "replicas" / "1" / TOKENS)
        others_than = [key for key, ids in tokens.items() if others[key] != ids]
        places = [first_difference(tokens[key], others[key]) for key in others_than]
        differing[name] = len(others_than)
        print(
            f"two pools, {name}: {len(others_than)} of {len(tokens)} requests differ"
            + (f": {list(zip(others_than, places, strict=True))[:12]} (request, token)" if places else "")
            + f" after {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    apart = found["one stream"]
    is_same = apart["output_token_sha256"] == summary["output_token_sha256"]
    num_tokens = sum(map(len, tokens.values()))
    figures = {
        "is_same": is_same,
        "num_tokens": num_tokens,
        "output_token_sha256": summary["output_token_sha256"],
        "by_streams": {
            name: {key: item[key] for key in SHOWN} | {"differing": differing[name]}
            for name, item in found.items()
        },
        "card": summary["card"],
        "one_engine": {key: summary[key] for key in SHOWN},
        "attention": config.attention,
        "sent_to_first_token_ms": apart["fleet"]["sent_to_first_token_ms"],
        "copies": copy_rates(first),
    }
    with user_file(out / "apart.json") as draft:
        draft.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0 if is_same else 1


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place where they differ, the shorter's end where it does not."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def copy_rates(session: Session) -> list[dict[str, Any]]:
    """GB/s of chunks taken from the session's pool and put back into other blocks of it, the fastest of
    `REPEATS`."""
    pools, copies = session.pools, Copies(session.pools)
    size, planes = pools.kv.block_size, pools.kv.planes
    num_groups, facts = pools.kv.k.shape[1] // planes, session.facts
    found = []
    for tokens in SIZES:
        count = tokens // size
        if 2 * count > num_groups:
            break
        source, target = tuple(range(0, 2 * count, 2)), tuple(range(1, 2 * count, 2))
        best_s, num_bytes = float("inf"), 0
        for _ in range(REPEATS):
            session.synchronize()
            began = time.perf_counter()
            buffer, passed = copies.take(Send(0, 0, tokens, source, 0, True))
            copies.put(Import(0, 0, tokens, target, 0, True), buffer, passed)
            session.synchronize()
            best_s = min(best_s, time.perf_counter() - began)
            num_bytes = buffer.nbytes
        rate = num_bytes / best_s / 1e9
        limit = facts.bandwidth_bytes_per_s / 4e9 if facts is not None else None
        found.append(
            {"tokens": tokens, "mb": num_bytes / 1e6, "us": 1e6 * best_s, "gb_per_s": rate, "limit": limit}
        )
        share = "" if limit is None else f", limit {limit:.0f} GB/s, {rate / limit:.0%} of it"
        print(
            f"{tokens} tokens, {num_bytes / 1e6:.1f} MB: {1e6 * best_s:.0f} us, {rate:.0f} GB/s{share}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1:]))
