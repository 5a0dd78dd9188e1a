"""An engine that many callers share: it runs in one thread, callers live in one event loop.

    loop    submit --Generation--> caller       close: the caller went away    drain, stop
              | request               ^ Chunk      |                              |
              v                       |            v                              v
    thread  inbox --> submit, step, step, step, abort, step ...  (the engine is touched only here)

Each side owns its own state: the loop counts what was taken on and not yet ended, the thread knows
what the engine has. Between them go calls, through a queue one way and `call_soon_threadsafe` the
other. Nobody waits for a caller that reads slowly: what was written is kept for it, and there is no
more of it than `max_tokens`. When the engine fails or hangs, whoever waits is told, and so is
everybody who comes later. It knows nothing of HTTP.
"""

import asyncio
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

from longtail.engine.engine import RolloutEngine
from longtail.engine.kv_cache import KVUsage
from longtail.engine.text import Decode, Reader
from longtail.errors import OverloadedError, RequestError, UnavailableError
from longtail.serve.generation import Chunk, Ending, Generation
from longtail.serve.metrics import ServeMetrics
from longtail.serve.setting import Limits
from longtail.types import Completion, Request, SamplingParams

_log = logging.getLogger("longtail")
_WATCH_S = 0.5
_PROBE = "health"
_JOIN_S = 10.0
_STOPPING = "the server is shutting down"


