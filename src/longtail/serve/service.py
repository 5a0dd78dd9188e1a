"""An engine that many callers share: it runs in one thread, callers live in one event loop.

    loop    submit --Generation--> caller       close: the caller went away    drain, stop
              | request               ^ Chunk      |                              |
              v                       |            v                              v
    thread  inbox --> submit, step, step, step, abort, step ...  (the engine is touched only here)

Each side owns its own state: the loop knows what was taken on and not yet ended, the thread
(`engine_thread`) what the engine has. Between them go calls, through a queue one way and
`call_soon_threadsafe` the other. Nobody waits for a caller that reads slowly: what was written is
kept for it, and there is no more of it than `max_tokens`. It knows nothing of HTTP.

An engine that fails is replaced, and the completions in progress are written again, unseen by their
callers. Those that were running when it failed are suspects, and suspects run one at a time, beside
the other completions. A suspect under which a second engine fails gets an error; the others get
their texts. When an engine hangs or cannot be made, all waiting and later callers get an error.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from longtail.engine.engine import RolloutEngine
from longtail.engine.kv.cache import KVUsage
from longtail.engine.text import Decode, Reader
from longtail.errors import CompletionError, LongtailError, OverloadedError, UnavailableError
from longtail.serve.engine_thread import EngineThread, Listener
from longtail.serve.metrics import ServeMetrics
from longtail.serve.options import Limits
from longtail.serve.stream import Chunk, Generation
from longtail.serve.ticket import Ticket
from longtail.types import Request

_log = logging.getLogger("longtail")
_WATCH_S = 0.5
_JOIN_S = 10.0
_STOPPING = "the server is shutting down"
_TWICE = "the engine failed twice while it wrote this completion; see the server's log"
_MOST_FAILURES = 2
"""Engines that may fail over one completion."""


@final
class Service(Listener):
    """Lifecycle: start -> submit, probe, ... -> drain -> stop; all on one event loop."""

    def __init__(
        self,
        make_engine: Callable[[], RolloutEngine],
        decode: Decode,
        limits: Limits,
        metrics: ServeMetrics,
    ) -> None:
        self._make_engine, self._decode = make_engine, decode
        self._limits, self._metrics = limits, metrics
        self._thread = EngineThread(make_engine, self, metrics)
        self.vocab_size = self._thread.open().model.config.vocab_size
        """Of the model that is served."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._tickets: dict[str, Ticket] = {}
        """Completions taken on and not yet ended, the oldest first."""
        self._suspects: deque[Ticket] = deque()
        """To be written one after the other; the first of them is."""
        self._closed: str | None = None
        """Why nobody is taken on any more."""
        self._probes: set[asyncio.Future[None]] = set()
        self._seconds = 1.0
        """That a completion takes, a running mean."""
        metrics.watch("longtail_running_completions", "Being written.", lambda: self.num_running)
        metrics.watch("longtail_waiting_completions", "Waiting.", lambda: self.num_waiting)
        metrics.watch("longtail_kv_free_tokens", "KV that is free.", lambda: self.kv_usage().free)
        metrics.watch("longtail_kv_total_tokens", "All KV.", lambda: self.kv_usage().total)

    @property
    def num_running(self) -> int:
        """Completions that the engine may be writing."""
        return min(len(self._tickets), self._limits.max_running)

    @property
    def num_waiting(self) -> int:
        """Completions that wait for a place."""
        return len(self._tickets) - self.num_running

    def kv_usage(self) -> KVUsage:
        """Count tokens of KV memory, as of the last step."""
        return self._thread.usage

    def start(self) -> None:
        """Begin to serve the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._watcher = self._loop.create_task(self._watch())
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> Generation:
        """Take on the completions of one call; they get ids of the service's own.

        Those of equal prompts share its KV. Raises OverloadedError when too many wait,
        UnavailableError when nobody is taken on.
        """
        if self._closed is not None:
            raise UnavailableError(self._closed)
        taken = len(self._tickets)
        if taken + len(requests) > self._limits.max_running + self._limits.max_queue:
            raise OverloadedError(
                f"{taken} completions are in progress or wait and {len(requests)} more "
                f"were asked for; at most {self._limits.max_running} are written at a time and "
                f"{self._limits.max_queue} wait: ask again later"
            )
        if not self._tickets:
            self._thread.progress = time.monotonic()
        number = next(self._numbers)
        names = [f"{number}-{choice}" for choice in range(len(requests))]
        generation = Generation(names, self._leave)
        groups: dict[tuple[int, ...], str] = {}
        tickets = []
        for choice, (name, asked) in enumerate(zip(names, requests, strict=True)):
            group = groups.setdefault(asked.prompt_tokens, name)
            request = replace(asked, request_id=name, group_id=group)
            reader = Reader(self._decode, asked.sampling.stop)
            tickets.append(Ticket(request, generation, choice, reader, time.monotonic()))
            self._metrics.admitted(len(asked.prompt_tokens))
        self._tickets.update((ticket.name, ticket) for ticket in tickets)
        self._thread.begin(tickets)
        return generation

    def retry_after_s(self) -> int:
        """Estimate when a place will be free: as long as one of those at work takes to end."""
        share = self._seconds / self._limits.max_running
        return min(max(math.ceil(share * (1 + self.num_waiting)), 1), 60)

    async def probe(self) -> None:
        """Wait for a token: of a completion in progress, else of one made up for the purpose.

        Raises UnavailableError when none comes in `health_s`.
        """
        if self._closed is not None:
            raise UnavailableError(self._closed)
        assert self._loop is not None, "start it first"
        told: asyncio.Future[None] = self._loop.create_future()
        self._probes.add(told)
        self._thread.probe()
        try:
            await asyncio.wait_for(told, self._limits.health_s)
        except TimeoutError as error:
            raise UnavailableError(
                f"the engine wrote no token in {self._limits.health_s:g} s"
            ) from error
        finally:
            self._probes.discard(told)

    async def drain(self, seconds: float) -> None:
        """Take nobody on any more, and give those in progress so long; then give them up."""
        self._closed = self._closed or _STOPPING
        deadline = time.monotonic() + seconds
        while self._tickets and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._give_up(_STOPPING)

    async def stop(self) -> None:
        """Give everything up and end the thread; KV is free then, unless the engine hangs."""
        self._give_up(_STOPPING)
        self._thread.stop()
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _leave(self, generation: Generation) -> None:
        """Give up what did not end; called by whoever held the generation."""
        if generation.open:
            self._thread.withdraw(tuple(generation.open))
        for name in tuple(generation.open):
            self._close(self._tickets[name])

    def _close(self, ticket: Ticket) -> None:
        """Count a completion as ended, however it did."""
        del self._tickets[ticket.name]
        ticket.generation.open.discard(ticket.name)
        if ticket in self._suspects:
            is_next = ticket is self._suspects[0]
            self._suspects.remove(ticket)
            if is_next and self._suspects:
                self._thread.begin([self._suspects[0]])

    def _give_up(self, reason: str) -> None:
        """Take nobody on any more, and tell all who wait why nothing comes."""
        self._closed = self._closed or reason
        self._suspects.clear()
        for generation in {ticket.generation for ticket in self._tickets.values()}:
            generation.news.put_nowait(UnavailableError(reason))
            self._leave(generation)
        self._fail_probes(reason)

    def _fail_probes(self, reason: str) -> None:
        for told in self._probes:
            if not told.done():
                told.set_exception(UnavailableError(reason))

    async def _watch(self) -> None:
        """Notice an engine that does not come back from a step."""
        while self._closed is None:
            await asyncio.sleep(min(_WATCH_S, self._limits.stall_s))
            idle_s = time.monotonic() - self._thread.progress
            if self._tickets and idle_s > self._limits.stall_s:
                _log.error("the engine made no step in %g s: giving up", self._limits.stall_s)
                self._give_up("the engine hangs; the server must be restarted")

    # What the engine's thread tells, see `engine_thread.Listener`.

    def on_chunks(self, chunks: Sequence[tuple[Ticket, Chunk]]) -> None:
        """Hand out what a step wrote."""
        for ticket, chunk in chunks:
            if ticket.name not in self._tickets:
                continue  # its caller has left
            ticket.generation.news.put_nowait(chunk)
            if chunk.ending is not None:
                self._close(ticket)
                self._seconds += 0.1 * (time.monotonic() - ticket.came - self._seconds)
        for told in self._probes:
            if not told.done():
                told.set_result(None)

    def on_failed(self, ticket: Ticket, error: LongtailError) -> None:
        """Tell the caller of one completion."""
        if ticket.name in self._tickets:
            self._metrics.failed()
            ticket.generation.news.put_nowait(error)
            self._close(ticket)

    def on_ended(self, running: frozenset[str] | None) -> None:
        """Put another engine in the place of the one that failed."""
        if self._closed is not None:
            self._give_up(self._closed)
            return
        if running is None:
            self._give_up("the engine failed and cannot be started again; see the server's log")
            return
        _log.error("the engine failed and is started again; its completions are written again")
        self._metrics.restarted()
        self._fail_probes("the engine failed and is being started again")
        self._thread = EngineThread(self._make_engine, self, self._metrics, before=self._thread)
        self._thread.start()
        suspects = running & self._tickets.keys() or self._tickets.keys()
        self._suspects.clear()
        for ticket in tuple(self._tickets.values()):
            ticket.num_failures += ticket.name in suspects
            if ticket.num_failures == _MOST_FAILURES:
                self.on_failed(ticket, CompletionError(_TWICE))
            elif ticket.num_failures:
                self._suspects.append(ticket)
            else:
                self._thread.begin([ticket])
        if self._suspects:
            self._thread.begin([self._suspects[0]])
