"""A small deterministic world for tests: one FIFO device with given durations, driven in plain Python. No
SimPy, no clock."""

import csv
import io
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace

from policies.core.engine.engine import Engine
from policies.core.engine.runlog import REQUEST_COLUMNS, RequestRecord, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.models.shape import OURO_TINY, ModelShape
from policies.core.seam.batch import ExecutionBatch
from policies.core.seam.clients import Clients
from policies.core.seam.events import Command, Completion, Event, Submit, Tick
from policies.core.seam.exits import ExitSettings
from policies.core.seam.guesses import AcceptanceOracle, SpeculationSettings, acceptance_oracle
from policies.core.seam.oracle import Foresight
from policies.core.seam.policy import Policy
from policies.core.seam.request import Request
from policies.core.seam.settings import CacheSettings, SchedulerSettings
from results.requestlog import request_row

Duration = Callable[[ExecutionBatch], int]
ENDLESS = 1 << 30


def model_with(num_loops: int = 4, max_context_tokens: int = 65536) -> ModelShape:
    """The tiny model with another number of loops or a shorter context."""
    return replace(OURO_TINY, num_loops=num_loops, max_context_tokens=max_context_tokens)


@dataclass
class World:
    """What is outside the engine. `outputs` is the oracle: tokens a request really produces (missing: its
    max_tokens).

    Handing a batch over takes `host_ns`; the engine learns of a completion `collect_delay_ns` after the
    device finished. With early exit `exit_loops` says after how many loops the token of (request, position)
    leaves.
    """

    duration_ns: Duration = lambda batch: 1000
    outputs: Mapping[int, int] = field(default_factory=dict)
    host_ns: int = 0
    collect_delay_ns: int = 0
    exit_loops: Callable[[int, int], int] = lambda request_id, position: 1

    def output_tokens(self, request_id: int) -> int:
        return self.outputs.get(request_id, ENDLESS)


@dataclass
class Run:
    """A finished run: its engine, every command it gave, every batch, both log files as text, and its
    requests by id."""

    engine: Engine
    commands: list[Command]
    batches: list[ExecutionBatch]
    batches_csv: str
    requests_csv: str
    records: dict[int, RequestRecord]

    @property
    def rows_per_invocation(self) -> float:
        totals = self.engine.log.totals
        return totals.recurrent_rows / totals.recurrent_invocations


def run(
    policy: Policy,
    requests: Iterable[Request],
    settings: SchedulerSettings | None = None,
    num_blocks: int = 40_000,
    block_size: int = 16,
    concurrency: int | None = None,
    model: ModelShape = OURO_TINY,
    world: World | None = None,
    patience_ns: Mapping[int, int] | None = None,
    cache: CacheSettings | None = None,
    exits: ExitSettings = ExitSettings(),  # noqa: B008 - frozen
    speculation: SpeculationSettings = SpeculationSettings(),  # noqa: B008 - frozen
) -> Run:
    """Run `requests` to the end and return what is left of it. Raises what the engine raises."""
    cache = cache or CacheSettings(block_size=block_size, num_blocks=num_blocks)
    scheduler = Scheduler(
        policy, model, settings or SchedulerSettings(), cache, exits, speculation=speculation
    )
    text = io.StringIO()
    ended: list[RequestRecord] = []
    engine = Engine(scheduler, Clients(requests, concurrency, patience_ns), RunLog(text, ended.append))
    commands = drive(engine, world or World(), acceptance_oracle(speculation, 0, None))
    batches = [command.batch for command in commands if isinstance(command, Submit)]
    return Run(engine, commands, batches, text.getvalue(), requests_text(ended), by_id(ended))


def drive(engine: Engine, world: World, acceptance: AcceptanceOracle | None = None) -> list[Command]:
    """Answer the engine's commands until it ends; return them. A completion at `until_ns` itself comes after
    that tick."""
    commands: list[Command] = []
    pending: deque[tuple[ExecutionBatch, int, int]] = deque()
    loop: Generator[Command, Event, None] = engine.run()
    now_ns = device_free_ns = 0
    foresight = Foresight(world, world, engine.scheduler.exits, acceptance)
    event: Event | None = None
    while True:
        try:
            command = next(loop) if event is None else loop.send(event)
        except StopIteration:
            return commands
        commands.append(command)
        if isinstance(command, Submit):
            now_ns += world.host_ns
            foresight.see(command.batch.transfers)
            started_ns = max(now_ns, device_free_ns)
            device_free_ns = started_ns + world.duration_ns(command.batch)
            pending.append((command.batch, started_ns, device_free_ns))
            event = Tick(now_ns)
        elif pending and (
            command.until_ns is None or pending[0][2] + world.collect_delay_ns < command.until_ns
        ):
            batch, started_ns, finished_ns = pending.popleft()
            now_ns = max(now_ns, finished_ns + world.collect_delay_ns)
            refused = foresight.refused(batch.work)
            ended = foresight.stops(batch.work, refused)
            left = foresight.early_exits(batch.work)
            event = Completion(
                batch.seq, now_ns, started_ns, finished_ns, ended, host_ns=world.host_ns, exits=left,
                refused=refused
            )  # fmt: skip
        else:
            assert command.until_ns is not None, "the engine waits for a completion and nothing is in flight"
            now_ns = max(now_ns, command.until_ns)
            event = Tick(now_ns)


def by_id(records: Iterable[RequestRecord]) -> dict[int, RequestRecord]:
    """Records in order of arrival, by request id."""
    return {record.request.request_id: record for record in sorted(records, key=lambda record: record.number)}


def requests_text(records: Iterable[RequestRecord]) -> str:
    """`requests.csv` as the results package leaves it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(REQUEST_COLUMNS)
    writer.writerows(map(request_row, by_id(records).values()))
    return text.getvalue()
