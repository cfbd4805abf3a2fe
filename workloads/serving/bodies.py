"""Bodies of requests, checked: what of OpenAI's completions and chat completions is served, and one sentence
for everything else.

A key is applied, is without consequence for an answer by its meaning (who asked), or is refused by its name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from policies.core.errors import InputError
from policies.process.documents import parse_json
from policies.process.sentences import expectation, nearest, shown

Body = TypeVar("Body", bound="Common")
MAX_STOPS = 16
Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[str, Field(strict=True)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: Annotated[bool, Field(strict=True)] = False
    continuous_usage_stats: Annotated[bool, Field(strict=True)] = False


class Common(BaseModel):
    """What both kinds have. None is what the server takes where nothing is said."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Text | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    stream: Annotated[bool, Field(strict=True)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool, Field(strict=True)] = False
    n: Literal[1] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    user: Text | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Common):
    """`POST /v1/completions`: one prompt, as a text or as token ids."""

    prompt: Text | list[Text] | list[Id] | list[list[Id]]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt, out of a list of one. Raises `InputError` for several."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise InputError(f"prompt: {len(prompt)} prompts, expected one for a request")
            return prompt[0]
        return prompt  # type: ignore[return-value]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Annotated[str, Field(strict=True, min_length=1, max_length=40)]
    content: Text | list[Part]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text, **({"name": self.name} if self.name else {})}


class Chat(Common):
    """`POST /v1/chat/completions`: messages for the checkpoint's template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: None = None


def parse_body(kind: type[Body], data: bytes) -> Body:
    """The checked body. Raises `InputError` with one sentence."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("the body is not UTF-8, expected a JSON object") from None
    value = parse_json(text, "the body")
    if not isinstance(value, Mapping):
        raise InputError(f"the body is {shown(value)}, expected a JSON object")
    try:
        return TypeAdapter(kind).validate_python(dict(value))
    except ValidationError as error:
        raise InputError(_sentence(kind, error.errors(include_url=False))) from None


def _sentence(kind: type[Common], problems: list[Any]) -> str:
    problem = next((item for item in problems if item["type"] == "extra_forbidden"), problems[0])
    names = [str(part)[:40] for part in problem["loc"] if isinstance(part, int) or str(part).islower()]
    if problem["type"] == "extra_forbidden":
        known = StreamOptions.model_fields if names[0] == "stream_options" else kind.model_fields
        return f"unknown key {shown('.'.join(names))}{nearest(names[-1], known)}"
    key = names[0] if names else "the body"
    if problem["type"] == "missing":
        return f"{'.'.join(names)}: is missing, expected a value"
    if key == "prompt":
        return f"prompt: {shown(problem['input'])}, expected a text or a list of token ids"
    return f"{'.'.join(names)}: {shown(problem['input'])}, {expectation(problem['msg'])}"
