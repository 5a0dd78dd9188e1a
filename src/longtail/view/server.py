"""The server of the page: binds the socket, handles signals, and ends open streams."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from longtail.errors import UnavailableError
from longtail.system.addresses import bind, url
from longtail.system.interrupt import Interruption
from longtail.view.app import Stopping, make_app
from longtail.view.options import ViewOptions
from longtail.view.run_files import RunFiles

_POLL_S = 0.05
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
        thread = threading.Thread(target=asyncio.run, args=(server.serve(sock),), daemon=True)
        thread.start()
        while not server.http.started:
            if not thread.is_alive():
                raise UnavailableError("the server did not start")
            time.sleep(_POLL_S)
        try:
            yield url("127.0.0.1", sock)
        finally:
            server.http.should_exit = True
            thread.join()


class _Server:
    """The application and uvicorn around it."""

    def __init__(self, runs: Sequence[RunFiles], token: str | None) -> None:
        self._stopping = Stopping()
        app = make_app(runs, token=token, stopping=self._stopping)
        self.http = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )

    async def serve(self, sock: socket.socket, interruption: Interruption | None = None) -> None:
        """Serve until a signal arrives or `http.should_exit` is set."""
        serving = asyncio.create_task(self.http.serve([sock]))
        while not (self.http.should_exit or serving.done()):
            if self.http.started and interruption is not None and interruption.received:
                self.http.should_exit = True
            await asyncio.sleep(_POLL_S)
        self._stopping.is_set = True
        await serving
