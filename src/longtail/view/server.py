"""The server of the page: its files, the runs' data, an event when it grows, and access to it."""

import asyncio
import hmac
import json
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from threading import Event
from typing import Any, final
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtail.system.addresses import bind, is_loopback_header, url
from longtail.system.http_server import make_http_server, serve_until_stopped
from longtail.system.interrupt import Interruption
from longtail.view.report import STATIC
from longtail.view.run_files import RunFiles

POLL_S = 0.4
"""Seconds between two looks at the runs' files."""
_KEEP_ALIVE_S = 15.0
_FLUSH_S = 2
"""Seconds for responses to reach their clients after a signal."""


def serve(runs: Sequence[RunFiles], *, host: str, port: int, token: str | None) -> int:
    """Serve the page until a signal arrives."""
    stopping = Event()
    with bind(host, port) as sock:
        app = make_app(runs, token=token, stopping=stopping)
        http = make_http_server(app, flush_s=_FLUSH_S)
        end_streams = partial(asyncio.to_thread, stopping.set)
        sock.listen()  # browsers may connect as soon as the next line is printed
        names = ", ".join(each.name for each in runs)
        query = "" if token is None else "/?token=TOKEN"
        # uvicorn takes all signals but SIGHUP while it runs, and passes them on at the end.
        with Interruption() as interruption:
            print(f"viewing {names} at {url(host, sock)}{query}", flush=True)
            print("press Ctrl-C to stop", file=sys.stderr, flush=True)
            asyncio.run(serve_until_stopped(http, sock, interruption, end_streams))
    return 0


def make_app(runs: Sequence[RunFiles], *, token: str | None, stopping: Event) -> ASGIApp:
    """Build the application that shows runs; its streams of events end when `stopping` is set."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.mount("/static", StaticFiles(directory=str(STATIC)))

    def found(run: int) -> RunFiles:
        if not 0 <= run < len(runs):
            raise HTTPException(404, "no such run")
        return runs[run]

    @app.get("/")
    def page() -> Response:
        return Response((STATIC / "page.html").read_bytes(), media_type="text/html")

    @app.get("/api/runs")
    def describe() -> Response:
        return _json([run.describe() for run in runs])

    @app.get("/api/runs/{run}/overview")
    def overview(run: int) -> Response:
        return _json(found(run).overview())

    @app.get("/api/runs/{run}/steps/{step}")
    def get_step(run: int, step: int) -> Response:
        return _json(found(run).step(step))

    @app.get("/api/runs/{run}/steps/{step}/rollouts/{index}")
    def rollout(run: int, step: int, index: int) -> Response:
        return _json(_at(found(run).rollouts(step), index))

    @app.get("/api/runs/{run}/steps/{step}/completions")
    def completions(run: int, step: int) -> Response:
        return _json(found(run).completions(step))

    @app.get("/api/runs/{run}/steps/{step}/completions/{index}")
    def completion(run: int, step: int, index: int) -> Response:
        return _json(_at(found(run).texts(step), index))

    @app.get("/events")
    async def events() -> StreamingResponse:
        return StreamingResponse(_events(runs, stopping), media_type="text/event-stream")

    return ViewAccess(app, token=token)


def _json(value: Any) -> Response:
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


def _at(values: Sequence[Any], index: int) -> Any:
    if not 0 <= index < len(values):
        raise HTTPException(404, "the run has no such record")
    return values[index]


async def _events(runs: Sequence[RunFiles], stopping: Event) -> AsyncIterator[str]:
    """Yield the numbers of the runs whose files changed; at first all."""
    stamps: dict[int, str] = {}
    quiet_s = 0.0
    while not stopping.is_set():
        now = await asyncio.to_thread(lambda: {i: run.stamp() for i, run in enumerate(runs)})
        changed = [number for number, stamp in now.items() if stamps.get(number) != stamp]
        stamps = now
        quiet_s = 0.0 if changed else quiet_s + POLL_S
        if changed:
            yield f"event: changed\ndata: {json.dumps(changed)}\n\n"
        elif quiet_s >= _KEEP_ALIVE_S:
            quiet_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_S)


COOKIE = "longtail_view"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: nothing but the page's own files runs or is loaded."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@final
class ViewAccess:
    """ASGI middleware that refuses requests without the token or under another host name.

    Without a token the server listens on loopback, and only requests to this machine's names pass,
    so that no web page can reach it under another name (DNS rebinding). With a token, the first
    request has it in its URL; the answer moves it into a cookie and out of the address bar.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; add the headers to its response."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._token is None:
            if is_loopback_header(headers.get("host", "localhost")):
                return None
            return PlainTextResponse("without a token this page answers to localhost only", 403)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and _equal(given, self._token):
            moved = RedirectResponse("/", 303)
            moved.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return moved
        if _equal(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""), self._token):
            return None
        return PlainTextResponse("open the page with its token: /?token=TOKEN", 401)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())
