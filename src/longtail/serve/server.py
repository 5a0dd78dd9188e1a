"""The server: a model, HTTP routes in front of it, errors in OpenAI's body, and the shutdown."""

import asyncio
import hmac
import json
import logging
import math
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from longtail import errors
from longtail.assembly.drafters import check_names
from longtail.assembly.engine import named_speculation, open_engine, open_model
from longtail.config.command_options import ServeOptions
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.run.base_model import model_directory
from longtail.serve.protocol import Body, ChatRequest, CompletionRequest, ResponseBuilder, problem
from longtail.serve.service import CompletionStream, Service
from longtail.system.addresses import bind, is_loopback_header, url
from longtail.system.device import set_threads, to_stderr
from longtail.system.http_server import HttpServer, make_http_server, serve_until_stopped
from longtail.system.interrupt import Interruption
from longtail.types import SamplingParams

_log = logging.getLogger("longtail")
_MAX_BODY = 2**20
"""Bytes of a request's body."""
_FLUSH_S = 5
"""Seconds for responses to reach their clients after the last completion."""
_STATUSES = {
    errors.RequestError: 400,
    errors.ConfigError: 400,
    errors.OverloadedError: 429,
    ClientDisconnect: 499,
    errors.UnavailableError: 503,
}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


@final
@dataclass(frozen=True, slots=True)
class Routes:
    """The routes in front of a service: a body becomes requests to it, and events a response.

    Without an API key, every client that reaches the port is served.
    """

    service: Service
    tokenizer: Tokenizer
    options: ServeOptions
    open_drafters: Callable[[], Speculation | None]
    """Opens the drafters of the options."""
    api_key: str | None = None

    def serving(
        self, sock: socket.socket, interruption: Interruption | None = None
    ) -> tuple[HttpServer, Coroutine[Any, Any, None]]:
        """Return a server and its run; when stopped, it drains the service before it ends."""
        drain_s = self.options.drain_s
        flush_s = math.ceil(drain_s) + _FLUSH_S
        http = make_http_server(self.app(), flush_s=flush_s)

        async def drain() -> None:
            await self.service.drain(0.0 if http.force_exit else drain_s)

        async def serve() -> None:
            self.service.start()
            await serve_until_stopped(http, sock, interruption, drain)
            await self.service.stop()

        return http, serve()

    def app(self) -> FastAPI:
        """Build the application."""
        access = [Depends(self._check_caller), Depends(_check_size)]
        app = FastAPI(dependencies=access, openapi_url=None, redirect_slashes=False)
        app.post("/v1/completions")(self._complete)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/reload_drafter")(self._reload_drafter)
        read = partial(app.api_route, methods=["GET", "HEAD"])
        read("/v1/models")(self._list_models)
        read("/v1/models/{name:path}")(self._get_model)
        read("/health")(self._health)
        read("/metrics")(self._metrics)
        kinds = (HTTPException, ValidationError, ClientDisconnect, errors.LongtailError, Exception)
        for kind in kinds:
            app.add_exception_handler(kind, _answer_error)
        return app

    async def _check_caller(self, http: HttpRequest) -> None:
        """Refuse callers without the API key.

        Without a key the server listens on loopback only, and web pages must not reach it either:
        they cannot send another Host header (DNS rebinding), nor a POST without their Origin.
        """
        if self.api_key is None:
            origin = http.headers.get("origin", "//localhost").partition("//")[2]
            if not all(map(is_loopback_header, (http.headers.get("host", ""), origin))):
                text = "without an API key this server answers to localhost and 127.0.0.1 only"
                raise HTTPException(403, text)
            return
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip(" ").encode("latin-1"), self.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:  # case-insensitive, RFC 9110 11.1
            raise HTTPException(401, "give the server's API key: Authorization: Bearer KEY")

    async def _list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self._get_model(self.options.served_name)]}

    async def _get_model(self, name: str) -> dict[str, Any]:
        known = self.options.served_name
        if name != known:
            text = f"the model {name[:100]!a} does not exist here; this server has {known!a}"
            raise HTTPException(404, text)
        limits = {"max_model_len": self.options.max_len}
        return {"id": name, "object": "model", "created": 0, "owned_by": "longtail"} | limits

    async def _health(self) -> dict[str, str]:
        self.service.check()
        return {"status": "ok"}

    async def _metrics(self) -> Response:
        text = generate_latest(self.service.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _reload_drafter(self) -> dict[str, str]:
        self.service.check()
        self.service.speculate(await asyncio.to_thread(self.open_drafters))
        return {"drafter": self.options.drafter}

    async def _complete(self, http: HttpRequest) -> Response:
        body = CompletionRequest.model_validate_json(await http.body())
        self.service.check_room(len(body.prompt) * body.n)  # before the prompts are tokenized
        encode = partial(self.tokenizer.encode, add_special_tokens=body.add_special_tokens)
        prompts = [
            tuple(each) if isinstance(each, list) else await asyncio.to_thread(encode, each)
            for each in body.prompt
        ]
        return await self._answer(http, body, prompts, body.max_tokens)

    async def _chat(self, http: HttpRequest) -> Response:
        body = ChatRequest.model_validate_json(await http.body())
        messages = [each.model_dump() for each in body.messages]
        prompt = await asyncio.to_thread(self.tokenizer.chat, messages)
        max_tokens = body.max_tokens or max(self.options.max_len - len(prompt), 1)
        return await self._answer(http, body, [prompt], max_tokens)

    async def _answer(
        self, http: HttpRequest, body: Body, prompts: Sequence[tuple[int, ...]], max_tokens: int
    ) -> Response:
        await self._get_model(body.model)
        sampling = SamplingParams(
            temperature=body.temperature,
            top_k=max(body.top_k, 0),  # -1 keeps every token, too, as in vLLM
            top_p=body.top_p,
            min_p=body.min_p,
            max_tokens=max_tokens,
            stop=tuple(body.stop),
            stop_token_ids=(*self.tokenizer.eos_ids, *body.stop_token_ids),
        )
        seed = secrets.randbits(53) if body.seed is None else body.seed
        sampling = self.tokenizer.ends.stopping(sampling)
        stream = self.service.submit(prompts, sampling, seed, body.n)
        response = ResponseBuilder(body, prompts, self.tokenizer, seed)
        headers = {"X-Longtail-Seed": str(seed), "Cache-Control": "no-store"}
        if body.stream:
            return StreamingResponse(
                _chunks(stream, response, body.stream_options.get("include_usage", False)),
                headers=headers,
                media_type="text/event-stream",
                background=BackgroundTask(stream.close),  # also when the client disconnects
            )
        watching = asyncio.create_task(_watch(http, stream))
        try:
            async for choice, events in stream:
                response.add(choice, events)
        finally:
            watching.cancel()
            stream.close()
        return JSONResponse(response.end(), headers=headers)


async def _check_size(http: HttpRequest) -> None:
    """Refuse a body that is large, or whose length is not given first."""
    headers = http.headers
    if "transfer-encoding" in headers or int(headers.get("content-length", 0)) > _MAX_BODY:
        raise HTTPException(413, f"give a body with a Content-Length of at most {_MAX_BODY} bytes")


async def _watch(http: HttpRequest, stream: CompletionStream) -> None:
    """End a call whose client leaves, be it while its completions still wait."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    stream.queue.put_nowait(ClientDisconnect())


async def _chunks(
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
        yield _event(_error(error)[1])


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def _answer_error(http: HttpRequest, error: Exception) -> Response:
    status, body = _error(error)
    # A body may have been left unread, or have two lengths (RFC 9112 6.1)
    ends = {"Connection": "close"} if "transfer-encoding" in http.headers else {}
    return JSONResponse(body, status, _HEADERS.get(status, {}) | ends)


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and OpenAI's error body; an error without a status is logged."""
    field, message = None, str(error)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, ValidationError):
        status, (field, message) = 400, problem(error)
    else:
        status = next((each for kind, each in _STATUSES.items() if isinstance(error, kind)), 500)
    if status == 500:
        _log.error("a request failed", exc_info=error)
        message = "the server failed; see its log"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": field, "code": None}}


