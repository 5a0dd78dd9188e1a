"""An engine shared by many callers: it runs in one thread, its callers in one event loop.

    loop    submit --CompletionStream--> caller     close: the caller left     drain, stop
              | request                   ^ Chunk      |                           |
              v                           |            v                           v
    thread  commands --> submit, step, step, step, abort, step ...  (the only user of the engine)

Each side owns its own state: the loop knows the accepted, unfinished requests; the thread
(`engine_thread`) knows which of them the engine holds. They communicate through a queue one way and
`call_soon_threadsafe` the other. A slow reader delays no other caller: its chunks wait in a queue
that `max_tokens` bounds. This module knows nothing of HTTP.

An engine that fails is replaced, and the unfinished completions are generated again without their
callers noticing. Requests that were running when the engine failed are suspects; suspects run one
at a time, beside the other requests. A suspect whose engine fails a second time gets an error; the
other callers get their texts. If the engine hangs or cannot be made again, all waiting and later
callers get an error.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar, final

from longtail.engine.engine import RolloutEngine
from longtail.engine.kv.cache import KVUsage
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.text import Decode, Reader
from longtail.errors import CompletionError, LongtailError, OverloadedError, UnavailableError
from longtail.serve.engine_thread import EngineListener, EngineThread
from longtail.serve.metrics import ServeMetrics
from longtail.serve.options import Limits
from longtail.serve.stream import Chunk, CompletionStream, RequestState
from longtail.types import PolicyWeights, Request

_log = logging.getLogger("longtail")
_WATCH_S = 0.5
_JOIN_S = 10.0
_PAUSE_POLL_S = 0.01
_STOPPING = "the server is shutting down"
_PAUSED = "generation is paused; a trainer resumes it with POST /resume"
_FAILED_TWICE = "the engine failed twice while it generated this completion; see the server's log"
_MAX_FAILURES = 2
"""Number of engine failures after which a suspect gets an error."""
Result = TypeVar("Result")


class PauseMode(StrEnum):
    """Treatment of unfinished completions, and of later calls, by a pause."""

    ABORT = "abort"
    """They end with the tokens that they have; later calls are refused."""
    WAIT = "wait"
    """They are finished before the pause begins; later calls are refused."""
    KEEP = "keep"
    """They continue after the pause; later calls wait for its end."""


@final
class Service(EngineListener):
    """Lifecycle: start -> submit, probe, pause, ... -> drain -> stop; all on one event loop."""

    def __init__(
        self, make_engine: Callable[[], RolloutEngine], decode: Decode, limits: Limits
    ) -> None:
        self._make_engine, self._decode = make_engine, decode
        self.limits, self.metrics = limits, ServeMetrics()
        self._thread = EngineThread(make_engine, self, self.metrics)
        self.vocab_size = self._thread.open().model.config.vocab_size
        """Vocabulary size of the model."""
        self.dtype = self._thread.open().model.dtype
        """Dtype of the weights."""
        self.is_paused = False
        """Whether the engine takes no steps."""
        self._refuses = False
        """Whether calls are refused, because of a pause."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._states: dict[str, RequestState] = {}
        """Accepted, unfinished requests, the oldest first."""
        self._suspects: deque[RequestState] = deque()
        """Requests that run one at a time; only the first is submitted to the engine."""
        self._closed: str | None = None
        """Reason why no request is accepted, if none is."""
        self._probes: set[asyncio.Future[None]] = set()
        self._mean_s = 1.0
        """Running mean of the seconds that a completion takes."""
        gauge = self.metrics.add_gauge
        gauge("running_completions", "Completions being generated.", lambda: self.num_running)
        gauge("waiting_completions", "Completions that wait.", lambda: self.num_waiting)
        gauge("kv_free_tokens", "Free KV memory, in tokens.", lambda: self.kv_usage().free)
        gauge("policy_version", "Version of the weights.", lambda: self.policy_version)
        gauge("paused", "1 while generation is paused.", lambda: self.is_paused)
        gauge("kv_total_tokens", "Total KV memory, in tokens.", lambda: self.kv_usage().total)

    @property
    def num_running(self) -> int:
        """Number of completions that the engine may be generating."""
        return min(len(self._states), self.limits.max_running)

    @property
    def num_waiting(self) -> int:
        """Number of completions that wait for a slot."""
        return len(self._states) - self.num_running

    @property
    def policy_version(self) -> int:
        """Version of the weights; 0 until a trainer updates them."""
        return self._thread.policy_version

    def kv_usage(self) -> KVUsage:
        """Return the KV usage after the last step, in tokens."""
        return self._thread.usage

    def start(self) -> None:
        """Start the engine thread and the watchdog in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._watchdog = self._loop.create_task(self._watch())
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> CompletionStream:
        """Accept the requests of one call, under ids of the service's own.

        Requests with equal prompts share their KV. Raises OverloadedError when too many requests
        wait, UnavailableError when none is accepted any more.
        """
        if self._closed is not None or self._refuses:
            raise UnavailableError(self._closed or _PAUSED)
        count = len(self._states)
        if count + len(requests) > self.limits.max_running + self.limits.max_queue:
            raise OverloadedError(
                f"{count} completions are running or waiting and this call asks for "
                f"{len(requests)} more; at most {self.limits.max_running} run at a time and "
                f"{self.limits.max_queue} wait: retry later"
            )
        if not self._states:
            self._thread.progress_at = time.monotonic()
        number = next(self._numbers)
        request_ids = [f"{number}-{choice}" for choice in range(len(requests))]
        stream = CompletionStream(request_ids, self._abort)
        groups: dict[tuple[int, ...], str] = {}
        states = []
        for choice, (request_id, request) in enumerate(zip(request_ids, requests, strict=True)):
            group_id = groups.setdefault(request.prompt_tokens, request_id)
            renamed = replace(request, request_id=request_id, group_id=group_id)
            reader = Reader(self._decode, request.sampling.stop)
            states.append(RequestState(renamed, stream, choice, reader, time.monotonic()))
            self.metrics.prompt_tokens.inc(len(request.prompt_tokens))
        self._states.update((state.request_id, state) for state in states)
        self._thread.submit(states)
        return stream

    def retry_after_s(self) -> int:
        """Estimate the seconds until a slot is free, from the mean duration of completions."""
        share_s = self._mean_s / self.limits.max_running
        return min(max(math.ceil(share_s * (1 + self.num_waiting)), 1), 60)

    async def probe(self) -> None:
        """Wait until the engine generates a token, of any request or of a made-up one.

        During a pause, wait until the engine's thread answers. Raises UnavailableError if it does
        not within `health_s`.
        """
        if self._closed is not None:
            raise UnavailableError(self._closed)
        if self.is_paused:
            await self._wait(self._thread.call(lambda engine: None), self.limits.health_s)
            return
        assert self._loop is not None, "start it first"
        done: asyncio.Future[None] = self._loop.create_future()
        self._probes.add(done)
        self._thread.probe()
        try:
            await asyncio.wait_for(done, self.limits.health_s)
        except TimeoutError as error:
            raise UnavailableError(
                f"the engine generated no token within {self.limits.health_s:g} s"
            ) from error
        finally:
            self._probes.discard(done)

    async def pause(self, mode: PauseMode) -> None:
        """Take no more steps until `resume`; see `PauseMode`."""
        self._refuses = mode is not PauseMode.KEEP
        while mode is PauseMode.WAIT and self._states and self._closed is None:
            await asyncio.sleep(_PAUSE_POLL_S)
            if not self._refuses:
                return  # resumed meanwhile
        self.is_paused = True
        await self._wait(self._thread.set_paused(True))
        if mode is PauseMode.ABORT:
            await self._wait(self._thread.finish(tuple(self._states)))

    async def resume(self) -> None:
        """Generate again, where `pause` stopped."""
        self._refuses = False
        await self._wait(self._thread.set_paused(False))
        self.is_paused = False

    async def update_weights(self, weights: PolicyWeights) -> None:
        """Generate with other weights from the next step on; unfinished texts begin anew."""
        await self._wait(self._thread.update(weights))
        self.metrics.weight_updates.inc()

    async def speculate(self, speculation: Speculation | None) -> None:
        """Draft with other drafters from the next step on; None: decode plainly."""
        await self._wait(self._thread.call(lambda engine: engine.speculate(speculation)))

    async def _wait(self, future: "Future[Result]", seconds: float | None = None) -> Result:
        """Wait for the engine thread. Raises UnavailableError if there is none any more."""
        if self._closed is not None:
            raise UnavailableError(self._closed)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError as error:
            raise UnavailableError(f"the engine did not answer within {seconds:g} s") from error

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, wait up to `seconds` for unfinished ones, then abort them.

        During a pause they cannot be finished, and are aborted at once.
        """
        self._closed = self._closed or _STOPPING
        deadline = time.monotonic() + seconds
        while self._states and not self.is_paused and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._close(_STOPPING)

    async def stop(self) -> None:
        """Abort all requests and end the thread; KV is free then, unless the engine hangs."""
        self._close(_STOPPING)
        self._thread.stop()
        if self._watchdog is not None:
            self._watchdog.cancel()
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _abort(self, stream: CompletionStream) -> None:
        """Abort the unfinished requests of a stream that its caller has left."""
        if stream.unfinished:
            self._thread.abort(tuple(stream.unfinished))
        for request_id in tuple(stream.unfinished):
            self._remove(self._states[request_id])

    def _remove(self, state: RequestState) -> None:
        """Remove a request that finished, failed or was aborted."""
        del self._states[state.request_id]
        state.stream.unfinished.discard(state.request_id)
        if state in self._suspects:
            is_first = state is self._suspects[0]
            self._suspects.remove(state)
            if is_first and self._suspects:
                self._thread.submit([self._suspects[0]])

    def _close(self, reason: str) -> None:
        """Accept no more requests, and end all unfinished ones with an error."""
        self._closed = self._closed or reason
        self._suspects.clear()
        for stream in {state.stream for state in self._states.values()}:
            stream.queue.put_nowait(UnavailableError(reason))
            self._abort(stream)
        self._fail_probes(reason)

    def _fail_probes(self, reason: str) -> None:
        for probe in self._probes:
            if not probe.done():
                probe.set_exception(UnavailableError(reason))

    async def _watch(self) -> None:
        """Close the service if a step of the engine takes longer than `stall_s`."""
        while self._closed is None:
            await asyncio.sleep(min(_WATCH_S, self.limits.stall_s))
            stalled_s = time.monotonic() - self._thread.progress_at
            if self._states and not self.is_paused and stalled_s > self.limits.stall_s:
                _log.error("the engine finished no step in %g s: giving up", self.limits.stall_s)
                self._close("the engine hangs; restart the server")

    # Events of the engine thread, see `EngineListener`.

    def on_chunks(self, chunks: Sequence[tuple[RequestState, Chunk]]) -> None:
        """Queue the chunks of a step for their callers."""
        for state, chunk in chunks:
            if state.request_id not in self._states:
                continue  # its caller has left
            state.stream.queue.put_nowait(chunk)
            if chunk.ending is not None:
                self._remove(state)
                self._mean_s += 0.1 * (time.monotonic() - state.submitted_at - self._mean_s)
        for probe in self._probes:
            if not probe.done():
                probe.set_result(None)

    def on_request_failed(self, state: RequestState, error: LongtailError) -> None:
        """Send the error to the caller of one request."""
        if state.request_id in self._states:
            self.metrics.failed.inc()
            state.stream.queue.put_nowait(error)
            self._remove(state)

    def on_engine_failed(self, running: frozenset[str] | None) -> None:
        """Replace the engine and submit the unfinished requests again."""
        if self._closed is not None:
            self._close(self._closed)
            return
        if running is None:
            self._close("the engine failed and cannot be restarted; see the server's log")
            return
        _log.error("the engine failed and is restarted; its completions are generated again")
        self.metrics.restarts.inc()
        self._fail_probes("the engine failed and is being restarted")
        self._thread = EngineThread(self._make_engine, self, self.metrics, predecessor=self._thread)
        self._thread.start()
        if self.is_paused:
            self._thread.set_paused(True)
        suspects = running & self._states.keys() or self._states.keys()
        self._suspects.clear()
        for state in tuple(self._states.values()):
            state.num_failures += state.request_id in suspects
            if state.num_failures == _MAX_FAILURES:
                self.on_request_failed(state, CompletionError(_FAILED_TWICE))
            elif state.num_failures:
                self._suspects.append(state)
            else:
                self._thread.submit([state])
        if self._suspects:
            self._thread.submit([self._suspects[0]])
