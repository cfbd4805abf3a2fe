"""How tokens become an answer's text, one by one."""

from collections.abc import Sequence

from workloads.text import StopStrings, TextStream, Tokenizer


class Spelling:
    """Text of one answer: decoded by `tokenizer`; without one each token is `placeholder`, or its id and a
    blank. The text ends where one of `stops` begins, of which nothing is told."""

    def __init__(self, tokenizer: Tokenizer | None, placeholder: str | None, stops: Sequence[str]) -> None:
        self._placeholder = placeholder
        self._stream = TextStream(tokenizer) if tokenizer is not None and placeholder is None else None
        self._stops = StopStrings(stops)

    @property
    def is_stopped(self) -> bool:
        return self._stops.is_stopped

    def push(self, token: int) -> str:
        """What can be told once `token` is there."""
        if self._stream is not None:
            return self._stops.push(self._stream.push(token))
        return self._stops.push(f"{token} " if self._placeholder is None else self._placeholder)

    def rest(self) -> str:
        """What was held back; no more tokens come."""
        text = self._stops.push(self._stream.rest()) if self._stream is not None else ""
        return text + self._stops.rest()
