"""Text and token ids: a checkpoint's `tokenizer.json` and chat template, and text told token by token.

The libraries (`tokenizers`, `jinja2`) are imported when a folder has something for them to read. A chat
template is a program of the checkpoint's author: it runs in a sandbox that denies attributes of Python's own
and cannot change what it is given.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from policies.core.errors import InputError
from policies.process.documents import parse_json, read_text
from policies.process.sentences import one_line

MAX_TOKENIZER_BYTES = 64_000_000
MAX_TEMPLATE_BYTES = 200_000
HALF = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are not a whole character yet."""


def tokenizer_path(given: str | None, model: str) -> Path | None:
    """The `tokenizer.json` that `given` names, else that of the model's folder; None where there is none."""
    if given is not None:
        return Path(given) / "tokenizer.json" if Path(given).is_dir() else Path(given)
    path = Path(model)
    own = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return own if path.is_absolute() and own.is_file() else None


class Tokenizer:
    """The `tokenizer.json` of `folder`, and its chat template where there is one."""

    def __init__(self, folder: Path) -> None:
        """Raises `InputError` when a file cannot be used or a library is missing."""
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        text = read_text(path, "a tokenizer.json", MAX_TOKENIZER_BYTES)
        try:
            import tokenizers
        except ImportError:
            raise InputError(
                f"{path}: needs the package tokenizers, which is not installed: pip install '.[serve]'"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise InputError(
                f"{path}: is no tokenizer ({one_line(error)[:200]}), expected a tokenizer.json"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.path = path
        self._template = _chat_template(path.parent)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the tokenizer puts around a text unless told otherwise."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that the checkpoint's template makes of `messages` for the assistant to go on from.

        Raises `InputError` when there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise InputError(f"{self.path.parent}: has no chat template, expected a prompt")
        return self._template.render(messages)


class ChatTemplate:
    """A jinja template in a sandbox. `names` are the special tokens it may write."""

    def __init__(self, source: str, names: Mapping[str, str], where: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise InputError(
                f"{where}: needs the package jinja2, which is not installed: pip install '.[serve]'"
            ) from None

        class Sandbox(ImmutableSandboxedEnvironment):
            """No attribute that begins with an underscore, and of attributes only those of plain values."""

            intercepted_binops = frozenset({"*", "**"})

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                if not (isinstance(left, int) and isinstance(right, int) and operator == "*"):
                    raise TemplateError("a template may multiply whole numbers only")
                return super().call_binop(context, operator, left, right)

        def refuse(message: object) -> None:
            raise TemplateError(str(message))

        self._where, self._error = where, TemplateError
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals = {name: environment.globals[name] for name in ("namespace", "range")}
        environment.globals["raise_exception"] = refuse
        self._names = dict(names)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"{where}: chat template: {one_line(error)[:200]}") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Raises `InputError` for whatever the template makes go wrong."""
        plain = [dict(message) for message in messages]
        try:
            pieces, size = [], 0
            for piece in self._template.generate(messages=plain, add_generation_prompt=True, **self._names):
                pieces.append(piece)
                size += len(piece)
                if size > 16 * MAX_TEMPLATE_BYTES + 4 * sum(len(item["content"]) for item in plain):
                    raise self._error("makes far more text than it was given")
            return "".join(pieces)
        except (self._error, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"messages: the chat template refuses them: {one_line(error)[:200]}") from None


def _chat_template(folder: Path) -> ChatTemplate | None:
    """The template that a checkpoint's folder has: a file of its own, or a key of its tokenizer's config."""
    config: Any = {}
    path = folder / "tokenizer_config.json"
    if path.exists():
        text = read_text(path, "a tokenizer_config.json", MAX_TOKENIZER_BYTES)
        # transformers writes a model_max_length of 10**30 for none
        config = parse_json(text, str(path), parse_int=lambda digits: int(digits[:19]))
        if not isinstance(config, dict):
            raise InputError(f"{path}: expected a JSON object, found {type(config).__name__}")
    source, where = config.get("chat_template"), str(path)
    own = folder / "chat_template.jinja"
    if own.exists():
        source, where = read_text(own, "a chat template", MAX_TEMPLATE_BYTES), str(own)
    if isinstance(source, list):
        named = [item.get("template") for item in source if isinstance(item, dict)]
        source = next(iter(named), None)
    if source is None:
        return None
    if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
        raise InputError(
            f"{where}: chat_template: expected a text of at most {MAX_TEMPLATE_BYTES:,} characters"
        )
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        names[key] = value if isinstance(value, str) else ""
    return ChatTemplate(source, names, where)


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Text from tokens, as they come: what is whole of it.

    Some tokens before decide how a token reads, so each is decoded beside those since the last but one word.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._from = self._told = 0

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none."""
        self._ids.append(token)
        before = self._decoder.decode(self._ids[self._from : self._told])
        now = self._decoder.decode(self._ids[self._from :])
        if len(now) <= len(before) or now.endswith(HALF):
            return ""
        self._from, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def rest(self) -> str:
        """What was held back, now that no more tokens come."""
        before = self._decoder.decode(self._ids[self._from : self._told])
        self._from, self._ids = 0, self._ids[self._from :]
        self._told = len(self._ids)
        return self._decoder.decode(self._ids)[len(before) :]


class StopStrings:
    """Cuts a text where the first of `stops` begins, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """What of the text until now can be told."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        hold = 0
        for stop in self._stops:
            longest = min(len(stop) - 1, len(text))
            hold = max([hold, *(size for size in range(1, longest + 1) if text.endswith(stop[:size]))])
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held
