"""Servers in a thread of the test, on a free port of this machine."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from longtail.system.addresses import bind, url
from longtail.system.http_server import HttpServer, make_http_server, serve_until_stopped
from longtail.view.run_files import RunFiles
from longtail.view.server import make_app


@contextmanager
def running_in_thread(http: HttpServer, serving: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Run `serving` in a thread while the context is open."""
    thread = threading.Thread(target=asyncio.run, args=(serving,), daemon=True)
    thread.start()
    while not http.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.05)
    try:
        yield
    finally:
        http.should_exit = True
        thread.join()


@contextmanager
def viewing(runs: Sequence[RunFiles], *, token: str | None = None) -> Iterator[str]:
    """Serve the page of `longtail view`, and yield its URL."""
    stopping = threading.Event()
    with bind("127.0.0.1", 0) as sock:
        http = make_http_server(make_app(runs, token=token, stopping=stopping), flush_s=2)
        end_streams = partial(asyncio.to_thread, stopping.set)
        with running_in_thread(http, serve_until_stopped(http, sock, None, end_streams)):
            yield url("127.0.0.1", sock)
