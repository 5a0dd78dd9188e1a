"""Runs uvicorn on a socket of this process, for `longtail serve` and `longtail view`."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.types import ASGIApp

from longtail.system.interrupt import Interruption

HttpServer = uvicorn.Server

_POLL_S = 0.05


def make_http_server(app: ASGIApp, *, flush_s: int) -> HttpServer:
    """Return a server that gives responses `flush_s` seconds to reach their clients at its end."""
    return HttpServer(
        uvicorn.Config(
            app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=flush_s,
        )
    )


async def serve_until_stopped(
    http: HttpServer,
    sock: socket.socket,
    interruption: Interruption | None,
    on_stop: Callable[[], Awaitable[None]],
) -> None:
    """Serve until a signal arrives or `http.should_exit` is set; then await `on_stop`."""
    serving = asyncio.create_task(http.serve([sock]))
    while not (http.should_exit or serving.done()):
        if http.started and interruption is not None and interruption.received:
            http.should_exit = True
        await asyncio.sleep(_POLL_S)
    await on_stop()
    await serving
