"""Prompts from a file of JSON lines: a text or token ids, and perhaps how long the answer may get and what it
should be.

`{"prompt": "Ann has 3 apples ...", "max_tokens": 200, "answer": "15"}`
"""

import os
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

from policies.core.errors import InputError
from policies.process.documents import parse_json
from policies.process.sentences import nearest, shown
from workloads.columns import Columns
from workloads.drawn import MAX_REQUESTS, MAX_TOKENS
from workloads.spec import PromptsSpec
from workloads.synthetic import arrival_times
from workloads.text import Tokenizer
from workloads.textfile import bounded_lines, open_text

KEYS = ("prompt", "max_tokens", "answer", "priority")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the requests of a workload say, by request id. `answers` are those that a line has; `tokenizer`
    is None where no line is a text and none was named. An answer ends at the model's end of sequence unless
    `ignore_eos`."""

    path: Path
    ids: tuple["array[int]", ...] = field(repr=False)
    answers: Mapping[int, str] = field(repr=False)
    tokenizer: Tokenizer | None
    ignore_eos: bool

    def check(self, vocab_size: int) -> None:
        """Raise `InputError` for a token that the model does not have."""
        for request_id, ids in enumerate(self.ids):
            if max(ids) >= vocab_size:
                raise InputError(
                    f"{self.path}: prompt {request_id}: token id {max(ids)}, expected ids below "
                    f"{vocab_size}, the model's vocabulary"
                )


def read_prompts(spec: PromptsSpec, seed: int, base_dir: Path) -> tuple[Columns, Prompts]:
    """The first `spec.limit` prompts in file order. Raises `InputError` naming file, line and key."""
    path = base_dir / os.path.expanduser(spec.path)
    tokenizer = None if spec.tokenizer is None else Tokenizer(base_dir / os.path.expanduser(spec.tokenizer))
    columns = Columns(Path(spec.path).stem)
    ids: list[array[int]] = []
    answers: dict[int, str] = {}
    with open_text(path) as text:
        for number, line in enumerate(bounded_lines(path, text), 1):
            if not line.strip():
                continue
            if len(ids) == min(spec.limit or MAX_REQUESTS, MAX_REQUESTS):
                break
            said = _Line(path, number, parse_json(line, f"{path}: line {number}"))
            tokens = said.tokens(tokenizer)
            max_tokens = said.whole("max_tokens", 1, MAX_TOKENS, spec.max_tokens)
            priority = said.whole("priority", -MAX_TOKENS, MAX_TOKENS, 0)
            answer = said.answer()
            if answer is not None:
                answers[len(ids)] = answer
            ids.append(tokens)
            columns.append(len(tokens), max_tokens, max_tokens, priority)
    if not ids:
        raise InputError(f"{path}: holds no prompt, expected JSON lines with the key prompt")
    columns.arrival_ns = arrival_times(spec.arrival, len(ids), seed)
    columns.concurrency = spec.arrival.concurrency
    if answers and tokenizer is None:
        columns.notes.append("answers are not compared: there is no tokenizer.json, so there is no text")
    return columns, Prompts(path, tuple(ids), answers, tokenizer, spec.ignore_eos)


class _Line:
    """One line of the file, for error sentences."""

    def __init__(self, path: Path, number: int, value: Any) -> None:
        self._where = f"{path}: line {number}"
        if not isinstance(value, dict):
            raise InputError(f"{self._where}: {shown(value)}, expected a JSON object with the key prompt")
        for key in value:
            if key not in KEYS:
                raise InputError(f"{self._where}: unknown key {shown(key)}{nearest(key, KEYS)}")
        self._values = value

    def tokens(self, tokenizer: Tokenizer | None) -> "array[int]":
        prompt = self._values.get("prompt")
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InputError(
                    f"{self._where}: prompt: is a text and there is no tokenizer.json; expected "
                    "workload.tokenizer, a model's folder with one, or token ids"
                )
            found = array("i", tokenizer.encode(prompt))
        elif isinstance(prompt, list) and all(type(item) is int and 0 <= item < 2**31 for item in prompt):
            found = array("i", prompt)
        else:
            self._refuse("prompt", "a text or a list of token ids")
        if not found:
            self._refuse("prompt", "at least one token")
        return found

    def whole(self, key: str, low: int, high: int, default: int) -> int:
        value = self._values.get(key)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            self._refuse(key, f"a whole number from {low} to {high}")
        return int(value)

    def answer(self) -> str | None:
        value = self._values.get("answer")
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse("answer", "a text or a number")
        return str(value)

    def _refuse(self, key: str, expected: str) -> NoReturn:
        raise InputError(f"{self._where}: {key}: {shown(self._values.get(key))}, expected {expected}")


def last_number(text: str) -> Decimal | None:
    """The last number that `text` names: of "3 + 12 = 1,015.0 apples" 1015."""
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:  # a thousand digits
        return None


def is_correct(text: str, answer: str) -> bool:
    """Whether the last numbers of an answer and of what it should be are the same; of an answer that names
    none, whether the texts are."""
    expected = last_number(answer)
    return text.strip() == answer.strip() if expected is None else last_number(text) == expected