@dataclass(slots=True)
class _Ticket:
    """One completion as the engine's thread knows it."""

    request: Request
    generation: Generation
    choice: int
    reader: Reader
    came: float
    first: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of the step at hand."""
    logprobs: list[float] = field(default_factory=list)


@final
class Service:
    """Lifecycle: start -> submit, probe, ... -> drain -> stop; all on one event loop."""

    def __init__(
        self, engine: RolloutEngine, decode: Decode, limits: Limits, metrics: ServeMetrics
    ) -> None:
        self._engine, self._decode = engine, decode
        self._limits, self._metrics = limits, metrics
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="longtail-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        # The loop's:
        self._open: set[Generation] = set()
        self._num_open = 0
        self._closed: str | None = None
        """Why nobody is taken on any more."""
        self._probes: set[asyncio.Future[None]] = set()
        self._seconds = 1.0
        """That a completion takes, a running mean."""
        # The thread's:
        self._tickets: dict[str, _Ticket] = {}
        self._progress = time.monotonic()
        """When the engine last finished a step, or had nothing to do."""
        self._usage = engine.kv_usage()
        """A copy for the loop: the engine's own may change while it is read."""
        metrics.watch("longtail_running_completions", "Being written.", lambda: self.num_running)
        metrics.watch("longtail_waiting_completions", "Waiting.", lambda: self.num_waiting)
        metrics.watch("longtail_kv_free_tokens", "KV that is free.", lambda: self.kv_usage().free)
        metrics.watch("longtail_kv_total_tokens", "All KV.", lambda: self.kv_usage().total)

    @property
    def num_running(self) -> int:
        """Completions that the engine may be writing."""
        return min(self._num_open, self._limits.max_running)

    @property
    def num_waiting(self) -> int:
        """Completions that wait for a place."""
        return self._num_open - self.num_running

    def kv_usage(self) -> KVUsage:
        """Count tokens of KV memory, as of the last step."""
        return self._usage

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
        room = self._limits.max_running + self._limits.max_queue - self._num_open
        if len(requests) > room:
            raise OverloadedError(
                f"{self._num_open} completions are in progress or wait and {len(requests)} more "
                f"were asked for; at most {self._limits.max_running} are written at a time and "
                f"{self._limits.max_queue} wait: ask again later"
            )
        if not self._num_open:
            self._progress = time.monotonic()
        number = next(self._numbers)
        names = [f"{number}-{choice}" for choice in range(len(requests))]
        generation = Generation(names, self._leave)
        groups: dict[tuple[int, ...], str] = {}
        tickets = []
        for choice, (name, asked) in enumerate(zip(names, requests, strict=True)):
            group = groups.setdefault(asked.prompt_tokens, name)
            request = replace(asked, request_id=name, group_id=group)
            reader = Reader(self._decode, asked.sampling.stop)
            tickets.append(_Ticket(request, generation, choice, reader, time.monotonic()))
            self._metrics.admitted(len(asked.prompt_tokens))
        self._open.add(generation)
        self._num_open += len(names)
        self._inbox.put(partial(self._begin, tickets))
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
        self._inbox.put(self._begin_probe)
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
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._give_up(_STOPPING)

    async def stop(self) -> None:
        """Give everything up and end the thread; KV is free then, unless the engine hangs."""
        self._give_up(_STOPPING)
        self._inbox.put(None)
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _leave(self, generation: Generation) -> None:
        """Give up what did not end; called by whoever held the generation."""
        self._open.discard(generation)
        self._num_open -= len(generation.open)
        if generation.open:
            self._inbox.put(partial(self._withdraw, tuple(generation.open)))
            generation.open.clear()

    def _give_up(self, reason: str) -> None:
        """Take nobody on any more, and tell all who wait why nothing comes."""
        self._closed = self._closed or reason
        for generation in list(self._open):
            generation.news.put_nowait(UnavailableError(reason))
            self._leave(generation)
        for told in self._probes:
            if not told.done():
                told.set_exception(UnavailableError(reason))

    async def _watch(self) -> None:
        """Notice an engine that does not come back from a step."""
        while self._closed is None:
            await asyncio.sleep(min(_WATCH_S, self._limits.stall_s))
            if self._num_open and time.monotonic() - self._progress > self._limits.stall_s:
                _log.error("the engine made no step in %g s: giving up", self._limits.stall_s)
                self._give_up("the engine hangs; the server must be restarted")

    def _arrive(self, chunks: Sequence[tuple[_Ticket, Chunk]]) -> None:
        """Hand out what a step wrote."""
        for ticket, chunk in chunks:
            if ticket.request.request_id not in ticket.generation.open:
                continue  # its caller has left
            ticket.generation.news.put_nowait(chunk)
            if chunk.ending is not None:
                ticket.generation.open.discard(ticket.request.request_id)
                self._num_open -= 1
                self._seconds += 0.1 * (time.monotonic() - ticket.came - self._seconds)
                if not ticket.generation.open:
                    self._open.discard(ticket.generation)
        for told in self._probes:
            if not told.done():
                told.set_result(None)

    # From here on: the engine's thread.

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException:
            self._tell(self._give_up, "the engine failed; see the server's log")
            raise
        self._withdraw([name for name, _, _ in self._engine.unfinished()])
        self._usage = self._engine.kv_usage()

    def _turn(self) -> bool:
        """Do what was asked for, then one step; False when told to stop."""
        wait = self._engine.num_unfinished == 0
        while wait or not self._inbox.empty():
            todo = self._inbox.get()
            if todo is None:
                return False
            self._progress = time.monotonic()
            todo()
            wait = False
        self._usage = self._engine.kv_usage()
        if self._engine.num_unfinished:
            self._step()
            self._progress = time.monotonic()
        return True

    def _begin(self, tickets: Sequence[_Ticket]) -> None:
        try:
            for ticket in tickets:
                self._engine.submit(ticket.request)
                self._tickets[ticket.request.request_id] = ticket
        except RequestError as error:  # whoever submits should have known
            self._tell(tickets[0].generation.news.put_nowait, error)

    def _begin_probe(self) -> None:
        """Have a token written, if nothing is in progress that writes one anyway."""
        if not self._engine.num_unfinished:
            sampling = SamplingParams(temperature=0.0, max_tokens=1)
            self._engine.submit(
                Request(request_id=_PROBE, prompt_tokens=(0,), noise_key=0, sampling=sampling)
            )

    def _withdraw(self, names: Sequence[str]) -> None:
        for name in names:
            self._tickets.pop(name, None)
            if self._engine.is_unfinished(name):  # else it ended while its caller was leaving
                self._engine.abort(name)
                self._metrics.aborted()

    def _step(self) -> None:
        report = self._engine.step()
        self._usage = self._engine.kv_usage()  # before anybody hears that a completion ended
        self._metrics.stepped(report)
        now = time.monotonic()
        touched: dict[str, _Ticket] = {}
        for each in report.emitted:
            ticket = self._tickets.get(each.request_id)
            if ticket is not None:
                touched[each.request_id] = ticket
                ticket.tokens.append(each.token)
                ticket.logprobs.append(each.logprob)
        for verified in report.verified:
            ticket = self._tickets.get(verified.request_id)
            if ticket is not None:
                ticket.num_verified += 1
                ticket.num_drafted += verified.num_drafted
                ticket.num_accepted += verified.num_accepted
        ended = {completion.request_id: completion for completion in report.finished}
        chunks = [
            (ticket, self._chunk(ticket, ended.get(name), now)) for name, ticket in touched.items()
        ]
        if report.emitted:
            self._tell(self._arrive, chunks)

    def _chunk(self, ticket: _Ticket, completion: Completion | None, now: float) -> Chunk:
        if not ticket.first:
            ticket.first = now
            self._metrics.began(now - ticket.came)
        text, ending = ticket.reader.feed(ticket.tokens), None
        if completion is not None:
            del self._tickets[completion.request_id]
            text += ticket.reader.finish(completion.text)
            num_tokens = len(completion.tokens)
            ending = Ending(
                reason=completion.finish_reason,
                num_tokens=num_tokens,
                num_drafted=ticket.num_drafted,
                num_accepted=ticket.num_accepted,
                num_verified=ticket.num_verified,
            )
            reason = completion.finish_reason.value
            self._metrics.finished(reason, now - ticket.came, now - ticket.first, num_tokens)
        chunk = Chunk(
            choice=ticket.choice,
            text=text,
            tokens=tuple(ticket.tokens),
            logprobs=tuple(ticket.logprobs),
            ending=ending,
        )
        ticket.tokens.clear()
        ticket.logprobs.clear()
        return chunk

    def _tell(self, listener: Callable[[Any], None], news: object) -> None:
        assert self._loop is not None, "the thread begins after the loop is known"
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(listener, news)
