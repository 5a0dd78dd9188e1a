"""One engine in one thread, which alone touches it, until it is told to stop or the engine fails.

Calls come in through a queue; what they lead to goes to a `Listener` in the event loop.
"""

import abc
import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

from longtail.engine.engine import RolloutEngine
from longtail.engine.kv.cache import KVUsage
from longtail.engine.report import Emitted
from longtail.errors import CompletionError, LongtailError
from longtail.serve.metrics import ServeMetrics
from longtail.serve.stream import Chunk
from longtail.serve.ticket import Ticket
from longtail.types import Completion, Request, SamplingParams

_log = logging.getLogger("longtail")
_PROBE = "health"
_NOTHING = KVUsage(free=0, owned=0, total=0)


class Listener(abc.ABC):
    """Told in the event loop, in order, what happens in the thread."""

    @abc.abstractmethod
    def on_chunks(self, chunks: Sequence[tuple[Ticket, Chunk]]) -> None:
        """Take what a step wrote; nothing, where it wrote for a probe alone."""

    @abc.abstractmethod
    def on_failed(self, ticket: Ticket, error: LongtailError) -> None:
        """Take note that this one completion cannot be written; the engine goes on."""

    @abc.abstractmethod
    def on_ended(self, running: frozenset[str] | None) -> None:
        """Take note that the engine failed while it wrote these, and that the thread ends.

        None: it could not be made.
        """


@final
class EngineThread:
    """Lifecycle: (open ->) start -> begin, withdraw, probe, ... -> stop -> join."""

    def __init__(
        self,
        make_engine: Callable[[], RolloutEngine],
        listener: Listener,
        metrics: ServeMetrics,
        before: "EngineThread | None" = None,
    ) -> None:
        self._make_engine, self._listener, self._metrics = make_engine, listener, metrics
        self._before = before
        """Holds memory that the new engine may need, until it has ended."""
        self._engine: RolloutEngine | None = None
        self._inbox: queue.SimpleQueue[Callable[[RolloutEngine], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="longtail-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: dict[str, Ticket] = {}
        self.usage = _NOTHING
        """KV as of the last step; the engine's own may change while it is read."""
        self.progress = time.monotonic()
        """When the engine last finished a step, or had nothing to do."""

    def open(self) -> RolloutEngine:
        """Make the engine, unless it is made."""
        if self._engine is None:
            self._engine = self._make_engine()
            self.usage = self._engine.kv_usage()
            self.progress = time.monotonic()
        return self._engine

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def begin(self, tickets: Sequence[Ticket]) -> None:
        """Have completions of one call written; those of equal prompts share its KV."""
        self._inbox.put(partial(self._begin, tickets))

    def withdraw(self, names: Sequence[str]) -> None:
        """Give completions up."""
        self._inbox.put(partial(self._withdraw, names))

    def probe(self) -> None:
        """Have a token written, if nothing is in progress that writes one anyway."""
        self._inbox.put(self._probe)

    def stop(self) -> None:
        """End after the present step; what is in progress is given up."""
        self._inbox.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end, which a hanging engine puts off."""
        self._thread.join(seconds)

    # From here on: the thread's.

    def _main(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        engine = None
        try:
            engine = self.open()
            while self._turn(engine):
                pass
        except BaseException:
            self._engine = None
            running = None if engine is None else engine.running()
            self._tell(self._listener.on_ended, running)
            raise
        self._withdraw([name for name, _, _ in engine.unfinished()], engine)
        self.usage = engine.kv_usage()

    def _turn(self, engine: RolloutEngine) -> bool:
        """Do what was asked for, then one step; False when told to stop."""
        wait = engine.num_unfinished == 0
        while wait or not self._inbox.empty():
            todo = self._inbox.get()
            if todo is None:
                return False
            self.progress = time.monotonic()
            todo(engine)
            wait = False
        self.usage = engine.kv_usage()
        if engine.num_unfinished:
            self._step(engine)
            self.progress = time.monotonic()
        return True

    def _begin(self, tickets: Sequence[Ticket], engine: RolloutEngine) -> None:
        for ticket in tickets:
            try:
                engine.submit(ticket.request)
            except Exception as error:  # noqa: BLE001 - it ends this request alone
                self._fail(engine, ticket, error)
                continue
            ticket.begin_again()
            self._tickets[ticket.name] = ticket

    def _probe(self, engine: RolloutEngine) -> None:
        if not engine.num_unfinished:
            sampling = SamplingParams(temperature=0.0, max_tokens=1)
            engine.submit(
                Request(request_id=_PROBE, prompt_tokens=(0,), noise_key=0, sampling=sampling)
            )

    def _withdraw(self, names: Sequence[str], engine: RolloutEngine) -> None:
        for name in names:
            self._tickets.pop(name, None)
            if engine.is_unfinished(name):  # else it ended while its caller was leaving
                self._metrics.aborted()
                try:
                    engine.abort(name)
                except Exception as error:  # noqa: BLE001 - the request has left the engine
                    _log.error("a completion failed as it was given up", exc_info=error)

    def _step(self, engine: RolloutEngine) -> None:
        report = engine.step()
        self.usage = engine.kv_usage()  # before anybody hears that a completion ended
        self._metrics.stepped(report)
        now = time.monotonic()
        for verified in report.verified:
            if verified.request_id in self._tickets:
                self._tickets[verified.request_id].verified(verified)
        emitted: dict[str, list[Emitted]] = {}
        for each in report.emitted:
            if each.request_id in self._tickets:
                emitted.setdefault(each.request_id, []).append(each)
        ended = {completion.request_id: completion for completion in report.finished}
        chunks: list[tuple[Ticket, Chunk]] = []
        try:
            for name, news in emitted.items():
                self._hand_out(engine, chunks, self._tickets[name], news, ended.get(name), now)
        finally:
            if report.emitted:
                self._tell(self._listener.on_chunks, chunks)
        for failure in report.failed:
            if failure.request_id in self._tickets:
                self._fail(engine, self._tickets[failure.request_id], failure.error)

    def _hand_out(
        self,
        engine: RolloutEngine,
        chunks: list[tuple[Ticket, Chunk]],
        ticket: Ticket,
        emitted: Sequence[Emitted],
        completion: Completion | None,
        now: float,
    ) -> None:
        if not ticket.first:
            ticket.first = now
            self._metrics.began(now - ticket.came)
        try:
            chunk = ticket.chunk(emitted, completion)
        except Exception as error:  # noqa: BLE001 - it ends this request alone
            self._fail(engine, ticket, error)
            return
        if chunk is not None:
            chunks.append((ticket, chunk))
        if completion is not None:
            del self._tickets[ticket.name]
            reason = completion.finish_reason.value
            seconds, after_first_s = now - ticket.came, now - ticket.first
            self._metrics.finished(reason, seconds, after_first_s, len(completion.tokens))

    def _fail(self, engine: RolloutEngine, ticket: Ticket, error: Exception) -> None:
        """End one completion with what it raised."""
        self._withdraw([ticket.name], engine)
        if not isinstance(error, LongtailError):
            _log.error("a completion failed", exc_info=error)
            error = CompletionError("this completion failed; see the server's log")
        self._tell(self._listener.on_failed, ticket, error)

    def _tell(self, listener: Callable[..., None], *news: Any) -> None:
        assert self._loop is not None, "the thread begins after the loop is known"
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(listener, *news)
