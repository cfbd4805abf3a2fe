"""The engine's process as a server: the listening socket, the HTTP process, and how it all ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from policies.core.errors import InputError
from policies.core.models.shape import ModelShape
from policies.process.interrupt import SIGNALS
from policies.process.sentences import shown
from workloads.asked import Sampling
from workloads.serving.inbox import LiveInbox
from workloads.serving.link import Link
from workloads.serving.options import Place
from workloads.serving.settings import Settings
from workloads.spec import LiveSpec
from workloads.text import Tokenizer, tokenizer_path

ROOT = Path(__file__).resolve().parents[2]
FRONT_ENDS_S = 15.0


class Drawn(Protocol):
    """How tokens are drawn, as a config says it."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...


class Ends(Protocol):
    """What a checkpoint says of generating."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def sampling(self) -> Drawn | None: ...


def settings_of(
    name: str,
    spec: LiveSpec,
    shape: ModelShape,
    model: str,
    ends: Ends,
    sampling: Drawn,
    placeholder: str | None = None,
) -> Settings:
    """What the HTTP process must know of a model that clients call `name`; `model` is its path, if it is one.

    What a request does not say of sampling is the config's word where that draws at all, else the
    checkpoint's, else greedy. Raises `InputError` for a tokenizer that cannot be used.
    """
    tokenizer = tokenizer_path(spec.tokenizer, model)
    if tokenizer is not None:
        Tokenizer(tokenizer)
    drawn = sampling if sampling.temperature > 0 or ends.sampling is None else ends.sampling
    return Settings(
        name,
        min(spec.max_context, shape.max_context_tokens),
        shape.vocab_size,
        ends.eos_ids,
        Sampling(drawn.temperature, drawn.top_k, drawn.top_p),
        None if tokenizer is None else str(tokenizer),
        placeholder,
        0,
        0,
    )


def listen(place: Place) -> socket.socket:
    """A listening socket. Raises `InputError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"--host {shown(place.host)} --port {place.port}: {reason}") from None
    return listening


class Server:
    """While entered, an HTTP process serves what the engine of this process answers.

    The first SIGINT, SIGTERM or SIGHUP drains: nobody is let in, and the engine's run ends when all are
    served. With the second `is_stopped`; the run ends at once. `inbox` is the engine's.
    """

    def __init__(self, place: Place, listening: socket.socket) -> None:
        self._place = place
        self._listening = listening
        ours, theirs = socket.socketpair()
        self._link, self._theirs = Link(ours), theirs
        self.inbox = LiveInbox(self._link)
        self._front: subprocess.Popen[bytes] | None = None
        self._previous: dict[int, object] = {}
        self._num_signals = 0
        self._is_draining = False

    @property
    def url(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def is_stopped(self) -> bool:
        """Asked between two steps and while the engine waits; a signal that has come takes effect here, for
        its handler may interrupt a message that is being written."""
        if self._num_signals and not self._is_draining:
            self._is_draining = True
            print("draining: no new requests; again to stop at once", file=sys.stderr, flush=True)
            self._link.send("drain")
        return self._num_signals > 1

    def wait(self, timeout_s: float) -> None:
        """Until a client wants something, or `timeout_s` is over."""
        self._link.wait(timeout_s)

    def open(self, settings: Settings, now_ns: int) -> None:
        """Let clients in: the run's clock says `now_ns`."""
        origin_ns = time.perf_counter_ns() - now_ns
        settings = replace(
            settings,
            origin_ns=origin_ns,
            created_s=int(time.time() - now_ns / 1e9),
            limits=self._place.limits,
            api_key=self._place.api_key,
        )
        self._link.send("settings", settings=settings.fields())
        print(f"serving {settings.model} at {self.url}/v1", file=sys.stderr, flush=True)

    def __enter__(self) -> "Server":
        handles = (self._theirs.fileno(), self._listening.fileno())
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._front = subprocess.Popen(
            [sys.executable, "-m", "workloads.serving.front", *map(str, handles)],
            pass_fds=handles,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._theirs.close()
        for number in SIGNALS:
            previous = signal.getsignal(number)
            if previous != signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._press)
        return self

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def close(self) -> None:
        """The engine has ended: hear how the last answers went out, and end the HTTP process."""
        if self._front is None:
            return
        until_s = time.monotonic() + FRONT_ENDS_S
        self._link.send("drain")
        self.inbox.hear_the_rest(lambda: self.is_stopped() or time.monotonic() > until_s)
        self._end_front()

    def _end_front(self) -> None:
        front, self._front = self._front, None
        self._link.close()
        self._listening.close()
        if front is not None:
            try:
                front.wait(3.0)
            except subprocess.TimeoutExpired:
                front.kill()
                front.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_front()
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]
