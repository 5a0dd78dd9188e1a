"""An engine shared by many callers: it runs in one thread, its callers in one event loop.

    loop    submit --CompletionStream--> caller     close: the caller left     drain, stop
              | request                   ^ events     |                           |
              v                           |            v                           v
    thread  commands --> submit, step, step, step, abort, step ...  (the only user of the engine)

They communicate through a queue one way and `call_soon_threadsafe` the other. A slow reader delays
no other caller: its events wait in a queue that `max_tokens` bounds. If the engine fails, all
waiting and later callers get an error. This module knows neither HTTP nor text.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from longtail.engine.engine import RolloutEngine
from longtail.engine.report import Emitted, Failed, StepReport, Verified
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import CompletionError, LongtailError, OverloadedError, UnavailableError
from longtail.serve.options import ServeOptions
from longtail.types import Completion, Request

Event = Verified | Emitted | Completion | Failed

_log = logging.getLogger("longtail")
_JOIN_S, _POLL_S = 10.0, 0.02
_HANGS_S = 10.0
"""Seconds without a step after which a busy engine is not healthy."""
_STOPPING = "the server is shutting down"
_FAILED = "the engine failed; see the server's log, and restart the server"


@final
class CompletionStream:
    """Events of one call's completions. A caller that leaves must `close` it."""

    def __init__(self, request_ids: Sequence[str], close: Callable[[], None]) -> None:
        self.choices = {request_id: choice for choice, request_id in enumerate(request_ids)}
        self.close = close
        """Abort the completions that have not finished."""
        self.submitted_at = time.monotonic()
        self.is_first = True
        """Whether there was no token yet."""
        self.queue: asyncio.Queue[tuple[int, list[Event]] | LongtailError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, list[Event]]]:
        """Yield the index of a completion and what a step did for it, until all have finished.

        The order is: a verified draft, tokens, the end. Raises the LongtailError that ended one.
        """
        num_unread = len(self.choices)
        while num_unread:
            item = await self.queue.get()
            if isinstance(item, LongtailError):
                raise item
            num_unread -= isinstance(item[1][-1], Completion)
            yield item


