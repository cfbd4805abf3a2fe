"""The twin as a server: the shared engine over a SimPy device, on the wall clock, for clients over HTTP.

Clients get as many tokens as the request implies, when the simulation makes them, and a placeholder for the
text of each.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.assembly import assemble
from policies.config.generation import read_generation
from policies.config.runconfig import RunConfig
from policies.core.errors import WriteError
from policies.core.seam.oracle import Foresight
from results.finish import write_outputs
from results.identity import RunIdentity, short_name
from results.metrics import RunStatus
from results.rundir import RunDirectory
from sim.backend import SimBackend
from sim.paced import PacedEnvironment
from sim.run import Simulation, inputs_sha256
from workloads.serving.inbox import HTTP_COLUMNS
from workloads.serving.lengths import AnswerLengths
from workloads.serving.options import Place
from workloads.serving.server import Server, listen, settings_of
from workloads.spec import LiveSpec, parse_workload
from workloads.text import Tokenizer

PLACEHOLDERS = (" x", " the", "x", "a", ".")
"""The first that is one token, again and again, so that whoever counts tokens by text counts right."""
NO_TOKEN = 0
"""Stands for every token: a simulation samples none."""


def serve(
    config: RunConfig, place: Place, out: Path | None, plots: bool = True
) -> tuple[Path, dict[str, Any]]:
    """Serve until a signal, write the run directory, and return where it is and its summary.

    Raises `InputError` for a wrong config or place, `WriteError` when the disk does not take the run, and
    what the engine raises.
    """
    simulation = Simulation.prepare(config, is_served=True)
    config, model = simulation.config, simulation.model
    spec = parse_workload(config.workload, config.where)
    assert isinstance(spec, LiveSpec)
    generation = read_generation(config.model, model)
    settings = settings_of(
        short_name(config.model), spec, model, config.model, generation, config.sampling, PLACEHOLDERS[0]
    )
    if settings.tokenizer is not None:
        settings = replace(settings, placeholder=placeholder(Tokenizer(Path(settings.tokenizer))))
    listening = listen(place)
    identity = RunIdentity.from_config(config.resolved, "sim", model.num_loops)
    inputs = {"input_sha256": inputs_sha256(config)}
    status: RunStatus = "complete"
    broken: WriteError | None = None
    with (
        RunDirectory.create(config.resolved, identity, out, HTTP_COLUMNS) as directory,
        Server(place, listening) as server,
    ):
        inbox = server.inbox
        inbox.write = directory.requests.write
        engine = assemble(config, model, inbox, directory.batches, inbox.record_ended)
        env = PacedEnvironment(inbox, inbox.look, server.wait, server.is_stopped)
        lengths = AnswerLengths(inbox, spec.output_tokens, config.seed)
        foresight = Foresight(lengths, simulation.exits, config.rule(model), simulation.acceptance)
        backend = SimBackend(
            env,
            engine,
            simulation.latency,
            foresight,
            server.is_stopped,
            config.seed,
            on_collected=lambda request_ids: inbox.tell([(key, NO_TOKEN) for key in request_ids]),
        )
        server.open(settings, env.clock_ns())
        try:
            backend.run()
        except KeyboardInterrupt:
            print("interrupted: writing what was served until now", file=sys.stderr)
            status = "interrupted"
        except WriteError as error:
            status, broken = "failed", error
        if inbox.is_deserted and status == "complete":
            status = "failed"
            print("the HTTP process has ended by itself", file=sys.stderr)
        server.close()
        summary = write_outputs(
            directory,
            engine.log,
            engine.scheduler,
            identity,
            config=config.resolved,
            objectives=config.slo,
            window=config.measure,
            status=status,
            plots=plots,
            trace=plots,
            notes=(*simulation.notes, *generation.notes),
            extra={**inputs, "server": server_facts(server)},
            broken=broken,
        )
    return directory.path, summary


def placeholder(tokenizer: Tokenizer) -> str:
    """A text that stands for one token each time it is told."""
    alone = [text for text in PLACEHOLDERS if len(tokenizer.encode(text * 16, False)) == 16]
    return alone[0] if alone else PLACEHOLDERS[0]


def server_facts(server: Server) -> Mapping[str, Any]:
    """What a summary says of the server."""
    return {"requests_asked": server.inbox.num_asked}
