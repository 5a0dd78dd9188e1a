"""Response bodies of OpenAI's two endpoints, whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from longtail.engine.text import Decode, Detokenizer
from longtail.serve.stream import Chunk, Ending
from longtail.types import FinishReason

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


class TokenRow(NamedTuple):
    """A generated token as a response shows it."""

    text: str
    name: str
    """The text, or "token_id:17" if the call asks for ids."""
    logprob: float


@final
class TextFormat:
    """Format of /v1/completions."""

    prompt_in_choice = True
    """Whether the token ids of the prompt are in the choice rather than beside all choices."""
    names = ("cmpl", "text_completion", "text_completion")
    """Prefix of ids, `object` of a whole response and `object` of a chunk."""

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the body of a whole completion."""
        return {"text": text, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        """Return the body of a part, which has the format of a whole completion."""
        return self.choice(text, logprobs)

    def logprobs(self, tokens: Sequence[TokenRow], offset: int) -> dict[str, Any]:
        """Return tokens and logprobs as columns; `offset` counts the characters before them."""
        offsets = []
        for each in tokens:
            offsets.append(offset)
            offset += len(each.text)
        return {
            "tokens": [each.name for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [{each.name: each.logprob} for each in tokens],
            "text_offset": offsets,
        }


@final
class ChatFormat:
    """Format of /v1/chat/completions."""

    prompt_in_choice = False
    names = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the body of a whole completion: the assistant's message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def chunk(self, text: str, logprobs: dict[str, Any] | None, first: bool) -> dict[str, Any]:
        """Return the body of a part: the text to append to the message."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[TokenRow], offset: int) -> dict[str, Any]:
        """Return tokens and logprobs as rows."""
        rows = [
            {
                "token": each.name,
                "logprob": each.logprob,
                "bytes": list(each.text.encode()) if "\ufffd" not in each.text else None,
                "top_logprobs": [],
            }
            for each in tokens
        ]
        return {"content": rows, "refusal": None}


ResponseFormat = TextFormat | ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of a response.

    Example: Contents(format=TextFormat(), decode=tokenizer.decode, with_token_ids=True)
    """

    format: ResponseFormat
    decode: Decode | None
    """Decoder of the tokens whose logprobs are shown; None leaves logprobs out."""
    with_token_ids: bool = False
    """Whether the token ids of prompts and completions are included."""
    ids_as_names: bool = False
    """Whether tokens with logprobs are shown as "token_id:17" rather than by their text."""


@final
class _Choice:
    """Text, tokens, logprobs and ending of one completion, as far as it is generated."""

    def __init__(self, contents: Contents, prompt: Sequence[int]) -> None:
        self._contents, self._prompt = contents, prompt
        decode = contents.decode
        self._detokenizer = None if decode is None else Detokenizer(decode)
        """None if the call does not ask for logprobs."""
        self._tokens: list[int] = []
        self._rows: list[TokenRow] = []
        self._num_sent = self._offset = 0
        """Number of tokens, and of their characters, in the chunks sent so far."""
        self._text: list[str] = []
        self.ending: Ending | None = None

    def add(self, chunk: Chunk) -> dict[str, Any] | None:
        """Add a chunk and return the body to send; None for one without text, unless it ends."""
        self._tokens += chunk.tokens
        if self._detokenizer is not None:
            self._rows += self._read(self._detokenizer, chunk)
        if not chunk.text and chunk.ending is None:
            return None
        first = not self._text
        self._text.append(chunk.text)
        self.ending = chunk.ending
        start, self._num_sent = self._num_sent, len(self._tokens)
        logprobs = None
        if self._detokenizer is not None:
            unsent = self._rows[start:]
            logprobs = self._contents.format.logprobs(unsent, self._offset)
            self._offset += sum(len(each.text) for each in unsent)
        body = self._contents.format.chunk(chunk.text, logprobs, first)
        return body | self._token_ids(start, first) | {"finish_reason": self._finish_reason()}

    def whole(self) -> dict[str, Any]:
        """Return the body of the whole completion."""
        contents = self._contents
        listed = None if self._detokenizer is None else contents.format.logprobs(self._rows, 0)
        body = contents.format.choice("".join(self._text), listed)
        return body | self._token_ids(0, True) | {"finish_reason": self._finish_reason()}

    def _read(self, detokenizer: Detokenizer, chunk: Chunk) -> list[TokenRow]:
        """Return the tokens of a chunk with their texts."""
        texts = [detokenizer.feed([token]) for token in chunk.tokens]
        if chunk.ending is not None and texts:
            texts[-1] += detokenizer.flush()
        names = texts
        if self._contents.ids_as_names:
            names = [f"token_id:{token}" for token in chunk.tokens]
        return [TokenRow(*row) for row in zip(texts, names, chunk.logprobs, strict=True)]

    def _token_ids(self, start: int, first: bool) -> dict[str, Any]:
        """Return the token ids from `start` on and, in the first body, those of the prompt."""
        if not self._contents.with_token_ids:
            return {}
        own = {"token_ids": self._tokens[start:]}
        if not self._contents.format.prompt_in_choice:
            return own
        return own | {"prompt_token_ids": list(self._prompt) if first else None}

    def _finish_reason(self) -> str | None:
        return None if self.ending is None else _REASONS[self.ending.reason]


@final
class ResponseBuilder:
    """Builds the response to one call, whole or in chunks, while its completions are generated."""

    def __init__(
        self,
        contents: Contents,
        prompts: Sequence[Sequence[int]],
        num_choices: int,
        *,
        model: str,
        seed: int,
    ) -> None:
        """`num_choices` is the number of completions of each prompt."""
        prefix, self._whole_name, self._chunk_name = contents.format.names
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created, self._model, self._seed = int(time.time()), model, seed
        self._contents, self._prompts = contents, prompts
        self._num_choices = num_choices
        self._choices = [self._fresh(index) for index in range(len(prompts) * num_choices)]
        self._is_first = True

    def _fresh(self, index: int) -> _Choice:
        return _Choice(self._contents, self._prompts[index // self._num_choices])

    def add(self, chunk: Chunk) -> dict[str, Any] | None:
        """Add a chunk and return the body to stream, if there is something to show."""
        if chunk.is_rewrite:
            self._choices[chunk.choice] = self._fresh(chunk.choice)
        choice = self._choices[chunk.choice].add(chunk)
        if choice is None:
            return None
        body = self._body(self._chunk_name, [{"index": chunk.choice} | choice])
        shows_prompt, self._is_first = self._is_first, False
        return body | self._prompt_ids() if shows_prompt else body

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        choices = [{"index": index} | each.whole() for index, each in enumerate(self._choices)]
        return self._body(self._whole_name, choices) | self._prompt_ids() | self._usage()

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that includes its usage."""
        return self._body(self._chunk_name, []) | self._usage()

    def _prompt_ids(self) -> dict[str, Any]:
        """Return the prompt's token ids, where they are asked for and the same for all choices."""
        contents = self._contents
        if not contents.with_token_ids or contents.format.prompt_in_choice:
            return {}
        return {"prompt_token_ids": list(self._prompts[0])}

    def _usage(self) -> dict[str, Any]:
        """Return token counts, seed and speculation counts."""
        endings = [each.ending for each in self._choices if each.ending is not None]
        generated = sum(ending.num_tokens for ending in endings)
        drafted = sum(ending.num_drafted for ending in endings)
        accepted = sum(ending.num_accepted for ending in endings)
        verified = sum(ending.num_verified for ending in endings)
        prompt_tokens = sum(map(len, self._prompts))
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": prompt_tokens + generated,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": accepted,
                    "rejected_prediction_tokens": drafted - accepted,
                },
            },
            "longtail": {
                "seed": self._seed,
                "policy_version": min((each.policy_version for each in endings), default=0),
                "drafted_tokens": drafted,
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
