"""The thread that owns one engine: it runs until it is stopped or the engine fails.

Commands arrive through a queue; results go to an `EngineListener` in the event loop.
"""

import abc
import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, final

from longtail.engine.engine import RolloutEngine
from longtail.engine.kv.cache import KVUsage
from longtail.engine.report import Emitted
from longtail.errors import CompletionError, LongtailError, UnavailableError
from longtail.serve.metrics import ServeMetrics
from longtail.serve.stream import Chunk, RequestState
from longtail.types import Completion, PolicyWeights, Request, SamplingParams

_log = logging.getLogger("longtail")
_PROBE = "health"
_NO_USAGE = KVUsage(free=0, owned=0, total=0)
Result = TypeVar("Result")


class EngineListener(abc.ABC):
    """Receives the events of an engine thread in the event loop, in order."""

    @abc.abstractmethod
    def on_chunks(self, chunks: Sequence[tuple[RequestState, Chunk]]) -> None:
        """Take the chunks of a step; there are none if it generated tokens for a probe alone."""

    @abc.abstractmethod
    def on_request_failed(self, state: RequestState, error: LongtailError) -> None:
        """Handle the failure of one completion; the engine continues."""

    @abc.abstractmethod
    def on_engine_failed(self, running: frozenset[str] | None) -> None:
        """Handle the failure of the engine, which also ends the thread.

        `running`: ids of the requests that were running; None if the engine could not be made.
        """