@final
class Service:
    """Lifecycle: start -> submit, check, speculate ... -> drain -> stop; all on one event loop."""

    def __init__(self, engine: RolloutEngine, options: ServeOptions) -> None:
        self._engine, self._options = engine, options
        self.metrics = ServeMetrics()
        self._kv = engine.kv_usage()
        """KV usage after the last step. The engine's own may change while it is read."""
        self._progress_at = time.monotonic()
        """Time when the engine last finished a step or was idle."""
        self._thread = threading.Thread(target=self._main, name="longtail-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._streams: dict[str, CompletionStream] = {}
        """Streams of the accepted, unfinished requests, by request id."""
        self._closed: str | None = None
        """Reason why no request is accepted, if none is."""
        gauge = self.metrics.add_gauge
        gauge("running_completions", "Completions being generated.", lambda: self.num_running)
        gauge("waiting_completions", "Completions that wait.", lambda: self.num_waiting)
        gauge("kv_free_tokens", "Free KV memory, in tokens.", lambda: self._kv.free)
        gauge("kv_total_tokens", "Total KV memory, in tokens.", lambda: self._kv.total)

    @property
    def num_running(self) -> int:
        """Number of completions that the engine may be generating."""
        return min(len(self._streams), self._options.max_running)

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait for a slot."""
        return len(self._streams) - self.num_running

    def start(self) -> None:
        """Start the engine thread; its results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> CompletionStream:
        """Accept the requests of one call, under ids of the service's own.

        Requests with equal prompts share their KV. Raises RequestError for a request that the
        engine can never serve, OverloadedError when too many requests wait, UnavailableError when
        none is accepted any more.
        """
        if self._closed is not None:
            raise UnavailableError(self._closed)
        count, options = len(self._streams), self._options
        if count + len(requests) > options.max_running + options.max_queue:
            raise OverloadedError(
                f"{count} completions are running or waiting and this call asks for "
                f"{len(requests)} more; at most {options.max_running} run at a time and "
                f"{options.max_queue} wait: retry later"
            )
        number, groups = next(self._numbers), dict[tuple[int, ...], str]()
        renamed = []
        for choice, request in enumerate(requests):
            request_id = f"{number}-{choice}"
            group_id = groups.setdefault(request.prompt_tokens, request_id)
            renamed.append(replace(request, request_id=request_id, group_id=group_id))
            self._engine.check(renamed[-1])
        request_ids = [request.request_id for request in renamed]
        stream = CompletionStream(request_ids, partial(self._abort, request_ids))
        for request in renamed:
            self._streams[request.request_id] = stream
            self._commands.put(partial(self._engine.submit, request))
            self.metrics.prompt_tokens.inc(len(request.prompt_tokens))
        return stream

    def check(self) -> None:
        """Raise UnavailableError if the engine failed or hangs, or the service is stopping."""
        if self._closed is not None:
            raise UnavailableError(self._closed)
        if self._streams and time.monotonic() - self._progress_at > _HANGS_S:
            raise UnavailableError(f"the engine made no step within {_HANGS_S:g} s")

    def speculate(self, speculation: Speculation | None) -> None:
        """Draft with other drafters from the next step on; None: decode plainly."""
        self._commands.put(partial(self._engine.speculate, speculation))

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, wait up to `seconds` for unfinished ones, then abort them."""
        self._closed = self._closed or _STOPPING
        deadline = time.monotonic() + seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._close(_STOPPING)

    async def stop(self) -> None:
        """Abort all requests and end the thread; KV is free then, unless the engine hangs."""
        self._close(_STOPPING)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort those of the requests that are unfinished."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self.metrics.aborted.inc()
                self._commands.put(partial(self._withdraw, request_id))

    def _close(self, reason: str) -> None:
        """Accept no more requests, and end all unfinished ones with an error."""
        self._closed = self._closed or reason
        for stream in set(self._streams.values()):
            stream.queue.put_nowait(UnavailableError(self._closed))
            stream.close()

    def _deliver(self, report: StepReport) -> None:
        """Give the results of a step to the callers that have not left."""
        events: dict[str, list[Event]] = {}
        all_events: list[Event] = [*report.verified, *report.emitted]
        for event in (*all_events, *report.finished, *report.failed):
            events.setdefault(event.request_id, []).append(event)
        for request_id in events.keys() & self._streams.keys():
            stream, last = self._streams[request_id], events[request_id][-1]
            if isinstance(last, Failed):
                stream.queue.put_nowait(_as_longtail(last.error))
                self.metrics.failed.inc()
            else:
                stream.queue.put_nowait((stream.choices[request_id], events[request_id]))
            seconds = time.monotonic() - stream.submitted_at
            if stream.is_first:
                self.metrics.first_token.observe(seconds)
                stream.is_first = False
            if isinstance(last, Completion):
                self.metrics.completion.observe(seconds)
                self.metrics.finished.labels(last.finish_reason.value).inc()
            if isinstance(last, Completion | Failed):
                del self._streams[request_id]

    # The methods below run in the engine thread.

    def _main(self) -> None:
        try:
            while self._run_once():
                pass
            for request_id, _, _ in self._engine.unfinished():
                self._withdraw(request_id)
        except Exception as error:  # noqa: BLE001 - every caller gets an error
            _log.error("the engine failed", exc_info=error)
            self._notify(self._close, _FAILED)

    def _run_once(self) -> bool:
        """Run all commands, waiting for more while the engine is idle, then one step.

        Returns False when told to stop.
        """
        while self._engine.num_unfinished == 0 or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            self._progress_at = time.monotonic()
            command()
        report = self._engine.step()
        self._kv, self._progress_at = self._engine.kv_usage(), time.monotonic()
        self.metrics.count_step(report)
        self._notify(self._deliver, report)
        return True

    def _withdraw(self, request_id: str) -> None:
        if self._engine.is_unfinished(request_id):
            self._engine.abort(request_id)
            self._kv = self._engine.kv_usage()

    def _notify(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "the loop is set before the thread starts"
        with suppress(RuntimeError):  # the loop is closed, so all callers have gone
            self._loop.call_soon_threadsafe(callback, *arguments)


def _as_longtail(error: Exception) -> LongtailError:
    if isinstance(error, LongtailError):
        return error
    _log.error("a completion failed", exc_info=error)
    return CompletionError("this completion failed; see the server's log")


_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


@final
class ServeMetrics:
    """Counters and histograms of a service; `render` exports them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"longtail_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"longtail_{name}", text, buckets=_SECONDS, registry=self._registry)

        self.aborted = counter("aborted_completions", "Completions aborted before their end.")
        self.failed = counter("failed_completions", "Completions ended by an error.")
        self.finished = counter("finished_completions", "Completions finished.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted completions.")
        self._tokens = counter("generated_tokens", "Tokens generated.")
        self._drafted = counter("drafted_tokens", "Draft nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft nodes accepted.")
        self._verified = counter("verify_steps", "Drafts verified.")
        self._step = histogram("engine_step_seconds", "Engine steps.")
        self.first_token = histogram("first_token_seconds", "From a call to its first token.")
        self.completion = histogram("completion_seconds", "From a call to a completion's end.")

    def count_step(self, report: StepReport) -> None:
        """Count an engine step."""
        self._step.observe(report.step_s)
        self._tokens.inc(len(report.emitted))
        self._drafted.inc(sum(each.num_drafted for each in report.verified))
        self._accepted.inc(sum(each.num_accepted for each in report.verified))
        self._verified.inc(len(report.verified))

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that calls `read` on each scrape."""
        Gauge(f"longtail_{name}", text, registry=self._registry).set_function(read)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
