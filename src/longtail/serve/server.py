"""The server process: loads the model, binds the socket, handles signals and the shutdown."""

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.types import ASGIApp

from longtail.assembly.drafters import check_names
from longtail.assembly.engine import open_engine, open_model
from longtail.assembly.models import model_directory
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.serve.app import make_app
from longtail.serve.middleware import Access
from longtail.serve.options import ServeOptions
from longtail.serve.service import Service
from longtail.serve.updates import ModelUpdates
from longtail.system.addresses import bind, url
from longtail.system.device import set_threads, to_stderr
from longtail.system.http_server import (
    HttpServer,
    make_http_server,
    running_in_thread,
    serve_until_stopped,
)
from longtail.system.interrupt import Interruption

_STEP_TOKENS = 512
_FLUSH_S = 5
"""Seconds for responses to reach their clients after the last completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServer:
    """A service and the HTTP application in front of it."""

    service: Service
    app: ASGIApp


def run(options: ServeOptions) -> int:
    """Load the model and serve it until a signal arrives."""
    with bind(options.host, options.port) as sock:  # a port in use is reported before loading
        set_threads(options.threads)
        server = load_server(options)
        sock.listen()  # clients may connect as soon as the next line is printed
        address = f"{url(options.host, sock)}/v1"
        # uvicorn takes all signals but SIGHUP while it runs, and passes them on at the end.
        with Interruption() as interruption:
            print(f"serving {options.name} at {address}", flush=True)
            to_stderr("press Ctrl-C to stop; unfinished requests are finished first")
            http = _http_server(server, options.drain_s)
            asyncio.run(_serve(server, sock, options.drain_s, http, interruption))
    to_stderr("stopped")
    return 0


def load_server(options: ServeOptions) -> ModelServer:
    """Load the model, make its engine, and put the service in front of it."""
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
    limits = options.limits
    limits = replace(limits, max_len=min(limits.max_len, target.model.config.max_positions))
    engine_limits = EngineLimits(
        max_running=limits.max_running,
        max_step_tokens=max(_STEP_TOKENS, limits.max_running),
        max_len=limits.max_len,
        kv_tokens=limits.kv_tokens,
    )

    updates = ModelUpdates(options.rl_dir or Path(), target, options.drafter)

    def make_engine() -> RolloutEngine:
        return open_engine(target, engine_limits, updates.drafter)

    return make_server(
        make_engine,
        tokenizer,
        Access(limits=limits, api_key=options.api_key, admin_token=options.admin_token),
        name=options.name,
        updates=None if options.rl_dir is None else updates,
    )


def make_server(
    make_engine: Callable[[], RolloutEngine],
    tokenizer: Tokenizer,
    access: Access,
    *,
    name: str,
    updates: ModelUpdates | None = None,
) -> ModelServer:
    """Put a service and its routes in front of an engine; `access.limits` has its `max_len`.

    `make_engine` is called now, and again after each failure of an engine. With `updates`, trainers
    can change the service.
    """
    service = Service(make_engine, tokenizer.decode, access.limits)
    app = make_app(service, tokenizer, name=name, access=access, updates=updates)
    return ModelServer(service=service, app=app)


@contextmanager
def running(server: ModelServer, *, drain_s: float = 5.0) -> Iterator[int]:
    """Serve in a thread, on a free port of this machine, and yield the port."""
    with bind("127.0.0.1", 0) as sock:
        http = _http_server(server, drain_s)
        with running_in_thread(http, _serve(server, sock, drain_s, http)):
            yield sock.getsockname()[1]


def _http_server(server: ModelServer, drain_s: float) -> HttpServer:
    return make_http_server(server.app, lifespan="on", flush_s=math.ceil(drain_s) + _FLUSH_S)


async def _serve(
    server: ModelServer,
    sock: socket.socket,
    drain_s: float,
    http: HttpServer,
    interruption: Interruption | None = None,
) -> None:
    """Serve until stopped; then give unfinished requests `drain_s` seconds before aborting them."""

    async def drain() -> None:
        await server.service.drain(0.0 if http.force_exit else drain_s)

    await serve_until_stopped(http, sock, interruption, drain)
