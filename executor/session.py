"""A loaded model with its pools and programs, on which runs follow one another: weights and captured graphs
are paid for once.

Sized for a set of run configurations with one model and seed: the largest hidden ring, budget and KV pool
among them.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.cuda.select import with_cuda
from executor.environment import check_memory, choose_threads, prepare_environment, resolve_device
from executor.kernels.gate import GateRule
from executor.kernels.meta import MAX_PARTIALS
from executor.kernels.ops import select_ops
from executor.model.checkpoint import load_checkpoint
from executor.model.config import resolve_model
from executor.model.forward import LoopedModel
from executor.model.weights import Weights, random_weights, weight_bytes
from executor.pools import Pools, blocks_that_fit
from executor.programs import Programs
from executor.sensors import Sensors
from executor.source import kernel_sha256
from executor.swap import SwapSpace
from policies.assembly import assemble
from policies.config.overrides import locate
from policies.config.runconfig import RunConfig
from policies.core.errors import InputError
from policies.core.models.shape import SHIPPED_MODELS, ModelShape
from policies.core.seam.exits import ExitRule, ExitSettings
from policies.core.seam.guesses import AcceptanceOracle, acceptance_oracle
from policies.core.seam.request import ExitOracle
from policies.costs.devices import device_facts, facts_of_card
from policies.costs.limit import DeviceFacts
from workloads.spec import WorkloadSpec, parse_workload
from workloads.workload import Workload, load_workload


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a session: its checked config (with `cache.num_blocks` filled in) and its workload."""

    config: RunConfig
    workload: Workload

    def shape(self, shape: ModelShape) -> ModelShape:
        """`shape` with the context cut to what the workload allows."""
        limit = self.workload.max_context
        return (
            shape
            if limit is None
            else dataclasses.replace(shape, max_context_tokens=min(limit, shape.max_context_tokens))
        )

    def exit_oracle(self, rule: ExitRule) -> ExitOracle | None:
        """Who says where tokens leave, when it is not the gate on the device. Raises `InputError` when the
        workload cannot."""
        return (
            self.workload.recorded_exits()
            if rule.has_decisions and self.config.exit.mode == "trace"
            else None
        )

    def acceptance(self) -> AcceptanceOracle | None:
        """Who says which guesses are right, when it is not the model. Raises `InputError` when the workload
        cannot."""
        return acceptance_oracle(self.config.speculation, self.config.seed, self.workload.guessed)

    def with_blocks(self, default: int) -> "PlannedRun":
        """The same with `cache.num_blocks` set: to `default` where the config leaves it open."""
        return dataclasses.replace(
            self, config=self.config.with_blocks(self.config.cache.num_blocks or default)
        )


