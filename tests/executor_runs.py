"""Small real runs for the tests of `executor`: ouro-tiny on a CPU, one thread, all in this process."""

import csv
import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from log_checker import Rules
from run_rules import rules_of_config

from executor.checks.fingerprint import Fingerprint, Fingerprints
from executor.checks.preserve import Comparison, compare
from executor.run import execute
from executor.session import PlannedRun, Session
from executor.timeline import HostTimeline
from policies.config.overrides import apply_overrides
from policies.config.runconfig import RunConfig, parse_config

torch.set_num_threads(1)

BASE: dict[str, Any] = {
    "model": "ouro-tiny",
    "policy": "wcpb",
    "scheduler": {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 96,
        "prefill_chunk_size": 16,
        "inflight": 2,
    },
    "workload": {
        "kind": "synthetic",
        "num_requests": 4,
        "prompt_tokens": [37, 5, 70, 1],
        "output_tokens": [4, 2, 5],
    },
    "seed": 0,
}


def config_of(*overrides: str, base: dict[str, Any] = BASE) -> RunConfig:
    """`base` with `a.b=c` overrides, as the command line gives them."""
    return parse_config(apply_overrides(base, overrides), Path("."), "test.yaml")


def session_of(*configs: RunConfig, **options: Any) -> Session:
    return Session(configs or (config_of(),), "cpu", **options)


class CountingTimeline(HostTimeline):
    """Every look at the clock finds it 10 us later, so a run does not depend on how fast the machine is."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def now_ns(self) -> int:
        return 10_000 * next(self._looks)


@dataclass(frozen=True)
class Done:
    """What a run left: its directory, summary, tokens and fingerprints."""

    path: Path
    summary: dict[str, Any]
    tokens: dict[int, list[int]]
    fingerprints: dict[int, Fingerprint]

    def text(self, name: str) -> str:
        return (self.path / name).read_text()

    def against(self, expected: "Done") -> Comparison:
        return compare("run", (expected.tokens, expected.fingerprints), (self.tokens, self.fingerprints))


def run_on(session: Session, out: Path, run: PlannedRun | None = None, **options: Any) -> Done:
    """Execute `run` (the session's first) under fingerprints and, unless told otherwise, the address
    audit."""
    fingerprints = Fingerprints(session.pools)
    found = execute(
        session,
        run or session.runs[0],
        out,
        plots=False,
        fingerprints=fingerprints,
        **({"audit": True} | options),
    )
    return Done(*found, fingerprints.finish())


def rules_of(session: Session, run: PlannedRun, **changes: Any) -> Rules:
    """What the log checker must know of `run`. Real time passes between an event and the next, so times are
    not exact."""
    rules: dict[str, Any] = {
        "concurrency": run.workload.concurrency,
        "outputs": {
            item.request_id: run.workload.oracle.output_tokens(item.request_id)
            for item in run.workload.requests
        },
    }
    return rules_of_config(run.config, run.shape(session.shape), **(rules | changes))


def delivered(done: Done) -> dict[int, int]:
    """Output tokens of every request that got one, as `requests.csv` has them."""
    lines = csv.DictReader(io.StringIO(done.text("requests.csv")))
    return {
        int(line["request_id"]): int(line["output_tokens"]) for line in lines if int(line["output_tokens"])
    }
