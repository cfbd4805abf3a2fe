"""The HTTP process: `python -m workloads.serving.front LINK SOCKET`, two file descriptors that it inherits.

It ends when its engine does. Signals are the engine's business: a drain comes over the link.
"""

import asyncio
import contextlib
import math
import signal
import socket
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from policies.process.interrupt import SIGNALS
from workloads.serving.answers import ABORT
from workloads.serving.app import Api
from workloads.serving.desk import Desk
from workloads.serving.gauges import Gauges
from workloads.serving.link import Link
from workloads.serving.settings import Settings
from workloads.text import Tokenizer

GRACE_S = 5


def protocol(header_s: float) -> type[H11Protocol]:
    """uvicorn's own, which has no bound for how long a client may take to say what it wants."""

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._bound = self.loop.call_later(header_s, self._too_late)
            self._last_scope: Any = None

        def handle_events(self) -> None:
            super().handle_events()
            if self.scope is not None and self.scope is not self._last_scope:
                self._bound.cancel()
                self._last_scope = self.scope
                self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

        def on_response_complete(self) -> None:
            self._bound.cancel()
            self._bound = self.loop.call_later(header_s + self.timeout_keep_alive, self._too_late)
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._bound.cancel()
            super().connection_lost(exc)

        def _too_late(self) -> None:
            self.transport.abort()

    return Bounded


async def serve(link: Link, listening: socket.socket) -> None:
    """Serve until the engine has drained or is gone."""
    loop = asyncio.get_running_loop()
    while not (messages := link.receive()):
        if link.is_closed:
            return
        await loop.run_in_executor(None, link.wait, 1.0)
    settings = Settings.from_fields(dict(messages[0].fields["settings"]))
    limits = settings.limits
    gauges = Gauges()
    desk = Desk(link, settings.origin_ns, limits.max_outstanding, gauges)
    tokenizer = Tokenizer(_path(settings.tokenizer)) if settings.tokenizer else None
    server = uvicorn.Server(
        uvicorn.Config(
            Api(settings, desk, tokenizer, gauges).app(),
            http=protocol(limits.header_s),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            limit_concurrency=limits.max_connections,
            timeout_keep_alive=math.ceil(limits.idle_s),
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    def end() -> None:
        server.should_exit = True

    desk.on_idle = desk.on_lost = end
    desk.listen()
    with contextlib.suppress(asyncio.CancelledError):
        await server._serve([listening])  # without uvicorn's signal handlers
    deadline = loop.time() + 1
    while not link.flush() and loop.time() < deadline:
        await asyncio.sleep(0.01)


def _path(name: str) -> Any:
    from pathlib import Path

    return Path(name)


def main() -> int:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    listening = socket.socket(fileno=int(sys.argv[2]))
    asyncio.run(serve(link, listening))
    link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