def run(options: ServeOptions, api_key: str | None) -> int:
    """Load the model and serve it until a signal arrives."""
    with bind(options.host, options.port) as sock:  # a port in use is reported before loading
        set_threads(options.threads)
        routes = _load(options, api_key)
        sock.listen()  # clients may connect as soon as the next line is printed
        # uvicorn takes all signals but SIGHUP while it runs, and passes them on at the end.
        with Interruption() as interruption:
            print(f"serving {options.served_name} at {url(options.host, sock)}/v1", flush=True)
            to_stderr("press Ctrl-C to stop; unfinished requests are finished first")
            asyncio.run(routes.serving(sock, interruption)[1])
    to_stderr("stopped")
    return 0


def _load(options: ServeOptions, api_key: str | None) -> Routes:
    """Load the model, make its engine, and put the service and its routes in front of it."""
    check_names(options.drafter, field="--drafter")
    path = model_directory(options.model, field="MODEL")
    tokenizer = load_tokenizer(path)
    target = open_model(options.model, path, tokenizer, options.dtype, options.device)
    options = replace(options, max_len=min(options.max_len, target.model.config.max_positions))
    limits = EngineLimits.of(options.max_running, options.max_len, options.kv_tokens)
    service = Service(open_engine(target, limits, options.drafter), options)
    open_drafters = partial(named_speculation, options.drafter, target)
    return Routes(service, tokenizer, options, open_drafters, api_key)
