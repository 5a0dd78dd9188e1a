"""How answers are written: OpenAI's two forms of one completion, whole or in chunks."""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any, final

from longtail.engine.text import Decode, Detokenizer
from longtail.serve.stream import Chunk, Ending
from longtail.types import FinishReason

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ResponseFormat(abc.ABC):
    """What an endpoint's answers look like."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, str, str]:
        """Prefix of ids, then what a whole answer and a chunk of it are called."""

    @abc.abstractmethod
    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Write a whole completion."""

    @abc.abstractmethod
    def chunk(self, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        """Write a part of one."""

    @abc.abstractmethod
    def logprobs(self, tokens: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
        """Write tokens with their logprobs; `offset` is the characters before them."""


@final
class TextForm(ResponseFormat):
    """Of /v1/completions."""

    @property
    def names(self) -> tuple[str, str, str]:
        """Chunks are called as the whole is."""
        return "cmpl", "text_completion", "text_completion"

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Write a whole completion."""
        return {"text": text, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        """Write a part as a whole."""
        return self.choice(text, logprobs)

    def logprobs(self, tokens: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
        """Write them as columns."""
        offsets = []
        for text, _ in tokens:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


@final
class ChatForm(ResponseFormat):
    """Of /v1/chat/completions."""

    @property
    def names(self) -> tuple[str, str, str]:
        """Chunks have a name of their own."""
        return "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Write the assistant's message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        """Write what is added to the message."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
        """Write them as rows."""
        rows = [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode()) if "\ufffd" not in text else None,
                "top_logprobs": [],
            }
            for text, logprob in tokens
        ]
        return {"content": rows, "refusal": None}


@final
class Choice:
    """One completion as it comes in; logprobs are written down if they were asked for."""

    def __init__(self, form: ResponseFormat, decode: Decode | None) -> None:
        self._form = form
        self._tokens = None if decode is None else Detokenizer(decode)
        self._listed: list[tuple[str, float]] = []
        self._told = self._offset = 0
        """Tokens, and characters of them, that went out in chunks."""
        self._text: list[str] = []
        self.ending: Ending | None = None

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """Take what was written, and return what there is to tell of it."""
        first = not self._text
        self._text.append(chunk.text)
        self.ending = chunk.ending
        self.hold(chunk)
        listed = None
        if self._tokens is not None:
            listed = self._form.logprobs(self._listed[self._told :], self._offset)
            self._offset += sum(len(text) for text, _ in self._listed[self._told :])
            self._told = len(self._listed)
        return self._form.chunk(chunk.text, listed, first) | {"finish_reason": self._reason()}

    def hold(self, chunk: Chunk) -> None:
        """Keep the logprobs of tokens that have no text to show yet."""
        if self._tokens is None:
            return
        texts = [self._tokens.feed([token]) for token in chunk.tokens]
        if chunk.ending is not None:
            texts[-1] += self._tokens.flush()
        self._listed += zip(texts, chunk.logprobs, strict=True)

    def whole(self) -> dict[str, Any]:
        """Return all of it."""
        listed = None if self._tokens is None else self._form.logprobs(self._listed, 0)
        text = "".join(self._text)
        return self._form.choice(text, listed) | {"finish_reason": self._reason()}

    def _reason(self) -> str | None:
        return None if self.ending is None else _REASONS[self.ending.reason]


@final
class ResponseBuilder:
    """What stands around the choices of one answer: its name, when, of which model and seed."""

    def __init__(self, form: ResponseFormat, model: str, seed: int) -> None:
        prefix, self._whole, self._chunk = form.names
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created, self._model, self._seed = int(time.time()), model, seed

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """Return an answer that is complete."""
        listed = [{"index": index} | each.whole() for index, each in enumerate(choices)]
        return self._around(self._whole, listed) | self.usage(choices, prompt_tokens)

    def chunk(self, index: int, chunk: dict[str, Any]) -> dict[str, Any]:
        """Return a part of an answer."""
        return self._around(self._chunk, [{"index": index} | chunk])

    def last(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """Return what a stream ends with where usage was asked for."""
        return self._around(self._chunk, []) | self.usage(choices, prompt_tokens)

    def usage(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """Count tokens, and what drafting did for them."""
        endings = [each.ending for each in choices if each.ending is not None]
        written = sum(ending.num_tokens for ending in endings)
        accepted = sum(ending.num_accepted for ending in endings)
        verified = sum(ending.num_verified for ending in endings)
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": written,
                "total_tokens": prompt_tokens + written,
            },
            "longtail": {
                "seed": self._seed,
                "drafted_tokens": sum(ending.num_drafted for ending in endings),
                "accepted_tokens": accepted,
                "accept_length": round(1 + accepted / verified, 3) if verified else None,
            },
        }

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
