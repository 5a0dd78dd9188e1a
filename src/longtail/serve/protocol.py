"""OpenAI's protocol: the request bodies, checked, and the error body.

A field that would change the text and is not supported is refused by its name. Fields that change
nothing are ignored. Unknown fields are refused, since a mistyped option would be silently ignored.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from longtail.errors import JsonError
from longtail.system.strict_json import parse_json
from longtail.types import MIN_TEMPERATURE

_MAX_STOPS, _MAX_STOP_LEN = 16, 256
_MAX_SHOWN = 60


@final
class APIError(Exception):
    """An error response. Any code may raise it; `app` answers with its status and body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": _error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _error_type(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def _value_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def _stops(value: Any) -> Any:
    """Convert one stop string to a list."""
    listed = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > _MAX_STOPS:
        raise _value_error(f"give a string, or at most {_MAX_STOPS} of them")
    if not all(isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_LEN for stop in listed):
        raise _value_error(f"each must be a string of 1 to {_MAX_STOP_LEN} characters")
    return listed


def _prompts(value: Any) -> Any:
    """Convert a text, a list of token ids, or a list of either, to a list of prompts."""
    many = value if isinstance(value, list) else [value]
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        many = [value]
    for prompt in many:
        is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_tokens):
            raise _value_error("give a text or token ids, or several of them, none of them empty")
    if not many:
        raise _value_error("it is empty")
    return many


def _content(value: Any) -> Any:
    """Join the parts of a message; only text parts are supported."""
    if isinstance(value, list):
        texts: list[Any] = [
            part.get("text")
            for part in value
            if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
            raise _value_error(
                'parts must be {"type": "text", "text": ...}: only text is supported'
            )
        value = "".join(texts)
    if not isinstance(value, str):
        raise _value_error("give a string, or a list of text parts")
    return value


@final
class Message(BaseModel):
    """One message of a chat.

    Example: Message(role="user", content="3 + 4?")
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None
    # A client may send back the message of a response, whose other fields are null.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


@final
class StreamOptions(BaseModel):
    """Extra content of a stream.

    Example: StreamOptions(include_usage=True)
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _CommonFields(BaseModel):
    """Fields that both endpoints have."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Only values without an effect are accepted.
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None

    # Ignored: they do not change the text.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> "_CommonFields":
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise _field_error("temperature", f"it must be 0, or at least {MIN_TEMPERATURE}")
        if self.stream_options is not None and not self.stream:
            raise _field_error("stream_options", "it needs stream = true")
        return _only(
            self,
            presence_penalty=0,
            frequency_penalty=0,
            repetition_penalty=1.0,
            logit_bias={},
            min_tokens=0,
            ignore_eos=False,
            stop_token_ids=[],
            include_stop_str_in_output=False,
            skip_special_tokens=True,
        )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


Fields = TypeVar("Fields", bound=_CommonFields)


@final
class CompletionRequest(_CommonFields):
    """The body of /v1/completions.

    Example: CompletionRequest(model="tiny-reasoner", prompt=["3 + 4 ="], max_tokens=8, seed=1)
    """

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None

    @model_validator(mode="after")
    def _served(self) -> "CompletionRequest":
        if self.logprobs:
            raise _field_error("logprobs", _SAMPLED_ONLY)
        return _only(self, echo=False, suffix="", best_of=self.n or 1)


@final
class ChatCompletionRequest(_CommonFields):
    """The body of /v1/chat/completions.

    Example: ChatCompletionRequest(model="tiny-reasoner",
                                   messages=[Message(role="user", content="3 + 4?")])
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    parallel_tool_calls: Any = None

    @model_validator(mode="after")
    def _served(self) -> "ChatCompletionRequest":
        if self.top_logprobs:
            raise _field_error("top_logprobs", _SAMPLED_ONLY)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _field_error("max_tokens", "max_completion_tokens is its new name; give only one")
        return _only(
            self,
            tools=[],
            functions=[],
            tool_choice="none",
            function_call="none",
            response_format={"type": "text"},
            modalities=["text"],
            audio=None,
            reasoning_effort=None,
            verbosity=None,
            web_search_options=None,
        )


_SAMPLED_ONLY = "only the logprob of the sampled token is available; give 0 for that one"


def _only(body: Fields, **values: object) -> Fields:
    """Refuse fields that would change the text, unless they have the value without an effect."""
    for name, value in values.items():
        found = body.__dict__[name]
        if found is not None and found != value:
            accepted = f"null or {value!r}" if value is not None else "null"
            raise _field_error(name, f"not supported; leave it out, or give {accepted}")
    return body


def _field_error(name: str, message: str) -> PydanticCustomError:
    """Return the error of a field, for use outside the field's own validator."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": name})


@final
class TransferRequest(BaseModel):
    """The body of /init_weight_transfer_engine.

    Example: TransferRequest(init_info={"backend": "directory"})
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    init_info: dict[str, Any]


@final
class WeightDirectory(BaseModel):
    """Weights that a trainer has written.

    Example: WeightDirectory(directory="step-12", version=12, sha256={"model.safetensors": "9f..."})
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    directory: str
    """Directory with safetensors files in Hugging Face's names, inside that of --rl-dir."""
    version: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Number that responses report as `policy_version`; None: the next one."""
    sha256: dict[str, str] | None = None
    """Hexadecimal digest of each file; None: files are only checked against their headers."""


@final
class WeightUpdateRequest(BaseModel):
    """The body of /update_weights.

    Example: WeightUpdateRequest(update_info=WeightDirectory(directory="step-12"))
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    update_info: WeightDirectory


@final
class DrafterRequest(BaseModel):
    """The body of /update_drafter.

    Example: DrafterRequest(drafter="drafter-40")
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    drafter: Annotated[str, Field(min_length=1)]
    """Directory inside that of --rl-dir, history, none, or several joined by +."""


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse the body of a request. Raises APIError (400) for every malformed body."""
    try:
        return kind.model_validate(parse_json(body))
    except JsonError as error:
        raise APIError(400, f"the body: {error}", code="invalid_json") from error
    except ValidationError as error:
        raise _to_api_error(error.errors(include_url=False)) from error


def _to_api_error(errors: Sequence[Any]) -> APIError:
    """Describe the first problem of a body: the field, its value and what it must be."""
    first = errors[0]
    context = first.get("ctx") or {}
    param = context.get("param") or ".".join(str(part) for part in first["loc"])
    if not param:
        return APIError(400, "the body must be a JSON object", code="invalid_json")
    message = str(first["msg"])
    if first["type"] == "extra_forbidden":
        return APIError(400, f"{param}: no such field", param=param, code="unknown_field")
    if first["type"] == "missing":
        return APIError(400, f"{param} is missing", param=param, code="missing_field")
    shown = "" if "param" in context else f" = {_brief(first.get('input'))}"
    return APIError(400, f"{param}{shown}: {message}", param=param, code="invalid_value")


def _brief(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