class Session:
    """Loads `configs` onto `device` ("cuda" or "cpu"), but for the weights where another one is `like` it.
    Raises `InputError` before memory is taken where it can."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        device: str,
        *,
        use_graphs: bool = True,
        is_served: bool = False,
        dtype: torch.dtype | None = None,
        after_loop: Callable[[int, torch.Tensor], None] | None = None,
        like: "Session | None" = None,
    ) -> None:
        check_alike(configs)
        first = configs[0]
        self.notes = list(prepare_environment())
        source = resolve_model(local_or_name(first))
        configs = [config.with_shape(source.shape) for config in configs]
        self.seed = first.seed
        self.device = resolve_device(device)
        self.sensors = Sensors(self.device)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.shape = dataclasses.replace(source.shape, dtype_bytes=self.dtype.itemsize)
        self.checkpoint = source.checkpoint
        if source.checkpoint is None and first.model not in SHIPPED_MODELS:
            self.notes.append(f"random weights: {Path(first.model).name} holds none")
        self.uses_graphs = use_graphs and self.device.type == "cuda"
        runs = plan_runs(configs, self.shape, is_served)
        max_positions = max(_max_positions(run.workload, run.shape(self.shape)) for run in runs)
        num_rings = max(config.scheduler.max_num_seqs for config in configs)
        decode_rows = max(config.speculation.most_rows for config in configs)
        block_size, planes = first.cache.block_size, first.cache.planes(self.shape.num_loops)
        enough = num_rings * planes * -(-max_positions // block_size)
        for run in runs:
            check_some_request_fits(run.with_blocks(enough), self.shape)
        num_bytes = weight_bytes(self.shape, self.dtype)
        if like is None:
            check_memory(self.device, num_bytes, f"the weights of {self.shape.name}")
        self.notes += choose_threads(self.device, num_bytes)
        try:
            weights = self._load(source.shape) if like is None else like.model.weights
            default_blocks = blocks_that_fit(
                self.shape, block_size, planes, num_rings, max_positions, self.dtype, self.device
            )
            self.runs = [run.with_blocks(default_blocks) for run in runs]
            for run in self.runs:
                check_some_request_fits(run, self.shape)
            ops = select_ops(self.shape, MAX_PARTIALS, self.device)
            if self.device.type == "cuda":
                ops = with_cuda(ops, self.shape, self.device, first.attention)
            elif first.attention != "auto":
                raise InputError(
                    f"{first.where}: attention: {first.attention} runs on a CUDA device, not on "
                    f"{self.device.type}"
                )
            self.model = LoopedModel.assemble(self.shape, weights, ops, max_positions)
            self.pools = Pools.allocate(
                self.shape,
                max(run.config.cache.num_blocks or 0 for run in self.runs),
                block_size,
                planes,
                num_rings,
                max(
                    config.scheduler.chunk_tokens * config.policy.resident_chunks(self.shape.num_loops)
                    for config in configs
                ),
                max_positions,
                self.dtype,
                self.device,
                decode_rows,
            )
            self.swap = self._swap_space()
            max_rows = max(config.scheduler.max_num_batched_tokens for config in configs)
            heads = 1 if decode_rows == 1 else decode_rows + 1
            inflight = max(config.scheduler.inflight for config in configs)
            self.programs = Programs(
                self.model,
                self.pools,
                max_rows,
                min(heads * num_rings, max_rows),
                inflight,
                self.uses_graphs,
                after_loop,
            )
        except torch.OutOfMemoryError as error:
            found = str(error).split(". Of the allocated")[0]
            knobs = "cache.num_blocks, scheduler.max_num_seqs or scheduler.max_num_batched_tokens"
            raise InputError(f"--device {device}: {found}; lower {knobs}") from None

    @property
    def card(self) -> str:
        """What the device calls itself."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    @property
    def facts(self) -> DeviceFacts | None:
        """Ceilings of the device, None of a card that the catalogue does not know. A CPU has those of the
        entry `cpu`."""
        return facts_of_card(self.card) if self.device.type == "cuda" else device_facts("cpu")

    def facts_for_summary(self) -> dict[str, Any]:
        """What a run's figures depend on beside its config, as keys of its summary."""
        facts = self.facts
        unknown = f"none: the catalogue has no card {self.card!r}, so batches have no limit"
        return {
            "card": self.card,
            "limit_ceilings": facts.source if facts else unknown,
            "weights": str(self.checkpoint) if self.checkpoint else f"random, seed {self.seed}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "cuda_graphs": self.uses_graphs,
            "kernels": self.model.ops.kernels,
            "kernel_sha256": kernel_sha256(),
        }

    def _load(self, stored: ModelShape) -> Weights:
        if self.checkpoint is None:
            return random_weights(self.shape, self.seed, self.dtype, self.device)
        return load_checkpoint(self.checkpoint, stored, self.dtype, self.device)

    def _swap_space(self) -> SwapSpace | None:
        """Host memory for what runs may swap; None when none does."""
        limits = [run.config.cache.swap_blocks for run in self.runs if run.config.cache.preemption == "swap"]
        if not limits:
            return None
        num_blocks = self.pools.kv.k.shape[1]
        space = SwapSpace(self.pools)
        space.reserve(max(num_blocks if limit is None else limit for limit in limits) // self.pools.kv.planes)
        return space

    def gate(self, exits: ExitSettings) -> GateRule | None:
        """The exit gate's rule under these settings, None where it is not asked."""
        rule = exits.rule(self.shape.num_loops)
        if exits.mode != "gate" or not rule.has_decisions:
            return None
        return GateRule(exits.threshold, rule.min_loops, rule.max_loops, self.shape.num_loops)

    def warm_up(self, longest_range: int, config: RunConfig, is_random: bool) -> None:
        """Compile and capture what batches will need, outside any measured time, for every bucket."""
        rule, gate = config.rule(self.shape), self.gate(config.exit)
        self.programs.warm_up(longest_range, rule, gate, is_random)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def check_alike(configs: Sequence[RunConfig]) -> None:
    """Raise `InputError` unless all runs can share one loaded model: same model, seed, attention, block
    size and layout."""
    for key, of in (
        ("model", lambda config: config.model),
        ("seed", lambda config: config.seed),
        ("attention", lambda config: config.attention),
        ("cache.block_size", lambda config: config.cache.block_size),
        ("cache.layout", lambda config: config.cache.layout),
    ):
        values = list(dict.fromkeys(map(of, configs)))
        if len(values) > 1:
            raise InputError(
                f"{configs[0].where}: {key}: {values[0]} and {values[1]}, expected one for all runs on a "
                "loaded model"
            )


def plan_runs(configs: Sequence[RunConfig], shape: ModelShape, is_served: bool = False) -> list[PlannedRun]:
    """Every config with its workload; equal workloads are loaded once. Raises `InputError`."""
    workloads: dict[WorkloadSpec, Workload] = {}
    runs = []
    for config in configs:
        if config.fleet is not None:
            raise InputError(f"{config.where}: fleet: of the executor's commands run alone takes one")
        config.policy.check(shape, config.scheduler, config.cache)
        spec = parse_workload(config.workload, config.where)
        if spec not in workloads:
            workloads[spec] = load_workload(spec, config.seed, config.base_dir)
        workloads[spec].check_live(is_served)
        prompts = workloads[spec].prompts
        if prompts is not None:
            prompts.check(shape.vocab_size)
        run = PlannedRun(config, workloads[spec])
        run.acceptance()
        run.exit_oracle(config.rule(shape))
        runs.append(run)
    return runs


def local_or_name(config: RunConfig) -> str:
    """`config.model` as `resolve_model` takes it: a shipped name or hub id as it is, a path beside the config
    file made whole."""
    path = locate(config.model, config.base_dir)
    return str(path) if config.model not in SHIPPED_MODELS and os.path.exists(path) else config.model


def check_some_request_fits(run: PlannedRun, shape: ModelShape) -> None:
    """Raise `InputError` when context or KV pool refuse every request of `run`: it would end without having
    shown anything."""
    config = run.config
    if run.workload.is_live:
        return
    scheduler = assemble(config, run.shape(shape), run.workload.clients()).scheduler
    refusals = ((request.request_id, scheduler.refusal(request)) for request in run.workload.requests)
    request_id, reason = next(refusals)
    if reason is not None and all(other is not None for _, other in refusals):
        raise InputError(
            f"{config.where}: none of {len(run.workload.requests)} requests can run; request {request_id}: "
            f"{reason}"
        )


def _max_positions(workload: Workload, shape: ModelShape) -> int:
    """Longest prompt and output of the requests that the model's context admits; of requests that are not
    known, all of it."""
    if workload.is_live:
        return shape.max_context_tokens
    totals = [request.prompt_tokens + request.max_tokens for request in workload.requests]
    return max((total for total in totals if total <= shape.max_context_tokens), default=1)


def tokens_sha256(tokens: dict[int, list[int]]) -> str:
    """SHA-256 over all output token ids in order of request id: equal exactly when every token of every
    request is."""
    lines = "".join(
        f"{request_id}:{','.join(map(str, tokens[request_id]))}\n" for request_id in sorted(tokens)
    )
    return hashlib.sha256(lines.encode()).hexdigest()
