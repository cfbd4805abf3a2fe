"""Two policies on the same requests, hidden state by hidden state: the largest difference per depth, and each
against float64.

Runs eagerly with a hook after every loop, so it sees what the device computed and nothing is recomputed. For
prompts of modest length: it keeps every hidden state of every prompt position at every depth.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from executor.model.reference import dense_forward
from executor.model.weights import named_tensors
from executor.prompts import prompt_ids
from executor.run import execute
from executor.runner import Launched
from executor.session import Session
from policies.config.runconfig import RunConfig
from policies.core.errors import InputError
from policies.core.seam.batch import PROMPT_STAGES, ExecutionBatch


class HiddenTrace:
    """An observer that copies every prompt row's hidden state after every loop: [depths, positions, hidden]
    per request."""

    def __init__(self) -> None:
        self._batch: ExecutionBatch | None = None
        self.states: dict[int, dict[tuple[int, int], torch.Tensor]] = {}

    def launching(self, batch: ExecutionBatch) -> None:
        self._batch = batch

    def collected(self, batch: ExecutionBatch, launched: Launched, stops: frozenset[int]) -> None:
        """Nothing to do: states are copied as they are made."""

    def after_loop(self, depth_offset: int, hidden: torch.Tensor) -> None:
        if self._batch is None:
            return
        row = 0
        for item in self._batch.ranges:
            if item.stage in PROMPT_STAGES:
                states = self.states.setdefault(item.request_id, {})
                states[item.depth + depth_offset, item.token_start] = hidden[
                    row : row + item.token_count
                ].clone()
            row += item.token_count

    def of(self, request_id: int, depth: int) -> torch.Tensor:
        """[prompt_tokens, hidden] of one depth, in order of position."""
        states = self.states[request_id]
        return torch.cat([states[key] for key in sorted(states) if key[0] == depth])


@dataclass(frozen=True, slots=True)
class Differences:
    """Per depth: largest difference between the policies, and of each from float64, over all prompt positions
    and requests."""

    policies: tuple[str, str]
    between: list[float]
    from_float64: tuple[list[float], list[float]]
    tokens_equal: bool
    num_positions: int

    @property
    def is_identical(self) -> bool:
        return self.tokens_equal and not any(self.between)


def diagnose(
    config: RunConfig, against: RunConfig, device: str, out: Path | None = None, audit: bool = False
) -> Differences:
    """Run both configs on one session and compare all prompt hidden states. The configs may differ in policy
    and scheduler only.

    The run directories are `one` and `other` below `out`, or the default ones. Raises `InputError` when a
    prompt may run twice.
    """
    for key, found in (
        ("preemption", config.cache.preemption),
        ("prefix_caching", config.cache.prefix_caching),
    ):
        if found not in ("off", False):
            raise InputError(
                f"{config.where}: cache.{key}: {found}: diagnose compares prompts run once and whole, "
                "expected off"
            )
    traces = [HiddenTrace(), HiddenTrace()]
    active = traces[0]

    def after_loop(depth_offset: int, hidden: torch.Tensor) -> None:
        active.after_loop(depth_offset, hidden)

    session = Session([config, against], device, use_graphs=False, after_loop=after_loop)
    tokens = []
    for name, trace, run in zip(("one", "other"), traces, session.runs, strict=True):
        active = trace
        _, summary, found = execute(
            session, run, out / name if out else None, plots=False, audit=audit, observers=(trace,)
        )
        if summary["status"] == "interrupted":
            raise KeyboardInterrupt
        tokens.append(found)
    shape, weights = session.shape, session.model.weights
    num_loops = shape.num_loops
    between = [0.0] * num_loops
    from_reference = ([0.0] * num_loops, [0.0] * num_loops)
    num_positions = 0
    published = dict(named_tensors(shape, weights))
    for request in session.runs[0].workload.requests:
        if not all(request.request_id in trace.states for trace in traces):
            continue  # refused
        ids = torch.from_numpy(prompt_ids(config.seed, request, shape.vocab_size))
        reference = dense_forward(shape, published, ids.to(session.device))
        num_positions += request.prompt_tokens
        for depth in range(num_loops):
            one, other = (trace.of(request.request_id, depth).double() for trace in traces)
            between[depth] = max(between[depth], (one - other).abs().max().item())
            for column, state in zip(from_reference, (one, other), strict=True):
                column[depth] = max(column[depth], (state - reference.hidden[depth]).abs().max().item())
    names = (config.policy.name, against.policy.name)
    return Differences(names, between, from_reference, tokens[0] == tokens[1], num_positions)


def print_differences(result: Differences) -> None:
    one, other = result.policies
    table = Table(title=f"largest difference of a hidden state, {result.num_positions} prompt positions")
    for head in ("depth", f"{one} - {other}", f"{one} - float64", f"{other} - float64"):
        table.add_column(head, justify="right")
    for depth, between in enumerate(result.between):
        table.add_row(
            str(depth), f"{between:.3g}", *(f"{column[depth]:.3g}" for column in result.from_float64)
        )
    console = Console(width=120)
    console.print(table)
    console.print(f"output tokens {'equal' if result.tokens_equal else 'DIFFER'}")
