"""OpenAI's two endpoints: a checked body becomes requests to the service, and chunks a response."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, final

from longtail.assembly.engine import completion_key
from longtail.errors import CompletionError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.protocol import APIError, ChatCompletionRequest, CompletionRequest
from longtail.serve.responses import (
    ChatFormat,
    Contents,
    ResponseBuilder,
    ResponseFormat,
    TextFormat,
)
from longtail.serve.service import Service
from longtail.serve.stream import CompletionStream
from longtail.types import Request, SamplingParams

_DEFAULT_TOKENS = 16
"""Default max_tokens of /v1/completions, as OpenAI has it. A chat's is the room that is left."""
_REWRITTEN = (
    "the weights were changed while this text was streamed; send the request again, or pause with "
    "mode=wait before an update"
)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The completions of one call and the response that is built of them."""

    stream: CompletionStream
    response: ResponseBuilder
    seed: int
    includes_usage: bool
    """Whether `chunks` ends with a chunk of usage."""

    async def finish(self) -> None:
        """Wait until all completions have finished."""
        async for chunk in self.stream:
            self.response.add(chunk)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the bodies of a streamed response.

        Raises CompletionError if the weights are changed after a part of the text was sent.
        """
        async for chunk in self.stream:
            if chunk.is_rewrite:
                raise CompletionError(_REWRITTEN)
            body = self.response.add(chunk)
            if body is not None:
                yield body
        if self.includes_usage:
            yield self.response.usage_chunk()


@final
class OpenAIHandlers:
    """Checks bodies against the model and the limits, and submits their completions."""

    def __init__(self, service: Service, tokenizer: Tokenizer, name: str) -> None:
        self._service, self._tokenizer, self._name = service, tokenizer, name
        self._limits = service.limits
        self._tokenizer_thread = ThreadPoolExecutor(1, "longtail-tokenizer")
        """Tokenizes long prompts beside the event loop, one at a time."""
        self.model_card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "longtail",
            "max_model_len": self._limits.max_len,
        }

    def close(self) -> None:
        """Stop the tokenizer's thread."""
        self._tokenizer_thread.shutdown(wait=False)

    def check_model(self, name: str) -> None:
        """Raise APIError (404) for a model that this server does not have."""
        if name != self._name:
            raise APIError(
                404,
                f"the model {name[:100]!a} does not exist here; this server has {self._name!a}",
                param="model",
                code="model_not_found",
            )

    async def complete(self, body: CompletionRequest) -> Generation:
        """Submit the completions of /v1/completions."""
        self.check_model(body.model)
        self._check_choices(len(body.prompt) * (body.n or 1))
        prompts = [
            await self._in_thread(self._encode, each, "prompt")
            if isinstance(each, str)
            else tuple(each)
            for each in body.prompt
        ]
        for each in prompts:
            self._check_prompt(each, "prompt")
        return self._submit(body, TextFormat(), prompts, body.max_tokens or _DEFAULT_TOKENS)

    async def chat(self, body: ChatCompletionRequest) -> Generation:
        """Submit the completions of /v1/chat/completions."""
        self.check_model(body.model)
        self._check_choices(body.n or 1)
        messages = [{"role": each.role, "content": each.content} for each in body.messages]
        text = await self._in_thread(self._tokenizer.render, messages)
        prompt = await self._in_thread(self._encode, text, "messages")
        self._check_prompt(prompt, "messages")
        max_tokens = body.max_completion_tokens or body.max_tokens or self._room(len(prompt))
        return self._submit(body, ChatFormat(), [prompt], max_tokens)

    async def _in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer_thread, work, *arguments)

    def _encode(self, text: str, param: str) -> tuple[int, ...]:
        at_least = self._tokenizer.least_tokens(text)
        if at_least >= self._limits.max_len:  # tokenizing it could take minutes
            raise self._too_long(f"at least {at_least}", param)
        return self._tokenizer.encode(text)

    def _check_choices(self, num_choices: int) -> None:
        if num_choices > self._limits.max_choices:
            raise APIError(
                400,
                f"n times the number of prompts is {num_choices}; this server generates at most "
                f"{self._limits.max_choices} completions per call",
                param="n",
            )

    def _check_prompt(self, tokens: Sequence[int], param: str) -> None:
        if not tokens:
            raise APIError(400, f"{param} has no tokens; give some text", param=param)
        vocab_size = self._service.vocab_size
        if any(not 0 <= token < vocab_size for token in tokens):
            raise APIError(
                400, f"{param} holds token ids outside 0 to {vocab_size - 1}", param=param
            )
        if len(tokens) >= self._limits.max_len:
            raise self._too_long(str(len(tokens)), param)

    def _too_long(self, num_tokens: str, param: str) -> APIError:
        return APIError(
            400,
            f"{param} has {num_tokens} tokens; this server has room for {self._limits.max_len}, "
            "the completion included",
            param=param,
            code="context_length_exceeded",
        )

    def _room(self, prompt_len: int) -> int:
        """Return the largest number of tokens that may follow a prompt."""
        return min(self._limits.max_len - prompt_len, self._limits.max_tokens)

    def _submit(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        response_format: ResponseFormat,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int,
    ) -> Generation:
        longest = max(len(prompt) for prompt in prompts)
        if max_tokens > self._room(longest):
            raise APIError(
                400,
                f"max_tokens = {max_tokens}: after a prompt of {longest} tokens this server "
                f"generates at most {self._room(longest)}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        seed = secrets.randbits(53) if body.seed is None else body.seed
        sampling = _sampling(body, max_tokens, self._tokenizer.eos_ids)
        requests = [
            Request(
                request_id=f"{index}",
                prompt_tokens=prompt,
                noise_key=completion_key(seed, index),
                sampling=sampling,
            )
            for prompt in prompts
            for index in range(body.n or 1)
        ]
        # logprobs = 0 asks for the logprobs of the sampled tokens alone.
        has_logprobs = body.logprobs is not None and body.logprobs is not False
        contents = Contents(
            format=response_format,
            decode=self._tokenizer.decode if has_logprobs else None,
            with_token_ids=bool(body.return_token_ids),
            ids_as_names=bool(body.return_tokens_as_token_ids),
        )
        response = ResponseBuilder(contents, prompts, body.n or 1, model=self._name, seed=seed)
        return Generation(
            stream=self._service.submit(requests),
            response=response,
            seed=seed,
            includes_usage=body.includes_usage,
        )


def _sampling(
    body: CompletionRequest | ChatCompletionRequest, max_tokens: int, eos_ids: tuple[int, ...]
) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_k=max(body.top_k or 0, 0),  # -1 keeps every token, too, as in vLLM
        top_p=1.0 if body.top_p is None else float(body.top_p),
        min_p=body.min_p or 0.0,
        max_tokens=max_tokens,
        stop=tuple(body.stop),
        stop_token_ids=eos_ids,
    )
