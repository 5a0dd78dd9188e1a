"""OpenAI's protocol: request bodies, checked by pydantic, and response bodies, whole or in chunks.

A field that would change the completion and is not supported is refused by its name. Fields that
change nothing are ignored. Unknown fields are refused: a mistyped option would have no effect.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, final

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from longtail.engine.text import Reader
from longtail.generator import Emitted, Verified
from longtail.model.hf.chat import join_parts
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.service import Event
from longtail.types import Completion

_NOT_EMPTY = Field(min_length=1)
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"), 0),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "echo"), False),
    "tools": [],
    "logit_bias": {},
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "best_of": 1,
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
"""Fields that are not supported, with the value that has no effect and is accepted."""
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "parallel_tool_calls"),
}
"""Fields that do not change the completion."""
_CONTENTS = ("audio", "function_call", "refusal")
"""Contents of messages that no chat template writes."""


def _prompts(value: Any) -> Any:
    """Return a list of prompts; a single one is a text or a list of token ids."""
    is_list = isinstance(value, list) and not all(type(each) is int for each in value)
    return value if is_list else [value]


def _content(value: Any) -> Any:
    """Join the parts of a message; only text parts are supported."""
    if not isinstance(value, list):
        return value
    if (text := join_parts(value)) is None:
        raise ValueError('parts must be {"type": "text", "text": ...}: only text is supported')
    return text


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
class Message(BaseModel):
    """One message of a chat. Fields that are not named here are for the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content)]

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: Any) -> Any:
        """Leave out fields without a value; a message with tool calls needs no content."""
        if not isinstance(fields, dict):
            return fields
        if found := [name for name in _CONTENTS if fields.get(name)]:
            raise ValueError(f"{found[0]} is not supported; leave it out")
        given = {name: value for name, value in fields.items() if value not in (None, [], {})}
        return {**({"content": ""} if "tool_calls" in given else {}), **given}


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
    stop_token_ids: Annotated[list[int], Field(max_length=64)] = []
    """Tokens that end a completion, besides the model's own."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


@final
class CompletionRequest(_CommonFields):
    """The body of /v1/completions."""

    prompt: Annotated[
        list[Annotated[str, _NOT_EMPTY] | Annotated[list[int], _NOT_EMPTY]],
        BeforeValidator(_prompts),
    ]
    add_special_tokens: bool = True
    """Whether a text begins with the tokenizer's BOS, as in vLLM; lists of ids stay as they are."""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0 asks for the logprobs of the sampled tokens; those of others are not available."""


@final
class ChatRequest(_CommonFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], _NOT_EMPTY]
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    logprobs: bool = False


Body = CompletionRequest | ChatRequest


def problem(error: ValidationError) -> tuple[str | None, str]:
    """Return the first wrong field of a body, and its value and what it must be."""
    first = error.errors(include_url=False)[0]
    # The kinds of a union are parts of pydantic's location: prompt.0.list[int].1, messages.0.role
    own = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    unknown = first["type"] == "extra_forbidden"
    field = ".".join(map(str, first["loc"] if unknown else own))
    message = first["msg"].removeprefix("Value error, ")
    if not field:
        return None, f"the body must be a JSON object: {message}"
    if first["type"] == "missing":
        return field, f"{field} is missing"
    if unknown:
        neutral = _NEUTRAL.get(str(first["loc"][-1]))
        message = "no such field, or not supported; leave it out"
        message += "" if neutral is None else f", or give {neutral!r}"
    return field, f"{field} = {first['input']!a:.60}: {message}"