@final
class EngineThread:
    """Lifecycle: (open ->) start -> submit, abort, call, ... -> stop -> join."""

    def __init__(
        self,
        make_engine: Callable[[], RolloutEngine],
        listener: EngineListener,
        metrics: ServeMetrics,
        predecessor: "EngineThread | None" = None,
    ) -> None:
        self._make_engine, self._listener, self._metrics = make_engine, listener, metrics
        self._predecessor = predecessor
        """Thread to wait for before the engine is made: until it ends it holds memory."""
        self._engine: RolloutEngine | None = None
        self._commands: queue.SimpleQueue[Callable[[RolloutEngine], None] | None]
        self._commands = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="longtail-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._states: dict[str, RequestState] = {}
        self._calls: set[Future[Any]] = set()
        """Results that callers wait for."""
        self._is_paused = self._has_ended = False
        self.policy_version: int = 0 if predecessor is None else predecessor.policy_version
        """Version of the weights, which outlive their engine; 0 before the first update."""
        self.usage = _NO_USAGE
        """KV usage after the last step. The engine's own may change while it is read."""
        self.progress_at = time.monotonic()
        """Time when the engine last finished a step or was idle."""

    def open(self) -> RolloutEngine:
        """Return the engine, made on the first call."""
        if self._engine is None:
            self._engine = self._make_engine()
            self.usage = self._engine.kv_usage()
            self.progress_at = time.monotonic()
        return self._engine

    def start(self) -> None:
        """Start the thread; its listener is called in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, states: Sequence[RequestState]) -> None:
        """Submit requests; those of one group share their prompt's KV."""
        self._commands.put(partial(self._submit, states))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; unknown and finished ones are ignored."""
        self._commands.put(partial(self._abort, request_ids))

    def probe(self) -> None:
        """Generate one token for a made-up request, unless the engine has unfinished requests."""
        self._commands.put(self._probe)

    def call(self, work: Callable[[RolloutEngine], Result]) -> "Future[Result]":
        """Run `work` between two steps and return its result.

        A LongtailError is the caller's; after any other error the engine is replaced. Raises
        UnavailableError if the thread ends first.
        """
        future: Future[Result] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(partial(self._answer, future, work))
        if self._has_ended:
            self._fail_calls()
        return future

    def set_paused(self, is_paused: bool) -> "Future[None]":
        """Stop taking steps, or take them again; commands are executed in both cases."""
        return self.call(partial(self._set_paused, is_paused))

    def finish(self, request_ids: Sequence[str]) -> "Future[None]":
        """End requests where they are; their callers receive the tokens generated so far."""
        return self.call(partial(self._finish, request_ids))

    def update(self, weights: PolicyWeights) -> "Future[None]":
        """Generate with other weights; unfinished texts begin anew, so that none mixes two."""
        return self.call(partial(self._update, weights))

    def stop(self) -> None:
        """End after the present step; unfinished requests are aborted."""
        self._commands.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread. A hanging engine delays it."""
        self._thread.join(seconds)

    # The methods below run in the thread.

    def _main(self) -> None:
        if self._predecessor is not None:
            self._predecessor.join()
            self._predecessor = None
        engine = None
        try:
            engine = self.open()
            while self._run_once(engine):
                pass
        except BaseException:
            self._engine = None
            self._notify(
                self._listener.on_engine_failed, None if engine is None else engine.running()
            )
            raise
        finally:
            self._has_ended = True
            self._fail_calls()
        self._abort([request_id for request_id, _, _ in engine.unfinished()], engine)
        self.usage = engine.kv_usage()

    def _run_once(self, engine: RolloutEngine) -> bool:
        """Run all commands, waiting for one if the engine is idle or paused, then one step.

        Returns False when told to stop.
        """
        wait = self._is_paused or engine.num_unfinished == 0
        while wait or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            self.progress_at = time.monotonic()
            command(engine)
            wait = False
        self.usage = engine.kv_usage()
        if engine.num_unfinished and not self._is_paused:
            self._step(engine)
            self.progress_at = time.monotonic()
        return True

    def _answer(
        self,
        future: "Future[Result]",
        work: Callable[[RolloutEngine], Result],
        engine: RolloutEngine,
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(engine))
        except LongtailError as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(error)
            raise

    def _fail_calls(self) -> None:
        for future in tuple(self._calls):
            with suppress(InvalidStateError):  # it was cancelled or answered meanwhile
                future.set_exception(UnavailableError("the engine failed or stopped; try again"))

    def _set_paused(self, is_paused: bool, engine: RolloutEngine) -> None:
        self._is_paused = is_paused

    def _finish(self, request_ids: Sequence[str], engine: RolloutEngine) -> None:
        chunks = []
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None and engine.is_unfinished(request_id):
                self._metrics.aborted.inc()
                try:
                    chunks.append((state, state.last_chunk(engine.abort(request_id))))
                except Exception as error:  # noqa: BLE001 - raised while decoding its text
                    self._fail(engine, state, error)
        self._notify(self._listener.on_chunks, chunks)

    def _update(self, weights: PolicyWeights, engine: RolloutEngine) -> None:
        unfinished = [request_id for request_id, _, _ in engine.unfinished()]
        states = [self._states[name] for name in unfinished if name in self._states]
        for request_id in unfinished:
            _withdraw(engine, request_id)
        try:
            engine.pull(weights)
            self.policy_version = weights.version
            for state in states:
                state.rewrite()
        finally:
            self._submit(states, engine)
            if _PROBE in unfinished:
                self._probe(engine)

    def _submit(self, states: Sequence[RequestState], engine: RolloutEngine) -> None:
        for state in states:
            try:
                engine.submit(state.request)
            except Exception as error:  # noqa: BLE001 - a failed request must not end the engine
                self._fail(engine, state, error)
                continue
            state.restart()
            state.policy_version = self.policy_version
            self._states[state.request_id] = state

    def _probe(self, engine: RolloutEngine) -> None:
        if not engine.num_unfinished:
            sampling = SamplingParams(temperature=0.0, max_tokens=1)
            engine.submit(
                Request(request_id=_PROBE, prompt_tokens=(0,), noise_key=0, sampling=sampling)
            )

    def _abort(self, request_ids: Sequence[str], engine: RolloutEngine) -> None:
        for request_id in request_ids:
            self._states.pop(request_id, None)
            if engine.is_unfinished(request_id):
                self._metrics.aborted.inc()
                _withdraw(engine, request_id)

    def _step(self, engine: RolloutEngine) -> None:
        report = engine.step()
        self.usage = engine.kv_usage()  # before a caller learns that its completion ended
        self._metrics.count_step(report)
        for verified in report.verified:
            if verified.request_id in self._states:
                self._states[verified.request_id].count(verified)
        emitted: dict[str, list[Emitted]] = {}
        for each in report.emitted:
            if each.request_id in self._states:
                emitted.setdefault(each.request_id, []).append(each)
        finished = {completion.request_id: completion for completion in report.finished}
        chunks: list[tuple[RequestState, Chunk]] = []
        try:
            for request_id, tokens in emitted.items():
                state = self._states[request_id]
                chunk = self._chunk(engine, state, tokens, finished.get(request_id))
                if chunk is not None:
                    chunks.append((state, chunk))
        finally:
            if report.emitted:
                self._notify(self._listener.on_chunks, chunks)
        for failure in report.failed:
            if failure.request_id in self._states:
                self._fail(engine, self._states[failure.request_id], failure.error)

    def _chunk(
        self,
        engine: RolloutEngine,
        state: RequestState,
        emitted: Sequence[Emitted],
        completion: Completion | None,
    ) -> Chunk | None:
        """Return the chunk to send, if any; update the metrics."""
        now = time.monotonic()
        if state.first_token_at is None:
            state.first_token_at = now
            self._metrics.first_token.observe(now - state.submitted_at)
        try:
            chunk = state.chunk(emitted, completion)
        except Exception as error:  # noqa: BLE001 - raised while decoding its text
            self._fail(engine, state, error)
            return None
        if completion is not None:
            del self._states[state.request_id]
            self._metrics.count_finished(
                completion.finish_reason.value,
                now - state.submitted_at,
                now - state.first_token_at,
                len(completion.tokens),
            )
        return chunk

    def _fail(self, engine: RolloutEngine, state: RequestState, error: Exception) -> None:
        """End one completion with its error."""
        self._abort([state.request_id], engine)
        if not isinstance(error, LongtailError):
            _log.error("a completion failed", exc_info=error)
            error = CompletionError("this completion failed; see the server's log")
        self._notify(self._listener.on_request_failed, state, error)

    def _notify(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "the loop is set before the thread starts"
        with suppress(RuntimeError):  # the loop is closed, so all callers have gone
            self._loop.call_soon_threadsafe(callback, *arguments)


def _withdraw(engine: RolloutEngine, request_id: str) -> None:
    """Abort a request without using its text."""
    try:
        engine.abort(request_id)
    except Exception as error:  # noqa: BLE001 - raised while decoding its text; it is aborted
        _log.error("a completion failed while it was aborted", exc_info=error)
