"""The HTTP application of the page: its files, the runs' data, and an event when a run grows."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any, final

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from longtail.view.access import ViewAccess
from longtail.view.run_files import RunFiles

POLL_S = 0.4
"""Seconds between two looks at the runs' files."""
_KEEP_ALIVE_S = 15.0
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_MOST_SECONDS = 1e12


@final
class Stopping:
    """Whether the server is stopping, so that streams of events end."""

    def __init__(self) -> None:
        self.is_set = False


def make_app(runs: Sequence[RunFiles], *, token: str | None, stopping: Stopping) -> ASGIApp:
    """Build the application that shows runs."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    _add_files(app)
    _add_data(app, runs)

    @app.get("/events")
    async def events() -> StreamingResponse:
        return StreamingResponse(_events(runs, stopping), media_type="text/event-stream")

    return ViewAccess(app, token=token)


def _add_files(app: FastAPI) -> None:
    folder = files("longtail.view") / "static"
    static = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}

    def respond(name: str) -> Response:
        kind = _TYPES.get(name.rpartition(".")[2])
        if name not in static or kind is None:
            raise HTTPException(404, "no such file")
        return Response(static[name], headers={"Content-Type": kind})

    @app.get("/")
    def page() -> Response:
        return respond("page.html")

    @app.get("/static/{name}")
    def file(name: str) -> Response:
        return respond(name)


def _add_data(app: FastAPI, runs: Sequence[RunFiles]) -> None:
    def found(run: int) -> RunFiles:
        if not 0 <= run < len(runs):
            raise HTTPException(404, "no such run")
        return runs[run]

    def respond(read: Callable[[], Any]) -> Response:
        value = read()
        if value is None:
            raise HTTPException(404, "the run has no such record")
        body = json.dumps(value, allow_nan=False, separators=(",", ":"))
        return Response(body, headers={"Content-Type": "application/json"})

    @app.get("/api/runs")
    def list_runs() -> Response:
        return respond(lambda: [run.describe() for run in runs])

    @app.get("/api/runs/{run}/overview")
    def overview(run: int, first: int | None = None, last: int | None = None) -> Response:
        return respond(lambda: found(run).overview(first, last))

    @app.get("/api/runs/{run}/steps/{step}")
    def get_step(run: int, step: int, line: int | None = None) -> Response:
        return respond(lambda: found(run).step(step, line=line))

    @app.get("/api/runs/{run}/steps/{step}/timeline")
    def timeline(run: int, step: int, begin: float, end: float) -> Response:
        if not (math.isfinite(begin) and math.isfinite(end) and begin < end < _MOST_SECONDS):
            raise HTTPException(400, "begin and end must be seconds, begin before end")
        return respond(lambda: found(run).timeline(step, (begin, end)))

    @app.get("/api/runs/{run}/steps/{step}/rollouts")
    def rollouts(run: int, step: int) -> Response:
        return respond(lambda: found(run).rollouts(step))

    @app.get("/api/runs/{run}/steps/{step}/rollouts/{index}")
    def rollout(run: int, step: int, index: int) -> Response:
        return respond(lambda: found(run).rollout(step, index))


async def _events(runs: Sequence[RunFiles], stopping: Stopping) -> AsyncIterator[str]:
    """Yield the numbers of the runs whose files changed; at first all."""
    stamps: dict[int, str] = {}
    quiet_s = 0.0
    while not stopping.is_set:
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
