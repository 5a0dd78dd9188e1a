"""OpenAI's protocol: the request bodies, checked by pydantic, and the error body.

A field that would change the text and is not supported is refused by its name. Fields that change
nothing are ignored. Unknown fields are refused, since a mistyped option would be silently ignored.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, final

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from longtail.types import MIN_TEMPERATURE

_MAX_SHOWN = 60
_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "echo": False,
    "best_of": 1,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""Fields that are not supported, with the value that has no effect and is accepted."""
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "parallel_tool_calls"),
}
"""Fields that do not change the text."""


@final
class APIError(Exception):
    """An error response. Any code may raise it; `app` answers with its status and body."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error body."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, other)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def _prompts(value: Any) -> Any:
    """Convert a text, a list of token ids, or a list of either, to a list of prompts."""
    prompts = value if isinstance(value, list) and not _is_tokens(value) else [value]
    if not prompts or not all(
        prompt and (isinstance(prompt, str) or _is_tokens(prompt)) for prompt in prompts
    ):
        raise ValueError("give a text or token ids, or several of them, none of them empty")
    return prompts


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _content(value: Any) -> Any:
    """Join the parts of a message; only text parts are supported."""
    if not isinstance(value, list):
        return value
    parts = [part if isinstance(part, dict) else {} for part in value]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if len(texts) < len(parts) or any(part.get("type") != "text" for part in parts):
        raise ValueError('parts must be {"type": "text", "text": ...}: only text is supported')
    return "".join(texts)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Leave out null, ignored fields, and values without an effect."""
        if not isinstance(fields, dict):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if value is not None
            and name not in _IGNORED
            and not (name in _NEUTRAL and value == _NEUTRAL[name])
        }


@final
class Message(_Body):
    """One message of a chat.

    Example: Message(role="user", content="3 + 4?")
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None


class _CommonFields(_Body):
    """Fields that both endpoints have."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    n: Annotated[int, Field(ge=1)] = 1
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
        Field(max_length=16),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"it must be 0, or at least {MIN_TEMPERATURE}")
        return value

    @field_validator("stream_options")
    @classmethod
    def _stream_options(cls, value: dict[str, bool], info: Any) -> dict[str, bool]:
        if not info.data.get("stream"):
            raise ValueError("it needs stream = true")
        return value

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options.get("include_usage", False)


@final
class CompletionRequest(_CommonFields):
    """The body of /v1/completions.

    Example: CompletionRequest(model="smollm2", prompt=["3 + 4 ="], max_tokens=8, seed=1)
    """

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0 asks for the logprobs of the sampled tokens; those of others are not available."""


@final
class ChatCompletionRequest(_CommonFields):
    """The body of /v1/chat/completions.

    Example: ChatCompletionRequest(model="smollm2",
                                   messages=[Message(role="user", content="3 + 4?")])
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    logprobs: bool = False


Request = TypeVar("Request", bound=_CommonFields)


def parse_body(kind: type[Request], body: bytes) -> Request:
    """Parse the body of a request. Raises APIError (400) for every malformed body."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _to_api_error(error.errors(include_url=False)) from error


def _to_api_error(errors: Sequence[Any]) -> APIError:
    """Describe the first problem of a body: the field, its value and what it must be."""
    first = errors[0]
    param = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if not param:
        return APIError(400, f"the body must be a JSON object: {message}", code="invalid_json")
    if first["type"] == "missing":
        return APIError(400, f"{param} is missing", param=param, code="missing_field")
    shown = ascii(first.get("input"))
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    if first["type"] == "extra_forbidden":
        name = first["loc"][-1]
        message = "no such field, or not supported; leave it out"
        if name in _NEUTRAL:
            message = f"not supported; leave it out, or give {_NEUTRAL[name]!r}"
        return APIError(400, f"{param} = {shown}: {message}", param=param, code="unknown_field")
    return APIError(400, f"{param} = {shown}: {message}", param=param, code="invalid_value")
