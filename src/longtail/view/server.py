"""The server of the page: binds the socket, handles signals, and ends open streams."""

import asyncio
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from longtail.system.addresses import bind, url
from longtail.system.http_server import (
    make_http_server,
    running_in_thread,
    serve_until_stopped,
)
from longtail.system.interrupt import Interruption
from longtail.view.app import Stopping, make_app
from longtail.view.options import ViewOptions
from longtail.view.run_files import RunFiles

_FLUSH_S = 2
"""Seconds for responses to reach their clients after a signal."""


def run(runs: Sequence[RunFiles], options: ViewOptions) -> int:
    """Serve the page until a signal arrives."""
    with bind(options.host, options.port) as sock:
        server = _Server(runs, options.token)
        sock.listen()  # browsers may connect as soon as the next line is printed
        names = ", ".join(each.name for each in runs)
        query = "" if options.token is None else "/?token=TOKEN"
        # uvicorn takes all signals but SIGHUP while it runs, and passes them on at the end.
        with Interruption() as interruption:
            print(f"viewing {names} at {url(options.host, sock)}{query}", flush=True)
            print("press Ctrl-C to stop", file=sys.stderr, flush=True)
            asyncio.run(server.serve(sock, interruption))
    return 0


@contextmanager
def running(runs: Sequence[RunFiles], *, token: str | None = None) -> Iterator[str]:
    """Serve the page in a thread, on a free port of this machine, and yield its URL."""
    with bind("127.0.0.1", 0) as sock:
        server = _Server(runs, token)
        with running_in_thread(server.http, server.serve(sock), daemon=True):
            yield url("127.0.0.1", sock)


class _Server:
    """The application and uvicorn around it."""

    def __init__(self, runs: Sequence[RunFiles], token: str | None) -> None:
        self._stopping = Stopping()
        app = make_app(runs, token=token, stopping=self._stopping)
        self.http = make_http_server(app, lifespan="off", flush_s=_FLUSH_S)

    async def serve(self, sock: socket.socket, interruption: Interruption | None = None) -> None:
        """Serve until a signal arrives or `http.should_exit` is set."""
        await serve_until_stopped(self.http, sock, interruption, self._end_streams)

    async def _end_streams(self) -> None:
        self._stopping.is_set = True
