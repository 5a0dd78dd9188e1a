"""The HTTP application: routes and the conversion of errors to OpenAI's error body."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, final

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.errors import (
    CompletionError,
    DataError,
    LongtailError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.handlers import Generation, OpenAIHandlers
from longtail.serve.middleware import CONTROL_ROUTES, Access, AccessMiddleware
from longtail.serve.protocol import APIError, ChatCompletionRequest, CompletionRequest, parse_body
from longtail.serve.service import Service
from longtail.serve.trainer_routes import add_control_routes, add_information_routes
from longtail.serve.updates import ModelUpdates

_log = logging.getLogger("longtail")
_SEED_HEADER = "X-Longtail-Seed"
_DISCONNECTED = "the client disconnected"


def make_app(
    service: Service,
    tokenizer: Tokenizer,
    *,
    name: str,
    access: Access,
    updates: ModelUpdates | None = None,
) -> ASGIApp:
    """Build the application in front of a service; clients call its model `name`.

    With `updates` it has the routes of trainers that change the service.
    """
    handlers = OpenAIHandlers(service, tokenizer, name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()
        handlers.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    _add_routes(app, handlers, service)
    add_information_routes(app, service, name)
    if updates is None:
        _refuse_control_routes(app)
    else:
        add_control_routes(app, service, updates)
    _add_error_handlers(app, service)
    return AccessMiddleware(app, access=access, metrics=service.metrics)


def _refuse_control_routes(app: FastAPI) -> None:
    async def refuse() -> JSONResponse:
        raise APIError(404, "start the server with --rl-dir DIR to serve trainers")

    for route in CONTROL_ROUTES:
        app.post(route)(refuse)


def _add_routes(app: FastAPI, handlers: OpenAIHandlers, service: Service) -> None:
    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [handlers.model_card]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> JSONResponse:
        handlers.check_model(name)
        return JSONResponse(handlers.model_card)

    @app.post("/v1/completions")
    async def create_completion(http: HttpRequest) -> Response:
        body = parse_body(CompletionRequest, await http.body())
        return await _respond(await handlers.complete(body), body.stream, http)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(http: HttpRequest) -> Response:
        body = parse_body(ChatCompletionRequest, await http.body())
        return await _respond(await handlers.chat(body), body.stream, http)

    @app.get("/health")
    async def health() -> JSONResponse:
        start = time.perf_counter()
        await service.probe()
        seconds = round(time.perf_counter() - start, 4)
        counts = {"running": service.num_running, "waiting": service.num_waiting}
        return JSONResponse({"status": "ok", "token_s": seconds, **counts})

    @app.get("/metrics")
    async def metrics() -> Response:
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.render(), headers={"Content-Type": content_type})


async def _respond(generation: Generation, stream: bool | None, http: HttpRequest) -> Response:
    """Answer with a stream of events, or with the whole response once it is generated."""
    headers = {_SEED_HEADER: str(generation.seed)}
    if stream:
        return _EventStream(generation, headers)
    async with generation.stream:
        if not await _unless_disconnected(generation.finish(), http.receive):
            raise APIError(499, _DISCONNECTED)
    return JSONResponse(generation.response.whole(), headers=headers)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Answer every error with OpenAI's error body."""

    def add(kind: type[Exception], convert: Callable[[Any], APIError]) -> None:
        async def answer(_: HttpRequest, error: Exception) -> JSONResponse:
            converted = convert(error)
            return JSONResponse(converted.body(), converted.status, converted.headers)

        app.add_exception_handler(kind, answer)

    add(APIError, lambda error: error)
    add(ClientDisconnect, lambda _: APIError(499, _DISCONNECTED))
    add(HTTPException, _from_http)
    add(OverloadedError, lambda error: _from_overload(error, service.retry_after_s()))
    add(LongtailError, _from_longtail)
    add(Exception, lambda _: _internal())


def _internal() -> APIError:
    return APIError(500, "the server failed; see its log", code="internal")


def _from_http(error: HTTPException) -> APIError:
    return APIError(error.status_code, str(error.detail), headers=dict(error.headers or {}))


def _from_overload(error: OverloadedError, retry_after_s: int) -> APIError:
    headers = {"Retry-After": str(retry_after_s)}
    return APIError(429, str(error), code="overloaded", headers=headers)


def _from_longtail(error: LongtailError) -> APIError:
    if isinstance(error, UnavailableError):
        return APIError(503, str(error), code="unavailable")
    if isinstance(error, RequestError | DataError):
        return APIError(400, str(error))
    if isinstance(error, CompletionError):
        return APIError(500, str(error), code="internal")
    _log.error("a request failed: %s", error)
    return _internal()


@final
class _EventStream(Response):
    """Server-sent events. If the client disconnects, its completions are aborted."""

    def __init__(self, generation: Generation, headers: dict[str, str]) -> None:
        super().__init__(None, 200, {**headers, "Cache-Control": "no-store"})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        del self.headers["Content-Length"]
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they are generated."""
        async with self._generation.stream:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await _unless_disconnected(self._send_events(send), receive)

    async def _send_events(self, send: Send) -> None:
        async for event in self._events():
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[str]:
        """Yield the chunks, the usage if it was asked for, and the end or an error."""
        try:
            async for chunk in self._generation.chunks():
                yield _compact_json(chunk)
        except LongtailError as error:
            yield _compact_json(_from_longtail(error).body())
            return
        yield "[DONE]"


def _compact_json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


async def _unless_disconnected(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Run `work` until the client disconnects; return whether it completed."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        leaving.cancel()
