"""One simulation: a checked config in, a run directory out. Everything between is the shared engine and a
SimPy device."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import simpy

from policies.assembly import assemble
from policies.config.ignored import ignored_keys
from policies.config.provenance import result_sha256
from policies.config.runconfig import RunConfig, model_shape
from policies.core.engine.engine import Engine
from policies.core.engine.runlog import Lines, RequestRecord
from policies.core.errors import InputError, WriteError
from policies.core.models.shape import ModelShape
from policies.core.seam.events import Handed
from policies.core.seam.guesses import AcceptanceOracle, acceptance_oracle
from policies.core.seam.objectives import EVERYTHING
from policies.core.seam.oracle import Foresight
from policies.core.seam.request import ExitOracle
from policies.costs.alone import out_of_reach
from policies.costs.latency import LatencyModel
from policies.costs.models import beyond_compared, device_sha256, load_device
from policies.process.interrupt import CtrlC
from results.finish import write_outputs
from results.identity import RunIdentity
from results.metrics import RunStatus
from results.rundir import BATCHES, REQUESTS, RunDirectory
from sim.backend import SimBackend
from sim.exits import exit_oracle
from workloads.spec import parse_workload
from workloads.workload import Workload, load_workload

Logs = Literal["none", "requests", "batches"]
NOT_KEPT: dict[Logs, tuple[str, ...]] = {"batches": (), "requests": (BATCHES,), "none": (BATCHES, REQUESTS)}
"""Logs that are written and then thrown away, by what is to be kept."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """All parts of a simulation, ready to run once."""

    config: RunConfig
    model: ModelShape
    latency: LatencyModel
    workload: Workload
    exits: ExitOracle | None
    acceptance: AcceptanceOracle | None
    notes: tuple[str, ...]

    @classmethod
    def prepare(
        cls, config: RunConfig, workload: Workload | None = None, is_served: bool = False
    ) -> "Simulation":
        """Load model, device and workload and size the KV pool. Raises `InputError` before anything runs.

        `workload` is that of `config` where it has been loaded already. Where it `is_served`, requests come
        from clients and none is known.
        """
        if config.fleet is not None:
            raise InputError(
                f"{config.where}: fleet: of the simulator's commands run, sweep and capacity take one"
            )
        model = model_shape(config)
        latency = load_device(config.device, model)
        config.policy.check(model, config.scheduler, config.cache)
        config.rule(model)
        if workload is None:
            workload = load_workload(
                parse_workload(config.workload, config.where), config.seed, config.base_dir
            )
        workload.check_live(is_served)
        if workload.max_context is not None:
            model = dataclasses.replace(
                model, max_context_tokens=min(model.max_context_tokens, workload.max_context)
            )
        if config.cache.num_blocks is None:
            config = config.with_blocks(default_blocks(config, model, latency))
        exits = exit_oracle(config.exit, model.num_loops, workload, config.seed)
        acceptance = acceptance_oracle(config.speculation, config.seed, workload.guessed)
        if acceptance is None and config.speculation.mode != "off":
            raise InputError(
                "speculation.acceptance: missing, expected a probability, a list of them or trace: a "
                "simulation has no model that finds out which guesses are right"
            )
        has_prefixes = any(request.content_ids for request in workload.requests)
        unchecked = beyond_compared(config.device, config.scheduler.max_num_seqs)
        notes = (
            *([unchecked] if unchecked else []),
            latency.provenance,
            *config.policy.notes(model),
            *ignored_keys(config, "sim", has_prefixes),
            *workload.notes,
        )
        if workload.prompts is not None:
            notes += ("a simulation samples no token: every answer has max_tokens",)
        if config.slo is not None:
            prompts = [request.prompt_tokens for request in workload.requests]
            rule, budget = config.rule(model), config.scheduler.max_num_batched_tokens
            notes += tuple(out_of_reach(config.slo, latency, rule, prompts, budget))
        simulation = cls(config, model, latency, workload, exits, acceptance, notes)
        if not is_served:
            simulation.engine()  # refuses a KV pool that is too small before there is a directory
        return simulation

    def engine(
        self, batches: Lines | None = None, on_ended: Callable[[RequestRecord], object] = lambda record: None
    ) -> Engine:
        """A fresh engine with the workload's clients; see `policies.assembly`. Raises `InputError` when the
        KV pool is too small for any request."""
        return assemble(self.config, self.model, self.workload.clients(), batches, on_ended)

    def backend(
        self,
        engine: Engine,
        env: simpy.Environment | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        skips: bool = True,
        replica: int = 0,
        on_handed: Callable[[Handed], object] = lambda command: None,
    ) -> SimBackend:
        """What runs `engine`, number `replica` of a fleet, in `env` or in an environment of its own; without
        `skips` batch by batch. `on_handed` hears what it says to others."""
        rule = self.config.rule(self.model)
        foresight = Foresight(self.workload.oracle, self.exits, rule, self.acceptance)
        env = env or simpy.Environment()
        return SimBackend(
            env, engine, self.latency, foresight, is_stopped, self.config.seed, skips, replica, on_handed
        )


def default_blocks(config: RunConfig, model: ModelShape, latency: LatencyModel) -> int:
    """KV blocks for the device's memory beside the weights, but no more than all running requests could ever
    use."""
    block_size, planes = config.cache.block_size, config.cache.planes(model.num_loops)
    fits = latency.facts.kv_blocks(model, block_size)
    useful = config.scheduler.max_num_seqs * planes * -(-model.max_context_tokens // block_size)
    if fits < planes:
        raise InputError(
            f"device {latency.name}: {latency.facts.memory_bytes / 1e9:.0f} GB hold the "
            f"{model.total_weight_bytes / 1e9:.1f} GB of weights of {model.name} and no KV block; set "
            "cache.num_blocks or choose another device"
        )
    return min(fits, useful)


def inputs_sha256(config: RunConfig) -> str:
    """A hash of all that a simulation follows from beside its config, the latency models' numbers too."""
    return result_sha256(config, "sim", *[device_sha256(part.device) for part in config.parts()])


