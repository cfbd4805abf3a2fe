"""Who sends a run its requests: a workload that knows them, or clients over HTTP. What a run must know of
either."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from executor.apart.side import Side
from executor.asking import AsClientsSay, AsConfigured, Asking, AsWritten
from executor.session import PlannedRun, Session
from executor.timeline import Timeline
from policies.config.generation import read_generation
from policies.core.engine.runlog import RequestRecord
from policies.core.seam.inbox import Inbox
from policies.core.seam.request import Oracle
from policies.process.interrupt import CtrlC
from workloads.serving.inbox import HTTP_COLUMNS, LiveInbox, Write
from workloads.serving.server import Server
from workloads.serving.settings import Settings
from workloads.text import Tokenizer


class Clientele(Protocol):
    """`oracle` says how long answers get at most, `asking` what else is asked. `columns` are those of
    `requests.csv` that are its own."""

    inbox: Inbox
    oracle: Oracle
    asking: Asking
    columns: tuple[str, ...]
    notes: tuple[str, ...]
    is_random: bool
    """Whether tokens may be drawn."""

    def write_to(self, write: Write) -> None:
        """Where records of requests that have ended go. Called once, before the run."""
        ...

    def ended(self, record: RequestRecord) -> None: ...

    def tell(self, tokens: list[tuple[int, int]]) -> None:
        """Clients get tokens: pairs of request and token id."""
        ...

    def open(self, timeline: Timeline) -> AbstractContextManager[Callable[[], bool]]:
        """While entered, requests come; gives what says that the user wants the run to end."""
        ...

    def fault(self) -> Exception | None:
        """What went wrong on this side."""
        ...


class WorkloadClients:
    """The clients of a workload; in a run with several engines, behind what `side` hears."""

    columns: tuple[str, ...] = ()

    def __init__(self, run: PlannedRun, session: Session, side: Side | None = None) -> None:
        config, workload, shape = run.config, run.workload, run.shape(session.shape)
        self.inbox: Inbox = workload.clients() if side is None else side.inbox
        self.oracle = workload.oracle
        self.asking = AsConfigured(config.seed, shape.vocab_size, config.sampling)
        self.notes = workload.notes
        if workload.prompts is not None:
            generation = read_generation(str(session.checkpoint or config.model), shape)
            self.asking = AsWritten(
                config.seed, shape.vocab_size, config.sampling, workload.prompts, generation.eos_ids
            )
            self.notes += generation.notes
        self.is_random = config.sampling.temperature > 0

    def write_to(self, write: Write) -> None:
        self._write = write

    def ended(self, record: RequestRecord) -> None:
        self._write(record, ())

    def tell(self, tokens: list[tuple[int, int]]) -> None:
        """Nobody listens."""

    @contextmanager
    def open(self, timeline: Timeline) -> Iterator[Callable[[], bool]]:
        with CtrlC() as ctrl_c:
            yield lambda: ctrl_c.is_pressed

    def fault(self) -> Exception | None:
        return None


class HttpClients:
    """The clients of `server`, which is entered while the run goes on."""

    columns = HTTP_COLUMNS
    is_random = True

    def __init__(self, server: Server, settings: Settings, tokenizer: Tokenizer | None) -> None:
        self._server, self._settings = server, settings
        self.inbox: LiveInbox = server.inbox
        self.oracle = AtMost(server.inbox)
        self.asking = AsClientsSay(server.inbox, settings.eos_ids, tokenizer)
        self.notes: tuple[str, ...] = ()

    def write_to(self, write: Write) -> None:
        self.inbox.write = write

    def ended(self, record: RequestRecord) -> None:
        self.asking.ended(record.request.request_id)
        self.inbox.record_ended(record)

    def tell(self, tokens: list[tuple[int, int]]) -> None:
        self.inbox.tell(tokens)

    @contextmanager
    def open(self, timeline: Timeline) -> Iterator[Callable[[], bool]]:
        with self._server as server:
            server.open(self._settings, timeline.now_ns())
            yield server.is_stopped
            server.close()

    def fault(self) -> Exception | None:
        return RuntimeError("the HTTP process has ended by itself") if self.inbox.is_deserted else None


class AtMost(Oracle):
    """An answer has at most `max_tokens`; its tokens may say that it ends before."""

    def __init__(self, inbox: LiveInbox) -> None:
        self._inbox = inbox

    def output_tokens(self, request_id: int) -> int:
        return self._inbox.asked(request_id).max_tokens
