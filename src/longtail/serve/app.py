"""The routes: from a checked body to completions, and from what goes wrong to OpenAI's envelope."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar, final

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.build.engine import completion_key
from longtail.errors import (
    CompletionError,
    DataError,
    LongtailError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.metrics import ServeMetrics
from longtail.serve.middleware import Gate
from longtail.serve.options import Limits
from longtail.serve.protocol import APIError, ChatCall, CompletionCall, read_call
from longtail.serve.responses import ChatForm, Choice, ResponseBuilder, ResponseFormat, TextForm
from longtail.serve.service import Service
from longtail.serve.stream import Generation
from longtail.types import Request, SamplingParams

_log = logging.getLogger("longtail")
_DEFAULT_TOKENS = 16
"""Of /v1/completions, as OpenAI has it; a chat goes on as long as it may."""
_SEED_HEADER = "X-Longtail-Seed"
Result = TypeVar("Result")
_GONE = "the client went away"


def make_app(
    service: Service,
    tokenizer: Tokenizer,
    metrics: ServeMetrics,
    limits: Limits,
    *,
    name: str,
    vocab_size: int,
    api_key: str | None = None,
) -> ASGIApp:
    """Build the application; `limits.max_len` is what the engine has."""
    desk = OpenAIHandlers(service, tokenizer, limits, name, vocab_size)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()
        desk.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    _add_routes(app, desk, service, metrics)
    _add_handlers(app, service)
    return Gate(app, api_key=api_key, limits=limits, metrics=metrics)


def _add_routes(
    app: FastAPI, desk: "OpenAIHandlers", service: Service, metrics: ServeMetrics
) -> None:
    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [desk.card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        desk.check_model(name)
        return JSONResponse(desk.card)

    @app.post("/v1/completions")
    async def completions(request: HttpRequest) -> Response:
        return await desk.complete(read_call(CompletionCall, await request.body()), request)

    @app.post("/v1/chat/completions")
    async def chat(request: HttpRequest) -> Response:
        return await desk.chat(read_call(ChatCall, await request.body()), request)

    @app.get("/health")
    async def health() -> JSONResponse:
        began = time.perf_counter()
        await service.probe()
        seconds = round(time.perf_counter() - began, 4)
        waits = {"running": service.num_running, "waiting": service.num_waiting}
        return JSONResponse({"status": "ok", "token_s": seconds, **waits})

    @app.get("/metrics")
    async def measured() -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(metrics.render(), headers={"Content-Type": kind})


def _add_handlers(app: FastAPI, service: Service) -> None:
    """Say everything that goes wrong in the same form."""

    def tell(kind: type[Exception], refusal: Callable[[Any], APIError]) -> None:
        async def answer(_: HttpRequest, error: Exception) -> JSONResponse:
            told = refusal(error)
            return JSONResponse(told.envelope(), told.status, told.headers)

        app.add_exception_handler(kind, answer)

    tell(APIError, lambda refusal: refusal)
    tell(ClientDisconnect, lambda _: APIError(499, _GONE))
    tell(HTTPException, _http_refusal)
    tell(OverloadedError, lambda error: _overloaded(error, service.retry_after_s()))
    tell(LongtailError, _told)
    tell(Exception, lambda _: APIError(500, "the server failed; see its log", code="internal"))


def _http_refusal(error: HTTPException) -> APIError:
    return APIError(error.status_code, str(error.detail), headers=dict(error.headers or {}))


def _overloaded(error: OverloadedError, retry_after_s: int) -> APIError:
    wait = {"Retry-After": str(retry_after_s)}
    return APIError(429, str(error), code="overloaded", headers=wait)


def _told(error: LongtailError) -> APIError:
    if isinstance(error, UnavailableError):
        return APIError(503, str(error), code="unavailable")
    if isinstance(error, RequestError | DataError):
        return APIError(400, str(error))
    if isinstance(error, CompletionError):
        return APIError(500, str(error), code="internal")
    _log.error("a request failed: %s", error)
    return APIError(500, "the server failed; see its log", code="internal")


@final
class OpenAIHandlers:
    """Takes calls: checks them against the model, has them written, hands the text out."""

    def __init__(
        self, service: Service, tokenizer: Tokenizer, limits: Limits, name: str, vocab_size: int
    ) -> None:
        self._service, self._tokenizer, self._limits = service, tokenizer, limits
        self._name, self._vocab_size = name, vocab_size
        self._scribe = ThreadPoolExecutor(1, "longtail-tokenizer")
        """Long prompts are tokenized beside the event loop, one after the other."""
        self.card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "longtail",
            "max_model_len": limits.max_len,
        }

    def close(self) -> None:
        """Let the tokenizer's thread go."""
        self._scribe.shutdown(wait=False)

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served here."""
        if name != self._name:
            raise APIError(
                404,
                f"the model {name[:100]!a} does not exist here; this server has {self._name!a}",
                param="model",
                code="model_not_found",
            )

    async def complete(self, call: CompletionCall, request: HttpRequest) -> Response:
        """Answer /v1/completions."""
        self.check_model(call.model)
        self._check_choices(len(call.prompt) * (call.n or 1))
        prompts = [
            await self._aside(self._encode, each, "prompt")
            if isinstance(each, str)
            else tuple(each)
            for each in call.prompt
        ]
        for each in prompts:
            self._check_prompt(each, "prompt")
        return await self._answer(
            call, TextForm(), prompts, call.max_tokens or _DEFAULT_TOKENS, request
        )

    async def chat(self, call: ChatCall, request: HttpRequest) -> Response:
        """Answer /v1/chat/completions."""
        self.check_model(call.model)
        self._check_choices(call.n or 1)
        messages = [{"role": each.role, "content": each.content} for each in call.messages]
        text = await self._aside(self._tokenizer.render, messages)
        prompt = await self._aside(self._encode, text, "messages")
        self._check_prompt(prompt, "messages")
        room = min(self._limits.max_len - len(prompt), self._limits.max_tokens)
        max_tokens = call.max_completion_tokens or call.max_tokens or room
        return await self._answer(call, ChatForm(), [prompt], max_tokens, request)

    async def _aside(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._scribe, work, *arguments)

    def _encode(self, text: str, param: str) -> tuple[int, ...]:
        least = self._tokenizer.least_tokens(text)
        if least >= self._limits.max_len:  # known at once; to tokenize it would take minutes
            raise self._too_long(f"at least {least}", param)
        return self._tokenizer.encode(text)

    def _check_choices(self, asked: int) -> None:
        if asked > self._limits.max_choices:
            raise APIError(
                400,
                f"n times the prompts is {asked}; this server writes at most "
                f"{self._limits.max_choices} completions a call",
                param="n",
            )

    def _check_prompt(self, tokens: Sequence[int], param: str) -> None:
        if not tokens:
            raise APIError(400, f"{param} has no tokens; give some text", param=param)
        if any(not 0 <= token < self._vocab_size for token in tokens):
            raise APIError(
                400,
                f"{param} holds token ids outside 0 to {self._vocab_size - 1}",
                param=param,
            )
        if len(tokens) >= self._limits.max_len:
            raise self._too_long(str(len(tokens)), param)

    def _too_long(self, num_tokens: str, param: str) -> APIError:
        return APIError(
            400,
            f"{param} has {num_tokens} tokens; with a completion this server has room for "
            f"{self._limits.max_len}",
            param=param,
            code="context_length_exceeded",
        )

    def _check_tokens(self, longest: int, max_tokens: int) -> None:
        room = min(self._limits.max_len - longest, self._limits.max_tokens)
        if max_tokens > room:
            raise APIError(
                400,
                f"max_tokens = {max_tokens}: after a prompt of {longest} tokens at most {room} can "
                "be written here",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def _answer(
        self,
        call: CompletionCall | ChatCall,
        form: ResponseFormat,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int,
        request: HttpRequest,
    ) -> Response:
        self._check_tokens(max(len(prompt) for prompt in prompts), max_tokens)
        sampling = SamplingParams(
            temperature=1.0 if call.temperature is None else float(call.temperature),
            top_k=call.top_k or 0,
            top_p=1.0 if call.top_p is None else float(call.top_p),
            min_p=call.min_p or 0.0,
            max_tokens=max_tokens,
            stop=tuple(call.stop),
            stop_token_ids=self._tokenizer.eos_ids,
        )
        seed = secrets.randbits(53) if call.seed is None else call.seed
        n = call.n or 1
        requests = [
            Request(
                request_id=f"{index}",
                prompt_tokens=prompt,
                noise_key=completion_key(seed, index),
                sampling=sampling,
            )
            for prompt in prompts
            for index in range(n)
        ]
        generation = self._service.submit(requests)
        # logprobs = 0 asks for them, too: of the tokens that were drawn
        listed = call.logprobs is not None and call.logprobs is not False
        decode = self._tokenizer.decode if listed else None
        writing = Writing(
            generation,
            [Choice(form, decode) for _ in requests],
            ResponseBuilder(form, self._name, seed),
            prompt_tokens=sum(map(len, prompts)),
        )
        headers = {_SEED_HEADER: str(seed)}
        if call.stream:
            return EventStream(writing.events(call.includes_usage), generation, headers)
        async with generation:
            if not await unless_gone(writing.finish(), request.receive):
                raise APIError(499, _GONE)
        return JSONResponse(writing.whole(), headers=headers)


@final
class Writing:
    """The answer to one call while it is written."""

    def __init__(
        self,
        generation: Generation,
        choices: list[Choice],
        frame: ResponseBuilder,
        *,
        prompt_tokens: int,
    ) -> None:
        self._generation, self._choices, self._frame = generation, choices, frame
        self._prompt_tokens = prompt_tokens

    async def finish(self) -> None:
        """Wait until all is written."""
        async for chunk in self._generation:
            self._choices[chunk.choice].add(chunk)

    def whole(self) -> dict[str, Any]:
        """Return the answer."""
        return self._frame.whole(self._choices, self._prompt_tokens)

    async def events(self, include_usage: bool) -> AsyncIterator[str]:
        """Yield what a stream carries: chunks, maybe usage, and the end or an error."""
        try:
            async for chunk in self._generation:
                if chunk.text or chunk.ending is not None:
                    told = self._choices[chunk.choice].add(chunk)
                    yield _event(self._frame.chunk(chunk.choice, told))
                else:
                    self._choices[chunk.choice].hold(chunk)
        except LongtailError as error:
            yield _event(_told(error).envelope())
            return
        if include_usage:
            yield _event(self._frame.last(self._choices, self._prompt_tokens))
        yield "data: [DONE]\n\n"


@final
class EventStream(Response):
    """Server-sent events. Ends when the client goes away, and gives the completions up then."""

    def __init__(
        self, events: AsyncIterator[str], generation: Generation, headers: dict[str, str]
    ) -> None:
        super().__init__(None, 200, {**headers, "Cache-Control": "no-store"})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        del self.headers["Content-Length"]
        self._events, self._generation = events, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the events as they come."""
        async with self._generation:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await unless_gone(self._write(send), receive)

    async def _write(self, send: Send) -> None:
        async for event in self._events:
            body = event.encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Do the work unless the client hangs up before it is done; tell whether it was done."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        leaving.cancel()


def _event(record: dict[str, Any]) -> str:
    return f"data: {json.dumps(record, ensure_ascii=False, separators=(',', ':'))}\n\n"
