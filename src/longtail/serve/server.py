"""The server process: loads the model, binds the socket, handles signals and the shutdown."""

import asyncio
import math
import socket
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp

from longtail.assembly.drafters import check_names
from longtail.assembly.engine import model_directory, open_engine, open_model, open_speculation
from longtail.engine.request import EngineLimits
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.serve.app import make_app
from longtail.serve.options import ServeOptions
from longtail.serve.service import Service
from longtail.system.addresses import bind, url
from longtail.system.device import set_threads, to_stderr
from longtail.system.http_server import HttpServer, make_http_server, serve_until_stopped
from longtail.system.interrupt import Interruption

_STEP_TOKENS = 512
_FLUSH_S = 5
"""Seconds for responses to reach their clients after the last completion."""


def run(options: ServeOptions, api_key: str | None) -> int:
    """Load the model and serve it until a signal arrives."""
    with bind(options.host, options.port) as sock:  # a port in use is reported before loading
        set_threads(options.threads)
        service, app = _load(options, api_key)
        sock.listen()  # clients may connect as soon as the next line is printed
        address = f"{url(options.host, sock)}/v1"
        # uvicorn takes all signals but SIGHUP while it runs, and passes them on at the end.
        with Interruption() as interruption:
            print(f"serving {options.served_name} at {address}", flush=True)
            to_stderr("press Ctrl-C to stop; unfinished requests are finished first")
            http = http_server(app, options.drain_s)
            asyncio.run(serve(http, sock, service, options.drain_s, interruption))
    to_stderr("stopped")
    return 0


def _load(options: ServeOptions, api_key: str | None) -> tuple[Service, ASGIApp]:
    """Load the model, make its engine, and put the service and its routes in front of it."""
    check_names(options.drafter, field="--drafter")
    path = model_directory(options.model, field="MODEL")
    tokenizer = load_tokenizer(path)
    target = open_model(
        options.model,
        path,
        tokenizer,
        options.dtype,
        options.device,
        batch_invariant=options.batch_invariant,
    )
    options = replace(options, max_len=min(options.max_len, target.model.config.max_positions))
    limits = EngineLimits(
        max_running=options.max_running,
        max_step_tokens=max(_STEP_TOKENS, options.max_running),
        max_len=options.max_len,
        kv_tokens=options.kv_tokens,
    )
    service = Service(open_engine(target, limits, options.drafter), options)
    open_drafters = partial(open_speculation, options.drafter, target)
    return service, make_app(service, tokenizer, options, open_drafters, api_key)


def http_server(app: ASGIApp, drain_s: float) -> HttpServer:
    """Return uvicorn around the application."""
    return make_http_server(app, lifespan="on", flush_s=math.ceil(drain_s) + _FLUSH_S)


async def serve(
    http: HttpServer,
    sock: socket.socket,
    service: Service,
    drain_s: float,
    interruption: Interruption | None = None,
) -> None:
    """Serve until stopped; then give unfinished requests `drain_s` seconds before aborting them."""

    async def drain() -> None:
        await service.drain(0.0 if http.force_exit else drain_s)

    await serve_until_stopped(http, sock, interruption, drain)
