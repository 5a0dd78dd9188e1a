"""Response bodies of OpenAI's two endpoints, whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, final

from longtail.engine.text import Decode, Detokenizer
from longtail.serve.stream import Chunk, Ending
from longtail.types import FinishReason

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@final
class TextFormat:
    """Format of /v1/completions."""

    names = ("cmpl", "text_completion", "text_completion")
    """Prefix of ids, `object` of a whole response and `object` of a chunk."""

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the body of a whole completion."""
        return {"text": text, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        """Return the body of a part, which has the format of a whole completion."""
        return self.choice(text, logprobs)

    def logprobs(self, tokens: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
        """Return tokens and logprobs as columns; `offset` counts the characters before them."""
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
class ChatFormat:
    """Format of /v1/chat/completions."""

    names = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the body of a whole completion: the assistant's message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        """Return the body of a part: the text to append to the message."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
        """Return tokens and logprobs as rows."""
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


ResponseFormat = TextFormat | ChatFormat


@final
class _Choice:
    """Text, logprobs and ending of one completion, as far as it is generated."""

    def __init__(self, response_format: ResponseFormat, decode: Decode | None) -> None:
        self._format = response_format
        self._detokenizer = None if decode is None else Detokenizer(decode)
        """None if the call does not ask for logprobs."""
        self._logprobs: list[tuple[str, float]] = []
        self._num_sent = self._offset = 0
        """Number of tokens, and of their characters, in the chunks sent so far."""
        self._text: list[str] = []
        self.ending: Ending | None = None

    def add(self, chunk: Chunk) -> dict[str, Any] | None:
        """Add a chunk and return the body to send; None for one without text, unless it ends."""
        if self._detokenizer is not None:
            texts = [self._detokenizer.feed([token]) for token in chunk.tokens]
            if chunk.ending is not None:
                texts[-1] += self._detokenizer.flush()
            self._logprobs += zip(texts, chunk.logprobs, strict=True)
        if not chunk.text and chunk.ending is None:
            return None
        first = not self._text
        self._text.append(chunk.text)
        self.ending = chunk.ending
        logprobs = None
        if self._detokenizer is not None:
            unsent = self._logprobs[self._num_sent :]
            logprobs = self._format.logprobs(unsent, self._offset)
            self._offset += sum(len(text) for text, _ in unsent)
            self._num_sent = len(self._logprobs)
        body = self._format.chunk(chunk.text, logprobs, first)
        return body | {"finish_reason": self._finish_reason()}

    def whole(self) -> dict[str, Any]:
        """Return the body of the whole completion."""
        listed = None if self._detokenizer is None else self._format.logprobs(self._logprobs, 0)
        body = self._format.choice("".join(self._text), listed)
        return body | {"finish_reason": self._finish_reason()}

    def _finish_reason(self) -> str | None:
        return None if self.ending is None else _REASONS[self.ending.reason]


@final
class ResponseBuilder:
    """Builds the response to one call, whole or in chunks, while its completions are generated."""

    def __init__(
        self,
        response_format: ResponseFormat,
        num_choices: int,
        decode: Decode | None,
        *,
        model: str,
        seed: int,
        prompt_tokens: int,
    ) -> None:
        """`decode` is needed for logprobs; None leaves them out."""
        prefix, self._whole_name, self._chunk_name = response_format.names
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created, self._model, self._seed = int(time.time()), model, seed
        self._choices = [_Choice(response_format, decode) for _ in range(num_choices)]
        self._prompt_tokens = prompt_tokens

    def add(self, chunk: Chunk) -> dict[str, Any] | None:
        """Add a chunk and return the body to stream, if there is something to show."""
        choice = self._choices[chunk.choice].add(chunk)
        if choice is None:
            return None
        return self._body(self._chunk_name, [{"index": chunk.choice} | choice])

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        choices = [{"index": index} | each.whole() for index, each in enumerate(self._choices)]
        return self._body(self._whole_name, choices) | self._usage()

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that includes its usage."""
        return self._body(self._chunk_name, []) | self._usage()

    def _usage(self) -> dict[str, Any]:
        """Return token counts, seed and speculation counts."""
        endings = [each.ending for each in self._choices if each.ending is not None]
        generated = sum(ending.num_tokens for ending in endings)
        accepted = sum(ending.num_accepted for ending in endings)
        verified = sum(ending.num_verified for ending in endings)
        return {
            "usage": {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": self._prompt_tokens + generated,
            },
            "longtail": {
                "seed": self._seed,
                "drafted_tokens": sum(ending.num_drafted for ending in endings),
                "accepted_tokens": accepted,
                "accept_length": round(1 + accepted / verified, 3) if verified else None,
            },
        }

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
