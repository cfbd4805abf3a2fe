"""Token preservation: the same requests under every policy, chunk size and company, compared bit for bit.

Compares output token ids, the final hidden state behind every token, and every K/V element of every depth
plane with those of the first run. Anything but zero differences is a bug. `bits` is a digest of all three, to
compare with another command's (graphs off).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from executor.checks.fingerprint import Fingerprint, Fingerprints
from executor.run import execute
from executor.session import Session
from policies.config.runconfig import RunConfig
from results.identity import RunIdentity


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run against the first: how many requests differ in tokens, hidden states and K/V, and what it went
    through."""

    label: str
    num_requests: int
    num_tokens: int
    tokens_differ: int
    hidden_differ: int
    kv_differ: int
    bits: str
    preemptions: int = 0
    reused_tokens: int = 0
    num_correct: int | None = None

    @property
    def is_identical(self) -> bool:
        return not (self.tokens_differ or self.hidden_differ or self.kv_differ)


def preserve(
    grid: Sequence[tuple[dict[str, Any], RunConfig]],
    device: str,
    out: Path,
    *,
    use_graphs: bool = True,
    audit: bool = False,
) -> list[Comparison]:
    """Run every cell of `grid` (same model, seed and workload) and compare each with the first. Ctrl-C ends
    all of it."""
    session = Session([config for _, config in grid], device, use_graphs=use_graphs)
    results = []
    reference: tuple[dict[int, list[int]], dict[int, Fingerprint]] | None = None
    for (axes, _), run in zip(grid, session.runs, strict=True):
        fingerprints = Fingerprints(session.pools)
        name = RunIdentity.from_config(
            run.config.resolved, "executor", session.shape.num_loops
        ).directory_name
        _, summary, tokens = execute(
            session, run, out / name, plots=False, audit=audit, fingerprints=fingerprints
        )
        if summary["status"] == "interrupted":
            raise KeyboardInterrupt
        found = (tokens, fingerprints.finish())
        reference = reference or found
        trouble = {"preemptions": summary["preemptions"], "reused_tokens": summary["prefix_hit_tokens"]}
        accuracy = summary.get("accuracy")
        correct = {"num_correct": accuracy["num_correct"]} if accuracy else {}
        results.append(replace(compare(spell(axes), reference, found), **trouble, **correct))
    return results


def spell(axes: Mapping[str, Any]) -> str:
    """A cell by the last part of its keys: `inflight 4, name wcpb`; what a key sets at once is spelled one by
    one."""
    parts = []
    for key, value in axes.items():
        leaves = value if isinstance(value, Mapping) else {key.rpartition(".")[2]: value}
        parts += [f"{leaf} {setting}" for leaf, setting in leaves.items()]
    return ", ".join(parts)


def compare(
    label: str,
    expected: tuple[dict[int, list[int]], dict[int, Fingerprint]],
    found: tuple[dict[int, list[int]], dict[int, Fingerprint]],
) -> Comparison:
    """Count the requests of `found` that are not those of `expected`; a missing request differs in
    everything."""
    ids = sorted(expected[0].keys() | found[0].keys())
    empty = Fingerprint()
    return Comparison(
        label,
        len(ids),
        sum(map(len, found[0].values())),
        sum(expected[0].get(key) != found[0].get(key) for key in ids),
        sum(expected[1].get(key, empty).hidden != found[1].get(key, empty).hidden for key in ids),
        sum(expected[1].get(key, empty).kv != found[1].get(key, empty).kv for key in ids),
        hashlib.sha256(
            repr([(key, tokens, found[1].get(key)) for key, tokens in sorted(found[0].items())]).encode()
        ).hexdigest(),
    )


def print_comparisons(results: Sequence[Comparison]) -> None:
    table = Table(
        "run",
        "requests",
        "tokens",
        "preempted",
        "reused tokens",
        "tokens differ",
        "hidden differ",
        "K/V differ",
        "correct answers",
        "bits",
        title="against the first run",
    )
    for item in results:
        trouble = (item.num_requests, item.num_tokens, item.preemptions, item.reused_tokens)
        table.add_row(
            item.label,
            *map(str, (*trouble, item.tokens_differ, item.hidden_differ, item.kv_differ)),
            "-" if item.num_correct is None else str(item.num_correct),
            item.bits[:16],
        )
    Console(width=140).print(table)
