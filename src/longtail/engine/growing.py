"""An engine that is replaced by a larger one when requests do not fit it, for several calls."""

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import final

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.text import Decode
from longtail.generator import StepReport
from longtail.types import Request

_STEP_TOKENS = 512
_LENGTH_STEP = 256
"""Tokens by which the longest text grows; a new engine measures its costs again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Requests that are run together; a later call may have another engine."""

    engine: RolloutEngine
    names: frozenset[str]
    unread: deque[StepReport] = field(default_factory=deque)
    """Steps that other calls computed."""

    def is_unfinished(self) -> bool:
        return any(map(self.engine.is_unfinished, self.names))


@final
class GrowingEngine:
    """An engine with room for the most requests and the longest text so far.

    `make` is called once, for the first requests. At most `max_running` requests run at once; texts
    have at most `max_len` tokens, prompts included.
    """

    def __init__(
        self,
        make: Callable[[EngineLimits], RolloutEngine],
        decode: Decode,
        *,
        max_running: int,
        max_len: int,
    ) -> None:
        self._make, self._decode = make, decode
        self._max_running, self._max_len = max_running, max_len
        self._running = self._length = 0
        self.present: RolloutEngine | None = None
        """The engine in use; None before the first `ready`."""
        self._lock = threading.RLock()
        self._calls: list[_Call] = []

    def run(
        self,
        requests: Sequence[Request],
        on_step: Callable[[StepReport], None] | None = None,
    ) -> Generator[StepReport]:
        """Yield steps until the requests are finished; if it is closed before, abort them.

        Calls may take turns, also in threads: a step advances the requests of all calls, which
        find it when they go on. Raises RequestError before any work, and the error of a request.
        """
        with self._lock:
            call = _Call(self.ready(requests), frozenset(each.request_id for each in requests))
            for each in requests:
                call.engine.check(each)
            for each in requests:
                call.engine.submit(each)
            self._calls.append(call)
        try:
            while (report := self._next(call)) is not None:
                report.raise_failure(call.names)
                if on_step is not None:
                    on_step(report)
                yield report
        finally:
            with self._lock:
                self._calls.remove(call)
                for name in filter(call.engine.is_unfinished, call.names):
                    call.engine.abort(name)

    def _next(self, call: _Call) -> StepReport | None:
        """Return the next step of a call, which may have to be computed; None at its end."""
        with self._lock:
            if not call.unread and call.is_unfinished():
                calls = [each for each in self._calls if each.engine is call.engine]
                calls = [each for each in calls if each.is_unfinished()]
                report = call.engine.step()
                for each in calls:
                    each.unread.append(report)
            return call.unread.popleft() if call.unread else None

    def ready(self, requests: Sequence[Request]) -> RolloutEngine:
        """Return an engine with room for the requests."""
        lengths = [len(each.prompt_tokens) + each.sampling.max_tokens for each in requests]
        running, length = min(max(len(requests), 1), self._max_running), max(lengths, default=1)
        engine = self.present
        if engine is not None and running <= self._running and length <= self._length:
            return engine
        rounded = min(math.ceil(length / _LENGTH_STEP) * _LENGTH_STEP, self._max_len)
        self._running = max(running, self._running)
        self._length = max(length, rounded, self._length)
        limits = EngineLimits(
            max_running=self._running,
            max_step_tokens=max(_STEP_TOKENS, self._max_running),
            max_len=self._length,
        )
        if engine is None:
            self.present = self._make(limits)
        else:
            speculation, version = engine.speculation, engine.policy_version
            engine.speculate(None)
            self.present = RolloutEngine(
                engine.model, self._decode, limits, policy_version=version, speculation=speculation
            )
        return self.present
