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
from functools import partial
from typing import Any, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from longtail.config.command_options import ServeOptions
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import requests_of
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import OverloadedError, UnavailableError
from longtail.generator import Emitted, Failed, StepReport, Verified
from longtail.types import Completion, SamplingParams

Event = Verified | Emitted | Completion | Failed

_log = logging.getLogger("longtail")
_JOIN_S, _POLL_S = 10.0, 0.02
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds of the histograms' buckets."""
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
        self.queue: asyncio.Queue[tuple[int, list[Event]] | Exception] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, list[Event]]]:
        """Yield the index of a completion and what a step did for it, until all have finished.

        The order is: a verified draft, tokens, the end. Raises the error that ended one.
        """
        num_unread = len(self.choices)
        while num_unread:
            item = await self.queue.get()
            if isinstance(item, Exception):
                raise item
            num_unread -= isinstance(item[1][-1], Completion)
            yield item


@final
class Service:
    """Lifecycle: start -> submit, check, speculate ... -> drain -> stop; all on one event loop."""

    def __init__(self, engine: RolloutEngine, options: ServeOptions) -> None:
        self._engine, self._options = engine, options
        self._kv = engine.kv_usage()
        """KV usage after the last step. The engine's own may change while it is read."""
        self._progress_at = time.monotonic()
        """Time when the engine last finished a step or was idle."""
        self._thread = threading.Thread(target=self._main, name="longtail-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop  # set before the thread starts
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._streams: dict[str, CompletionStream] = {}
        """Streams of the accepted, unfinished requests, by request id."""
        self._closed: str | None = None
        """Reason why no request is accepted, if none is."""
        self.registry = CollectorRegistry()
        """The metrics."""
        self._declare_metrics()

    def _declare_metrics(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"longtail_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"longtail_{name}", text, buckets=_SECONDS, registry=self.registry)

        ProcessCollector(registry=self.registry)
        self._finished = counter("finished_completions", "Completions ended.", "reason")
        self._prompted = counter("prompt_tokens", "Prompt tokens of accepted completions.")
        self._tokens = counter("generated_tokens", "Tokens generated.")
        self._drafted = counter("drafted_tokens", "Draft nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft nodes accepted.")
        self._verified = counter("verify_steps", "Drafts verified.")
        self._steps = histogram("engine_step_seconds", "Engine steps.")
        self._first_token = histogram("first_token_seconds", "From a call to its first token.")
        self._completion = histogram("completion_seconds", "From a call to a completion's end.")
        for name, text, read in (
            ("running_completions", "Completions being generated.", lambda: self.num_running),
            (
                "waiting_completions",
                "Completions that wait.",
                lambda: len(self._streams) - self.num_running,
            ),
            ("kv_free_tokens", "Free KV memory, in tokens.", lambda: self._kv.free),
            ("kv_total_tokens", "Total KV memory, in tokens.", lambda: self._kv.total),
        ):
            gauge = Gauge(f"longtail_{name}", text, registry=self.registry)
            gauge.set_function(read)

    @property
    def num_running(self) -> int:
        """Number of completions that the engine may be generating."""
        return min(len(self._streams), self._options.max_running)

    def start(self) -> None:
        """Start the engine thread; its results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_room(self, new: int) -> None:
        """Raise OverloadedError if too many would wait, UnavailableError if none is accepted."""
        if self._closed is not None:
            raise UnavailableError(self._closed)
        count, options = len(self._streams), self._options
        if count + new > options.max_running + options.max_queue:
            raise OverloadedError(
                f"{count} completions are running or waiting and this call asks for {new} more; "
                f"at most {options.max_running} run at a time and {options.max_queue} wait"
            )

    def submit(
        self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seed: int, n: int
    ) -> CompletionStream:
        """Accept `n` completions of each prompt, which share its KV.

        Raises RequestError for what the engine can never serve, and as `check_room`.
        """
        self.check_room(len(prompts) * n)
        requests = requests_of(next(self._numbers), prompts, sampling, seed, n)
        for request in requests:
            self._engine.check(request)
        names = [request.request_id for request in requests]
        stream = CompletionStream(names, partial(self._abort, names))
        for request in requests:
            self._streams[request.request_id] = stream
            self._commands.put(partial(self._engine.submit, request))
            self._prompted.inc(len(request.prompt_tokens))
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
                self._finished.labels("abort").inc()
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
        every: list[Event] = [*report.verified, *report.emitted, *report.finished, *report.failed]
        for event in every:
            events.setdefault(event.request_id, []).append(event)
        for request_id in events.keys() & self._streams.keys():
            stream, last = self._streams[request_id], events[request_id][-1]
            seconds = time.monotonic() - stream.submitted_at
            if isinstance(last, Failed):
                stream.queue.put_nowait(last.error)
                self._finished.labels("error").inc()
            else:
                stream.queue.put_nowait((stream.choices[request_id], events[request_id]))
            if stream.is_first:
                self._first_token.observe(seconds)
                stream.is_first = False
            if isinstance(last, Completion):
                self._completion.observe(seconds)
                self._finished.labels(last.finish_reason.value).inc()
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
        self._steps.observe(report.step_s)
        self._tokens.inc(len(report.emitted))
        self._drafted.inc(sum(each.num_drafted for each in report.verified))
        self._accepted.inc(sum(each.num_accepted for each in report.verified))
        self._verified.inc(len(report.verified))
        self._notify(self._deliver, report)
        return True

    def _withdraw(self, request_id: str) -> None:
        if self._engine.is_unfinished(request_id):
            self._engine.abort(request_id)
            self._kv = self._engine.kv_usage()

    def _notify(self, callback: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, so all callers have gone
            self._loop.call_soon_threadsafe(callback, *arguments)