@final
class _Choice:
    """One completion: what is generated and not sent yet."""

    def __init__(self, body: Body, index: int, prompt: Sequence[int], tokenizer: Tokenizer) -> None:
        self._body, self._index, self._prompt = body, index, prompt
        self._tokenizer, self._reader = tokenizer, Reader(tokenizer.decode, body.stop)
        self._has_logprobs = body.logprobs is not None and body.logprobs is not False  # 0 is true
        self._text, self._ids = "", list[int]()
        self._logprobs = list[tuple[str, list[int], float]]()
        self._is_first, self._reason = True, ""

    def add(self, events: Sequence[Event]) -> bool:
        """Add the results of a step and return whether a stream has something to send."""
        emitted = [event for event in events if isinstance(event, Emitted)]
        done = events[-1] if isinstance(events[-1], Completion) else None
        ids = [each.token for each in emitted]
        self._ids += ids
        self._text += self._reader.feed(ids)
        if done is not None:
            self._text += self._reader.finish(done.text)
        if self._has_logprobs:
            self._logprobs += [(*self._named(each.token), each.logprob) for each in emitted]
        self._reason = "" if done is None else done.finish_reason.value
        return bool(self._text or done)

    def _named(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; parts of a character are written as OpenAI does.

        An id without text is written as `return_tokens_as_token_ids` writes all.

        Example: of the first of two tokens of "é": ("\\xc3", [195])
        """
        whole = self._tokenizer.token_bytes(token)
        try:
            text = whole.decode()
        except UnicodeDecodeError:
            text = "".join(f"\\x{byte:02x}" for byte in whole)
        by_id = self._body.return_tokens_as_token_ids or not text
        return f"token_id:{token}" if by_id else text, list(whole)

    def take(self) -> dict[str, Any]:
        """Return the body of what was not sent yet."""
        is_chat, first, self._is_first = isinstance(self._body, ChatRequest), self._is_first, False
        body: dict[str, Any] = {"index": self._index, "logprobs": None}
        body["finish_reason"] = self._reason or None
        if not is_chat:
            body["text"] = self._text
        elif self._body.stream:
            body["delta"] = ({"role": "assistant"} if first else {}) | {"content": self._text}
        else:
            body["message"] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._has_logprobs and is_chat:
            rows: list[Any] = [
                {"token": name, "logprob": logprob, "bytes": whole, "top_logprobs": []}
                for name, whole, logprob in self._logprobs
            ]
            body["logprobs"] = {"content": rows}
        elif self._has_logprobs:
            names, _, logprobs = zip(*self._logprobs, strict=True) if self._logprobs else ((),) * 3
            body["logprobs"] = {"tokens": list(names), "token_logprobs": list(logprobs)}
        if self._body.return_token_ids:
            body["token_ids"] = self._ids
            if not is_chat:
                body["prompt_token_ids"] = list(self._prompt) if first else None
        self._text, self._ids, self._logprobs = "", [], []
        return body


@final
class ResponseBuilder:
    """Builds the response to one call, whole or in chunks, while its completions are generated."""

    def __init__(
        self, body: Body, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer, seed: int
    ) -> None:
        self._body, self._prompts, self._seed = body, prompts, seed
        prefix, kind = "cmpl", "text_completion"
        if isinstance(body, ChatRequest):
            prefix, kind = "chatcmpl", "chat.completion" + (".chunk" if body.stream else "")
        self._base: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }
        if body.return_token_ids and isinstance(body, ChatRequest):
            self._base["prompt_token_ids"] = list(prompts[0])
        self._choices = [
            _Choice(body, index, prompts[index // body.n], tokenizer)
            for index in range(len(prompts) * body.n)
        ]
        self._generated = self._drafted = self._accepted = self._verified = 0

    def add(self, choice: int, events: Sequence[Event]) -> dict[str, Any] | None:
        """Add the results of a step and return the body to stream, if there is one."""
        for event in events:
            self._generated += isinstance(event, Emitted)
            if isinstance(event, Verified):
                self._verified += 1
                self._drafted += event.num_drafted
                self._accepted += event.num_accepted
        if not self._choices[choice].add(events) or not self._body.stream:
            return None
        chunk = self._base | {"choices": [self._choices[choice].take()]}
        self._base.pop("prompt_token_ids", None)  # it is in the first chunk alone
        return chunk

    def end(self) -> dict[str, Any]:
        """Return the whole response, or the last chunk of a stream that includes its usage."""
        prompt_tokens, verified = sum(map(len, self._prompts)), self._verified
        return self._base | {
            "choices": [] if self._body.stream else [each.take() for each in self._choices],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": self._generated,
                "total_tokens": prompt_tokens + self._generated,
            },
            "longtail": {
                "seed": self._seed,
                "drafted_tokens": self._drafted,
                "accepted_tokens": self._accepted,
                "accept_length": round(1 + self._accepted / verified, 3) if verified else None,
            },
        }
