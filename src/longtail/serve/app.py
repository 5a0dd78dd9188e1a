"""The HTTP application: routes, checks of callers, and errors in OpenAI's error body."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, final

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from longtail.assembly.engine import completion_key
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import (
    ConfigError,
    LongtailError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.options import ServeOptions
from longtail.serve.protocol import APIError, ChatCompletionRequest, CompletionRequest, parse_body
from longtail.serve.responses import ResponseBuilder
from longtail.serve.service import CompletionStream, Service
from longtail.system.addresses import is_loopback_header
from longtail.types import Request, SamplingParams

_log = logging.getLogger("longtail")
_READ = ["GET", "HEAD"]
_MAX_BODY, _BODY_S = 2**20, 30.0
"""Bytes of a request's body, and seconds within which it must arrive."""
_STATUSES = {
    RequestError: 400,
    ConfigError: 400,
    OverloadedError: 429,
    ClientDisconnect: 499,
    UnavailableError: 503,
}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


def make_app(
    service: Service,
    tokenizer: Tokenizer,
    options: ServeOptions,
    open_drafters: Callable[[], Speculation | None],
    api_key: str | None = None,
) -> FastAPI:
    """Build the application in front of a service; `open_drafters` opens those of the options.

    Without an API key, every client that reaches the port is served.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    async def check_caller(http: HttpRequest) -> None:
        _check_caller(http.headers, api_key)

    access = [Depends(check_caller)]
    app = FastAPI(lifespan=lifespan, dependencies=access, openapi_url=None, redirect_slashes=False)
    api = _OpenAI(service, tokenizer, options)
    app.post("/v1/completions")(api.complete)
    app.post("/v1/chat/completions")(api.chat)
    app.api_route("/v1/models", methods=_READ)(api.list_models)
    app.api_route("/v1/models/{name:path}", methods=_READ)(api.get_model)

    @app.api_route("/health", methods=_READ)
    async def health() -> JSONResponse:
        service.check()
        counts = {"running": service.num_running, "waiting": service.num_waiting}
        return JSONResponse({"status": "ok"} | counts)

    @app.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.render(), headers={"Content-Type": content_type})

    @app.post("/reload_drafter")
    async def reload_drafter() -> JSONResponse:
        service.check()
        service.speculate(await asyncio.to_thread(open_drafters))
        return JSONResponse({"drafter": options.drafter})

    async def answer_error(_: HttpRequest, error: Exception) -> Response:
        return _error_response(_to_api_error(error))

    for kind in (APIError, HTTPException, ClientDisconnect, LongtailError, Exception):
        app.add_exception_handler(kind, answer_error)
    return app


def _check_caller(headers: Headers, api_key: str | None) -> None:
    """Refuse callers without the API key.

    Without a key the server listens on loopback only, and web pages must not reach it either: they
    cannot send another Host header (DNS rebinding), nor a POST without their Origin.
    """
    if api_key is None:
        origin = headers.get("origin", "//localhost").partition("//")[2]
        if not (is_loopback_header(headers.get("host", "")) and is_loopback_header(origin)):
            text = "without an API key this server answers to localhost and 127.0.0.1 only"
            raise APIError(403, text)
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip(" ").encode("latin-1"), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:  # case-insensitive, RFC 9110 11.1
        text = "give the server's API key: Authorization: Bearer KEY"
        raise APIError(401, text, code="invalid_api_key")


@final
class _OpenAI:
    """OpenAI's routes: a checked body becomes requests to the service, and events a response."""

    def __init__(self, service: Service, tokenizer: Tokenizer, options: ServeOptions) -> None:
        self._service, self._tokenizer, self._options = service, tokenizer, options
        self._card = {
            "id": options.served_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "longtail",
            "max_model_len": options.max_len,
        }

    async def list_models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def get_model(self, name: str) -> JSONResponse:
        self._check_model(name)
        return JSONResponse(self._card)

    async def complete(self, http: HttpRequest) -> Response:
        body = parse_body(CompletionRequest, await self._read(http))
        self._check_model(body.model)
        prompts = [
            await asyncio.to_thread(self._tokenizer.encode, each)
            if isinstance(each, str)
            else tuple(each)
            for each in body.prompt
        ]
        return await self._answer(http, body, prompts, body.max_tokens)

    async def chat(self, http: HttpRequest) -> Response:
        body = parse_body(ChatCompletionRequest, await self._read(http))
        self._check_model(body.model)
        messages = [{"role": each.role, "content": each.content} for each in body.messages]
        prompt = await asyncio.to_thread(self._tokenizer.chat, messages)
        max_tokens = body.max_tokens or max(self._options.max_len - len(prompt), 1)
        return await self._answer(http, body, [prompt], max_tokens)

    async def _read(self, http: HttpRequest) -> bytes:
        """Read the body, within the limits of its size and of time."""
        content = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in http.stream():
                    content += piece
                    if len(content) > _MAX_BODY:
                        raise APIError(413, f"the body is larger than {_MAX_BODY} bytes")
        except TimeoutError as error:
            raise APIError(408, "the body did not arrive in time") from error
        return bytes(content)

    def _check_model(self, name: str) -> None:
        if name != self._card["id"]:
            known = self._card["id"]
            text = f"the model {name[:100]!a} does not exist here; this server has {known!a}"
            raise APIError(404, text, param="model", code="model_not_found")

    async def _answer(
        self,
        http: HttpRequest,
        body: CompletionRequest | ChatCompletionRequest,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int,
    ) -> Response:
        sampling = SamplingParams(
            temperature=body.temperature,
            top_k=max(body.top_k, 0),  # -1 keeps every token, too, as in vLLM
            top_p=body.top_p,
            min_p=body.min_p,
            max_tokens=max_tokens,
            stop=tuple(body.stop),
            stop_token_ids=self._tokenizer.eos_ids,
        )
        seed = secrets.randbits(53) if body.seed is None else body.seed
        requests = [
            Request(
                request_id="",
                prompt_tokens=prompt,
                noise_key=completion_key(seed, index),
                sampling=sampling,
            )
            for prompt in prompts
            for index in range(body.n)
        ]
        response = ResponseBuilder(body, prompts, self._tokenizer.decode, seed)
        stream = self._service.submit(requests)
        headers = {"X-Longtail-Seed": str(seed), "Cache-Control": "no-store"}
        if body.stream:
            return StreamingResponse(
                _events(stream, response, body.includes_usage),
                headers=headers,
                media_type="text/event-stream",
                background=BackgroundTask(stream.close),  # also when the client disconnects
            )
        try:
            async for choice, events in stream:
                response.add(choice, events)
                if await http.is_disconnected():
                    raise ClientDisconnect
        finally:
            stream.close()
        return JSONResponse(response.end(), headers=headers)


async def _events(
    stream: CompletionStream, response: ResponseBuilder, includes_usage: bool
) -> AsyncIterator[str]:
    """Yield the chunks, the usage if it was asked for, and the end or an error."""
    try:
        async for choice, events in stream:
            chunk = response.add(choice, events)
            if chunk is not None:
                yield _event(chunk)
        if includes_usage:
            yield _event(response.end())
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - it is sent to the caller
        yield _event(_to_api_error(error).body())


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _error_response(error: APIError) -> Response:
    return JSONResponse(error.body(), error.status, _HEADERS.get(error.status))


def _to_api_error(error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail))
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return APIError(status, str(error))
    _log.error("a request failed", exc_info=error)
    return APIError(500, "the server failed; see its log")
