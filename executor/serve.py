"""`python -m executor serve`: a loaded model behind OpenAI's API, and a run directory of what clients did."""

from pathlib import Path
from typing import Any

from executor.clientele import HttpClients
from executor.run import execute
from executor.session import Session
from policies.config.generation import read_generation
from policies.config.runconfig import RunConfig
from results.identity import short_name
from workloads.serving.options import Place
from workloads.serving.server import Server, listen, settings_of
from workloads.spec import LiveSpec, parse_workload
from workloads.text import Tokenizer


def serve(
    config: RunConfig,
    device: str,
    place: Place,
    out: Path | None,
    *,
    plots: bool = True,
    audit: bool = False,
    use_graphs: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Serve until a signal; return where the run directory is, and its summary. Raises as
    `executor.run.execute` does, and `InputError` before anything is loaded where it can."""
    spec = parse_workload(config.workload, config.where)
    listening = listen(place)
    session = Session([config], device, use_graphs=use_graphs, is_served=True)
    assert isinstance(spec, LiveSpec)
    run = session.runs[0]
    shape = run.shape(session.shape)
    folder = str(session.checkpoint or config.model)
    generation = read_generation(folder, shape)
    settings = settings_of(short_name(config.model), spec, shape, folder, generation, config.sampling)
    tokenizer = None if settings.tokenizer is None else Tokenizer(Path(settings.tokenizer))
    clients = HttpClients(Server(place, listening), settings, tokenizer)
    clients.notes = generation.notes
    path, summary, _ = execute(session, run, out, plots=plots, audit=audit, clients=clients)
    return path, summary
