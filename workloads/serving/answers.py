"""Answers on their way to a client: in one piece, or as server-sent events, one for each token.

An answer ends with its client: a connection that closes, or does not take its answer in time, hangs up at the
engine. Waiting for a slow client keeps nobody else waiting.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from policies.core.seam.request import Status
from workloads.serving.bodies import Chat, Common
from workloads.serving.desk import Desk, Gone, Ticket
from workloads.serving.settings import Settings
from workloads.serving.spelling import Spelling
from workloads.text import Tokenizer

ABORT = "loop.abort"
"""Key of a connection's scope: what cuts it off without waiting for its client."""


def error_response(code: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(code, "invalid_request_error" if code < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, code, headers)


class Answer(Response):
    """The answer to `body`, whose request the engine has under `ticket`."""

    def __init__(
        self, desk: Desk, ticket: Ticket, body: Common, settings: Settings, tokenizer: Tokenizer | None
    ) -> None:
        self._desk, self._ticket, self._body, self._settings = desk, ticket, body, settings
        self._spelling = Spelling(tokenizer, settings.placeholder, ticket.asked.stop)
        self._tokens: list[int] = []
        self._is_chat = isinstance(body, Chat)
        self._has_begun = self._is_whole = False
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{settings.created_s}-{ticket.asked.number}",
            "object": "text_completion",
            "created": settings.created_s + max(0, ticket.received_ns) // 1_000_000_000,
            "model": settings.model,
        }
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        speak = self._stream if self._body.stream else self._whole
        tasks = [asyncio.create_task(speak(send)), asyncio.create_task(_gone(receive))]
        answer_s = self._settings.limits.answer_s
        try:
            await asyncio.wait(tasks, timeout=answer_s, return_when=asyncio.FIRST_COMPLETED)
            if self._is_whole:
                return
            self._desk.hang_up(self._ticket)
            if not tasks[0].done() and not tasks[1].done():
                await self._cut(scope, send, tasks[0], f"no answer within {answer_s:g} s")
            elif tasks[0].done() and isinstance(tasks[0].exception(), Gone):
                await self._cut(scope, send, tasks[0], str(tasks[0].exception()))
            elif tasks[0].done() and tasks[0].exception() is not None:
                raise tasks[0].exception()  # type: ignore[misc]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._is_whole:
                self._desk.hang_up(self._ticket)
            self._desk.answered(self._ticket, self._is_whole)

    async def _cut(self, scope: Scope, send: Send, speaker: "asyncio.Task[None]", why: str) -> None:
        """The client is there and gets no whole answer: it is told, or where it has a part already, cut
        off."""
        if not self._has_begun:
            speaker.cancel()
            await error_response(503, why)(scope, _never, send)
        elif ABORT in scope:
            scope[ABORT]()

    async def _whole(self, send: Send) -> None:
        text = ""
        while found := await self._ticket.fetch():
            for token in found:
                self._tokens.append(token)
                text += self._spelling.push(token)
        if self._ticket.status is not Status.FINISHED:
            await self._not_served(send)
            return
        text += self._spelling.rest()
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish(), "logprobs": None}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self._body.return_token_ids:
            choice["token_ids"] = self._tokens
        kind = {"object": "chat.completion"} if self._is_chat else {}
        self._has_begun = True
        await JSONResponse({**self._head, **kind, "choices": [choice], "usage": self._usage()})(
            {"type": "http"}, _never, send
        )
        self._desk.sent(self._ticket, len(self._tokens), at_once=True)
        self._is_whole = True

    async def _stream(self, send: Send) -> None:
        if self._is_chat:
            self._head["object"] = "chat.completion.chunk"
        options, spelling = self._body.stream_options, self._spelling
        has_usage = options is not None and options.include_usage
        goes_on = options is not None and options.continuous_usage_stats
        while found := await self._ticket.fetch():
            if not self._has_begun:
                await self._begin(send)
            events = []
            for token in found:
                self._tokens.append(token)
                events.append(self._event(spelling.push(token), [token], None, goes_on))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            self._desk.sent(self._ticket, len(found))
        if self._ticket.status is not Status.FINISHED:
            await self._not_served(send)
            return
        events = [self._event(spelling.rest(), [], self._finish(), goes_on)]
        if has_usage:
            events.append(_sse({**self._head, "choices": [], "usage": self._usage()}))
        body = b"".join([*events, b"data: [DONE]\n\n"])
        await send({"type": "http.response.body", "body": body, "more_body": False})
        self._is_whole = True

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _event(self, text: str, tokens: list[int], finish: str | None, has_usage: bool) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self._is_chat:
            is_first = len(self._tokens) == 1 and finish is None
            choice["delta"] = {**({"role": "assistant"} if is_first else {}), "content": text}
        else:
            choice["text"] = text
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        return _sse({**self._head, "choices": [choice], **({"usage": self._usage()} if has_usage else {})})

    async def _not_served(self, send: Send) -> None:
        """The engine refused, or ended the request without finishing it."""
        ticket = self._ticket
        if ticket.status is Status.REFUSED and not self._has_begun:
            await error_response(400, f"the request can never run: {ticket.reason}")(
                {"type": "http"}, _never, send
            )
            self._has_begun = self._is_whole = True
            return
        raise Gone("the engine ended the request before it was finished")

    def _finish(self) -> str:
        asked, settings = self._ticket.asked, self._settings
        is_eos = self._tokens[-1] in settings.eos_ids and not asked.ignore_eos
        is_stopped = self._spelling.is_stopped or (is_eos and settings.placeholder is None)
        return "stop" if is_stopped or len(self._tokens) < asked.max_tokens else "length"

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self._ticket.asked.prompt), len(self._tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    await asyncio.Event().wait()
