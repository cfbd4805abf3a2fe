"""A loaded model with its pools and programs, on which runs follow one another: weights and captured graphs are paid for once.

Sized for a set of run configurations with one model and seed: the largest hidden ring, budget and KV pool among them.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from executor.environment import check_memory, prepare_environment, resolve_device
from executor.kernels.ops import select_ops
from executor.model.checkpoint import load_checkpoint
from executor.model.config import resolve_model
from executor.model.forward import LoopedModel
from executor.model.weights import Weights, random_weights, weight_bytes
from executor.pools import Pools, blocks_that_fit
from executor.programs import Programs
from policies.config import RunConfig, locate
from policies.core.errors import InputError
from policies.core.limit import DeviceFacts
from policies.core.model import ModelShape
from policies.devices import device_facts, facts_of_card
from workloads.spec import WorkloadSpec, parse_workload
from workloads.workload import Workload, load_workload

MAX_PARTIALS = 8192
"""Rows of the attention workspace; see `executor.kernels.worklist`."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a session: its checked config (with `cache.num_blocks` filled in) and its workload."""

    config: RunConfig
    workload: Workload

    def shape(self, shape: ModelShape) -> ModelShape:
        """`shape` with the context cut to what the workload allows."""
        limit = self.workload.max_context
        return shape if limit is None else dataclasses.replace(shape, max_context_tokens=min(limit, shape.max_context_tokens))


class Session:
    """Loads `configs` onto `device` ("cuda" or "cpu"). Raises `InputError` before memory is taken where it can."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        device: str,
        *,
        use_graphs: bool = True,
        dtype: torch.dtype | None = None,
        after_loop: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        first = configs[0]
        if any(config.model != first.model or config.seed != first.seed or config.sampling != first.sampling for config in configs):
            raise InputError("model, seed and sampling must be the same for all runs of one executor session")
        if len({config.cache.block_size for config in configs}) > 1:
            raise InputError("cache.block_size must be the same for all runs of one executor session")
        self.notes = list(prepare_environment())
        source = resolve_model(str(locate(first.model, first.base_dir)) if "/" in first.model else first.model)
        self.seed = first.seed
        shape = source.shape
        self.device = resolve_device(device)
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.shape = dataclasses.replace(shape, dtype_bytes=self.dtype.itemsize)
        specs = [parse_workload(config.workload, config.where) for config in configs]
        workloads: dict[WorkloadSpec, Workload] = {}
        for config, spec in zip(configs, specs, strict=True):
            config.policy.check(self.shape, config.scheduler, config.cache)
            if spec not in workloads:
                workloads[spec] = load_workload(spec, config.seed, config.base_dir)
        runs = [PlannedRun(config, workloads[spec]) for config, spec in zip(configs, specs, strict=True)]
        max_positions = max(_max_positions(run.workload, self.shape) for run in runs)
        check_memory(self.device, weight_bytes(self.shape, self.dtype), f"the weights of {self.shape.name}")
        weights = self._load(source.checkpoint, shape)
        num_rings = max(config.scheduler.max_num_seqs for config in configs)
        block_size = first.cache.block_size
        default_blocks = blocks_that_fit(self.shape, block_size, num_rings, max_positions, self.dtype, self.device)
        self.runs = [
            dataclasses.replace(run, config=run.config.with_blocks(run.config.cache.num_blocks or default_blocks)) for run in runs
        ]
        max_rows = max(config.scheduler.max_num_batched_tokens for config in configs)
        self.model = LoopedModel.assemble(self.shape, weights, select_ops(self.shape, MAX_PARTIALS, self.device), max_positions)
        self.pools = Pools.allocate(
            self.shape,
            max(run.config.cache.num_blocks or 0 for run in self.runs),
            block_size,
            num_rings,
            max(config.scheduler.chunk_tokens * config.policy.resident_chunks(self.shape.num_loops) for config in configs),
            max_positions,
            self.dtype,
            self.device,
        )
        self.uses_graphs = use_graphs and self.device.type == "cuda"
        self.programs = Programs(self.model, self.pools, max_rows, num_rings, first.sampling, self.uses_graphs, after_loop)

    @property
    def card(self) -> str:
        """What the device calls itself."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    @property
    def facts(self) -> DeviceFacts:
        """Ceilings of the device; of an unknown card those of `cpu`, which is said in the notes of a run."""
        return facts_of_card(self.card) or device_facts("cpu")

    def _load(self, checkpoint: Path | None, stored: ModelShape) -> Weights:
        if checkpoint is None:
            return random_weights(self.shape, self.seed, self.dtype, self.device)
        return load_checkpoint(checkpoint, stored, self.dtype, self.device)

    def warm_up(self, longest_range: int) -> None:
        """Compile and capture what batches will need, outside any measured time: every bucket, for one and for all loops."""
        self.programs.warm_up(longest_range)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _max_positions(workload: Workload, shape: ModelShape) -> int:
    """Longest prompt and output of the requests that the model's context admits."""
    totals = [request.prompt_tokens + request.max_tokens for request in workload.requests]
    return max((total for total in totals if total <= shape.max_context_tokens), default=1)


def tokens_sha256(tokens: dict[int, list[int]]) -> str:
    """SHA-256 over all output token ids in order of request id: equal exactly when every token of every request is."""
    lines = "".join(f"{request_id}:{','.join(map(str, tokens[request_id]))}\n" for request_id in sorted(tokens))
    return hashlib.sha256(lines.encode()).hexdigest()
