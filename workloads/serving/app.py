"""The HTTP API: OpenAI's completions and chat completions, models, health, metrics. Any ASGI server runs it.

Whatever a client sends gets an answer of one sentence; nothing of it is evaluated, and nothing of it is
logged.
"""

import asyncio
import hmac
import sys
from array import array
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from policies.core.errors import InputError
from policies.process.sentences import one_line, shown
from workloads.asked import Sampling
from workloads.serving.answers import Answer, error_response
from workloads.serving.bodies import Chat, Common, Completion, parse_body
from workloads.serving.desk import Desk, Full, Gone
from workloads.serving.gauges import CONTENT_TYPE, Gauges
from workloads.serving.settings import Settings
from workloads.text import Tokenizer

Body = TypeVar("Body", bound=Common)
PRIORITY = "x-priority"
RETRY_AFTER_S = 1
DEFAULT_MAX_TOKENS = 16
"""Of a completion that does not say, as in OpenAI's API. A chat goes on to the end of the context."""
MOST_CHARACTERS_PER_TOKEN = 200
"""A text with more characters than this for every token of the context is not even tokenised."""


class Refused(Exception):
    def __init__(self, code: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.headers = code, headers


class Api:
    """The endpoints of one server."""

    def __init__(self, settings: Settings, desk: Desk, tokenizer: Tokenizer | None, gauges: Gauges) -> None:
        self._settings, self._desk, self._tokenizer, self._gauges = settings, desk, tokenizer, gauges
        self._tokenising = asyncio.Semaphore(2)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(ApiKey, key=self._settings.api_key, gauges=self._gauges)],
            exception_handlers={
                Refused: self._refused, InputError: self._wrong, Full: self._full, Gone: self._gone,
                HTTPException: self._http, ClientDisconnect: self._left, Exception: self._fault,
            },
        )  # fmt: skip

    async def complete(self, request: Request) -> Response:
        received_ns = self._desk.now_ns()
        body = await self._read(request, Completion)
        prompt = body.one_prompt
        ids = prompt if isinstance(prompt, list) else await self._encode(prompt, True)
        return self._submit(request, received_ns, body, ids, body.max_tokens or DEFAULT_MAX_TOKENS)

    async def chat(self, request: Request) -> Response:
        received_ns = self._desk.now_ns()
        body = await self._read(request, Chat)
        tokenizer = self._tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise Refused(400, "this model has no chat template, expected a prompt at /v1/completions")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise InputError("max_tokens and max_completion_tokens differ, expected one of them")
        messages = [message.plain() for message in body.messages]
        text = await asyncio.to_thread(tokenizer.chat, messages)
        ids = await self._encode(text, False)
        room = max(1, self._settings.max_context - len(ids))
        return self._submit(
            request, received_ns, body, ids, body.max_completion_tokens or body.max_tokens or room
        )

    def _submit(
        self, request: Request, received_ns: int, body: Common, ids: list[int], max_tokens: int
    ) -> Response:
        settings = self._settings
        if body.stream_options is not None and not body.stream:
            raise InputError("stream_options: is set without stream, expected stream: true beside it")
        if not ids:
            raise InputError("prompt: is empty, expected at least one token")
        if len(ids) + max_tokens > settings.max_context:
            raise InputError(
                f"prompt: {len(ids)} tokens and max_tokens {max_tokens} are more than the context of "
                f"{settings.max_context} tokens"
            )
        wrong = next((token for token in ids if token >= settings.vocab_size), None)
        if wrong is not None:
            raise InputError(f"prompt: token id {wrong}, expected ids below {settings.vocab_size}")
        ticket = self._desk.submit(
            received_ns,
            prompt=array("i", ids),
            max_tokens=max_tokens,
            priority=_priority(request),
            sampling=_sampling(body, settings.sampling),
            stop=body.stops,
            ignore_eos=body.ignore_eos,
        )
        return Answer(self._desk, ticket, body, settings, self._tokenizer)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """The body, bounded in size and time, checked, and meant for this model."""
        limits = self._settings.limits
        data = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for piece in request.stream():
                    data += piece
                    if len(data) > limits.max_body_bytes:
                        raise Refused(
                            413,
                            f"the body is larger than {limits.max_body_bytes:,} bytes",
                            {"connection": "close"},
                        )
        except TimeoutError:
            raise Refused(
                408, f"the body did not come within {limits.body_s:g} s", {"connection": "close"}
            ) from None
        body = parse_body(kind, bytes(data))
        self._check_model(body.model)
        return body

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._settings.model):
            raise Refused(404, f"model: {shown(name)}, expected {self._settings.model}")

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokenizer, most = self._tokenizer, self._settings.max_context * MOST_CHARACTERS_PER_TOKEN
        if tokenizer is None:
            raise InputError(
                "prompt: is a text and this server has no tokenizer.json, expected a list of token ids"
            )
        if len(text) > most:
            raise InputError(f"prompt: {len(text)} characters, expected at most {most}")
        async with self._tokenising:
            return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, object]:
        settings = self._settings
        return {
            "id": settings.model,
            "object": "model",
            "created": settings.created_s,
            "owned_by": "loop-twin",
            "max_model_len": settings.max_context,
        }

    async def health(self, request: Request) -> Response:
        if self._desk.is_draining or self._desk.is_lost:
            return error_response(503, "the server is stopping")
        return JSONResponse({"status": "ok", "outstanding": self._desk.num_outstanding})

    async def metrics(self, request: Request) -> Response:
        return Response(self._gauges.text(), media_type=CONTENT_TYPE)

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return self._error(error.code, str(error), error.headers)

    async def _wrong(self, request: Request, error: Exception) -> Response:
        return self._error(400, str(error))

    async def _full(self, request: Request, error: Exception) -> Response:
        outstanding = self._settings.limits.max_outstanding
        return self._error(
            429, f"{outstanding} requests wait or run, which is the most", {"retry-after": f"{RETRY_AFTER_S}"}
        )

    async def _gone(self, request: Request, error: Exception) -> Response:
        return self._error(503, str(error), {"connection": "close"})

    async def _http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = "/v1/completions, /v1/chat/completions, /v1/models, /health and /metrics"
        sentence = {404: f"no such path, expected one of {known}", 405: "this path has another method"}
        headers = dict(error.headers) if error.headers else None
        return self._error(error.status_code, sentence.get(error.status_code, error.detail), headers)

    async def _left(self, request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def _fault(self, request: Request, error: Exception) -> Response:
        print(one_line(f"serve: a fault of ours: {type(error).__name__}: {error}"), file=sys.stderr)
        return self._error(500, "a fault of the server, which its log names")

    def _error(self, code: int, message: str, headers: dict[str, str] | None = None) -> Response:
        self._gauges.refused(code)
        return error_response(code, one_line(message), headers)


class ApiKey:
    """Lets nobody in without the key, but to `/health`."""

    def __init__(self, app: ASGIApp, key: str | None, gauges: Gauges) -> None:
        self._app, self._gauges = app, gauges
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._wanted is not None and scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                self._gauges.refused(401)
                headers = {"www-authenticate": "Bearer"}
                refusal = error_response(401, "expected Authorization: Bearer and the server's key", headers)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _priority(request: Request) -> int:
    text = request.headers.get(PRIORITY)
    if text is None:
        return 0
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise InputError(f"{PRIORITY}: {shown(text)}, expected a whole number, lower first")
    return int(text)


def _sampling(body: Common, default: Sampling) -> Sampling:
    """What a request says, and of what it does not say the server's word."""
    top_k = default.top_k if body.top_k is None else max(0, body.top_k)
    return Sampling(
        default.temperature if body.temperature is None else body.temperature,
        top_k,
        default.top_p if body.top_p is None else body.top_p,
        body.seed,
    )