def simulate(
    config: RunConfig,
    out: Path | None,
    *,
    workload: Workload | None = None,
    label: str | None = None,
    plots: bool = True,
    log: Logs = "batches",
    on_ended: Callable[[int], None] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Run `config`, write its run directory, and return where it is and its summary.

    `workload` stands in for the config's, whose files may not be here: then the summary has no
    `input_sha256`. Without `plots` neither pictures nor a Perfetto trace are written. `on_ended` is called
    with the number of all requests whenever one has ended. `log` says which logs are kept: `batches` both,
    `requests` no batches.csv, `none` neither; figures are the same, pictures and trace are made of both.
    Ctrl-C ends the run as `interrupted`: what was simulated until then is written and marked. Raises
    `InputError` for a wrong config, `WriteError` when the disk does not take it all,
    and what the engine raises when an invariant breaks.
    """
    if config.fleet is not None:
        from sim.fleet import simulate_fleet  # which simulates the engines of this file

        return simulate_fleet(
            config, out, workload=workload, label=label, plots=plots, log=log, on_ended=on_ended
        )
    if config.role != "whole":
        raise InputError(
            f"{config.where}: role: {config.role} is one side of a fleet, expected fleet.prefill"
        )
    simulation = Simulation.prepare(config, workload)
    inputs = {} if workload else {"input_sha256": inputs_sha256(config)}
    identity = RunIdentity.from_config(config.resolved, "sim", simulation.model.num_loops, workload=label)
    config = simulation.config
    asked = simulation.workload
    with RunDirectory.create(config.resolved, identity, out) as directory:

        def ended(record: RequestRecord) -> None:
            directory.requests.write(record)
            if on_ended is not None:
                on_ended(len(asked.requests))

        # A window's figures are summed over the log of batches, so then it is written, whatever is kept.
        is_needed = log == "batches" or config.measure != EVERYTHING
        engine = simulation.engine(directory.batches if is_needed else None, ended)
        status, broken = run_to_end(
            lambda is_stopped: simulation.backend(engine, is_stopped=is_stopped).run()
        )
        summary = write_outputs(
            directory,
            engine.log,
            engine.scheduler,
            identity,
            config=config.resolved,
            objectives=config.slo,
            window=config.measure,
            status=status,
            plots=plots and log == "batches",
            trace=plots and log == "batches",
            skipped_rows=asked.skipped_rows,
            notes=simulation.notes,
            extra=inputs,
            broken=broken,
        )
    for name in NOT_KEPT[log]:
        (directory.path / name).unlink()
    return directory.path, summary


def run_to_end(run: Callable[[Callable[[], bool]], object]) -> tuple[RunStatus, WriteError | None]:
    """Call `run` with whom to ask whether to stop: `complete`, `interrupted` when Ctrl-C came first, which
    takes effect between two steps, so that logs and records agree, or `failed` with what the disk did not
    take."""
    with CtrlC() as ctrl_c:
        try:
            run(lambda: ctrl_c.is_pressed)
        except KeyboardInterrupt:
            print("interrupted: writing what was simulated until now", file=sys.stderr)
            return "interrupted", None
        except WriteError as error:
            return "failed", error
    return "complete", None
