"""This executor beside the eager loop a user would write: one process, one card, the same weights and
prompts, ratios.

Decode at batch 1 and 8 after prompts of 512 tokens, and prefill of 4 x 8064 tokens whole and in chunks of 16
and 128. The eager loop's chunked prefill is timed at every `SAMPLED_CHUNK`-th chunk, at its true context, and
the rest is interpolated by the mean.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from executor.lab.peer import EagerLoop
from executor.prompts import prompt_ids
from executor.run import execute
from executor.session import PlannedRun, Session
from policies.config.runconfig import RunConfig, parse_config
from policies.core.seam.request import Request

PROMPT, NEW_TOKENS, LONG, REQUESTS = 512, 32, 8064, 4
SAMPLED_CHUNK = {16: 16, 128: 8}
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One case. Values of each side, one per repeat, in `unit`; `ratio` says how many times faster the
    executor is."""

    case: str
    unit: str
    executor: Sequence[float]
    peer: Sequence[float]

    @property
    def ratio(self) -> float:
        ours, theirs = statistics.median(self.executor), statistics.median(self.peer)
        return theirs / ours if self.unit == "ms/token" else ours / theirs


def configs(model: str, settings: dict[str, Any] | None = None) -> list[RunConfig]:
    """Decode at batch 1 and 8, then prefill whole (as large as the budget allows), in chunks of 16, and of
    128; `settings` are further keys of all."""

    def config(policy: str, chunk: int | None, workload: dict[str, Any]) -> RunConfig:
        scheduler = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "prefill_chunk_size": chunk,
            "inflight": 4,
        }
        raw = {
            "model": model, "policy": policy, "scheduler": scheduler, "workload": workload, "seed": 0,
            **(settings or {}),
        }  # fmt: skip
        return parse_config(raw, Path("."), "peer bench")

    def decode(batch: int) -> dict[str, Any]:
        return {
            "kind": "synthetic",
            "num_requests": batch,
            "prompt_tokens": PROMPT,
            "output_tokens": NEW_TOKENS,
        }

    long = {"kind": "synthetic", "num_requests": REQUESTS, "prompt_tokens": LONG, "output_tokens": 1}
    decodes = [config("wcpb", 128, decode(batch)) for batch in (1, 8)]
    return decodes + [config("wcpb", chunk, long) for chunk in (None, 16, 128)]


def peer_bench(model: str, out: Path) -> list[Row]:
    """Run every case on both sides, `REPEATS` times each. Needs CUDA."""
    session = Session(configs(model), "cuda")
    return compare(session, session.runs, out, REPEATS)


def compare(session: Session, runs: Sequence[PlannedRun], out: Path, repeats: int) -> list[Row]:
    """The same of `runs`, those of `configs`, on a session that has them."""
    rows = []
    for batch, run in zip((1, 8), runs[:2], strict=True):
        ours, tokens = [], {}
        for _ in range(repeats):
            _, summary, tokens = execute(session, run, out / f"decode-{batch}", plots=False)
            ours.append(summary["itl_ms"]["p50"])
        peer = EagerLoop(session.shape, session.model.weights, batch, PROMPT + NEW_TOKENS)
        theirs, peer_tokens = [], []
        for _ in range(repeats):
            milliseconds, peer_tokens = _peer_decode(session, peer, batch)
            theirs.append(milliseconds)
        equal = sum(
            one == other
            for at in range(batch)
            for one, other in zip(tokens[at], peer_tokens[at], strict=True)
        )
        case = f"decode, batch {batch}, context {PROMPT} ({equal} of {batch * NEW_TOKENS} tokens equal)"
        rows.append(Row(case, "ms/token", ours, theirs))
        del peer
    for chunk, run in zip((None, 16, 128), runs[2:], strict=True):
        ours = [
            execute(session, run, out / f"prefill-{chunk}", plots=False)[1]["prompt_token_throughput"]
            for _ in range(repeats)
        ]
        peer = EagerLoop(session.shape, session.model.weights, REQUESTS, LONG)
        theirs = [_peer_prefill(session, peer, chunk) for _ in range(repeats if chunk is None else 1)]
        rows.append(
            Row(
                f"prefill {REQUESTS} x {LONG}, " + (f"chunks of {chunk}" if chunk else "whole"),
                "tokens/s",
                ours,
                theirs,
            )
        )
        del peer
    return rows


def _prompts(session: Session, count: int, tokens: int) -> torch.Tensor:
    requests = [Request(at, 0, tokens, 1) for at in range(count)]
    ids = [
        torch.from_numpy(prompt_ids(session.seed, request, session.shape.vocab_size)) for request in requests
    ]
    return torch.stack(ids).long().to(session.device)


def _peer_decode(session: Session, peer: EagerLoop, batch: int) -> tuple[float, list[list[int]]]:
    """Median milliseconds of a decode step, and the tokens by sequence."""
    token = peer.forward(_prompts(session, batch, PROMPT), 0).argmax(-1)
    columns, times = [token.tolist()], []
    for at in range(NEW_TOKENS - 1):
        started = time.perf_counter()
        token = peer.forward(token[:, None], PROMPT + at).argmax(-1)
        columns.append(token.tolist())
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times), [list(row) for row in zip(*columns, strict=True)]


def _peer_prefill(session: Session, peer: EagerLoop, chunk: int | None) -> float:
    """Prompt tokens per second of 4 x 8064 in chunks of `chunk` tokens a sequence, or in one piece."""
    ids = _prompts(session, REQUESTS, LONG)
    size, every = (LONG, 1) if chunk is None else (chunk, SAMPLED_CHUNK[chunk])
    if chunk is not None:
        peer.fill(LONG)
    times = []
    for start in range(0, LONG, size * every):
        torch.cuda.synchronize()
        started = time.perf_counter()
        peer.forward(ids[:, start : start + size], start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return REQUESTS * LONG / (statistics.mean(times) * -(-LONG // size))


def print_rows(rows: Sequence[Row]) -> None:
    table = Table("case", "unit", "executor", "spread", "eager loop", "spread", "times faster")
    for row in rows:
        cells = []
        for values in (row.executor, row.peer):
            cells += [f"{statistics.median(values):,.2f}", f"{min(values):,.2f} - {max(values):,.2f}"]
        table.add_row(row.case, row.unit, *cells, f"{row.ratio:.1f}")
    Console(width=160).print(table)
