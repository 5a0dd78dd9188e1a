"""Response bodies of OpenAI's two endpoints, whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from longtail.engine.report import Emitted, Verified
from longtail.engine.text import Decode, Detokenizer, Reader
from longtail.serve.protocol import ChatCompletionRequest, CompletionRequest
from longtail.serve.service import Event
from longtail.types import Completion


class _Token(NamedTuple):
    """A generated token as a response shows it."""

    text: str
    name: str
    """The text, or "token_id:17" if the call asks for ids."""
    logprob: float


def _text_logprobs(tokens: Sequence[_Token], offset: int) -> dict[str, Any]:
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


def _chat_logprobs(tokens: Sequence[_Token]) -> dict[str, Any]:
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


@final
class _Choice:
    """One completion: what is generated and not sent yet."""

    def __init__(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        index: int,
        prompt: Sequence[int],
        decode: Decode,
    ) -> None:
        self._body, self._index, self._prompt = body, index, prompt
        self._reader = Reader(decode, body.stop)
        has_logprobs = body.logprobs is not None and body.logprobs is not False  # 0 is a number
        self._detokenizer = Detokenizer(decode) if has_logprobs else None
        self._text, self._ids, self._tokens = "", list[int](), list[_Token]()
        self._offset = 0
        """Number of characters of the tokens sent so far."""
        self._is_first = True

    def add(self, events: Sequence[Event]) -> dict[str, Any] | None:
        """Add the results of a step and return the body to send.

        None if there is none yet: of a stream without new text, of a whole response before its end.
        """
        emitted = [event for event in events if isinstance(event, Emitted)]
        done = events[-1] if isinstance(events[-1], Completion) else None
        self._ids += [each.token for each in emitted]
        self._text += self._reader.feed([each.token for each in emitted])
        if done is not None:
            self._text += self._reader.finish(done.text)
        if self._detokenizer is not None:
            texts = [self._detokenizer.feed([each.token]) for each in emitted]
            texts[-1] += "" if done is None else self._detokenizer.flush()
            for text, each in zip(texts, emitted, strict=True):
                by_id = self._body.return_tokens_as_token_ids
                name = f"token_id:{each.token}" if by_id else text
                self._tokens.append(_Token(text, name, each.logprob))
        if done is None and not (self._body.stream and self._text):
            return None
        return self._take() | {"finish_reason": done and done.finish_reason.value}

    def _take(self) -> dict[str, Any]:
        """Return the body of what was not sent yet."""
        body: dict[str, Any] = {"index": self._index, "logprobs": None}
        first, self._is_first = self._is_first, False
        if isinstance(self._body, CompletionRequest):
            body["text"] = self._text
        elif self._body.stream:
            role = {"role": "assistant"} if first else {}
            body["delta"] = role | {"content": self._text}
        else:
            body["message"] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._detokenizer is not None:
            if isinstance(self._body, CompletionRequest):
                body["logprobs"] = _text_logprobs(self._tokens, self._offset)
            else:
                body["logprobs"] = _chat_logprobs(self._tokens)
            self._offset += sum(len(each.text) for each in self._tokens)
        if self._body.return_token_ids:
            body["token_ids"] = self._ids
            if isinstance(self._body, CompletionRequest):
                body["prompt_token_ids"] = list(self._prompt) if first else None
        self._text, self._ids, self._tokens = "", [], []
        return body


@final
class ResponseBuilder:
    """Builds the response to one call, whole or in chunks, while its completions are generated."""

    def __init__(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        prompts: Sequence[Sequence[int]],
        decode: Decode,
        seed: int,
    ) -> None:
        self._body, self._prompts, self._seed = body, prompts, seed
        prefix, kind = "cmpl", "text_completion"
        if isinstance(body, ChatCompletionRequest):
            prefix, kind = "chatcmpl", "chat.completion" + (".chunk" if body.stream else "")
        self._base: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }
        if body.return_token_ids and isinstance(body, ChatCompletionRequest):
            self._base["prompt_token_ids"] = list(prompts[0])
        self._choices = [
            _Choice(body, index, prompts[index // body.n], decode)
            for index in range(len(prompts) * body.n)
        ]
        self._ended: dict[int, dict[str, Any]] = {}
        self._generated = self._drafted = self._accepted = self._verified = 0

    def add(self, choice: int, events: Sequence[Event]) -> dict[str, Any] | None:
        """Add the results of a step and return the body to stream, if there is one."""
        for event in events:
            self._generated += isinstance(event, Emitted)
            if isinstance(event, Verified):
                self._verified += 1
                self._drafted += event.num_drafted
                self._accepted += event.num_accepted
        body = self._choices[choice].add(events)
        if body is None:
            return None
        if not self._body.stream:
            self._ended[choice] = body
            return None
        chunk = self._base | {"choices": [body]}
        self._base.pop("prompt_token_ids", None)  # it is in the first chunk alone
        return chunk

    def end(self) -> dict[str, Any]:
        """Return the whole response, or the last chunk of a stream that includes its usage."""
        prompt_tokens, verified = sum(map(len, self._prompts)), self._verified
        return self._base | {
            "choices": [choice for _, choice in sorted(self._ended.items())],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": self._generated,
                "total_tokens": prompt_tokens + self._generated,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": self._accepted,
                    "rejected_prediction_tokens": self._drafted - self._accepted,
                },
            },
            "longtail": {
                "seed": self._seed,
                "drafted_tokens": self._drafted,
                "accepted_tokens": self._accepted,
                "accept_length": round(1 + self._accepted / verified, 3) if verified else None,
            },
        }
