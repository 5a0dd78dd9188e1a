"""One engine for several calls, which may overlap: all are stepped together."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import final

from longtail.engine.engine import RolloutEngine
from longtail.generator import StepReport
from longtail.types import Request


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Requests that are run together."""

    names: frozenset[str]
    unread: deque[StepReport] = field(default_factory=deque)
    """Steps that other calls computed."""


@final
class SharedEngine:
    """An engine whose steps several calls share; `make` is called once, for the first requests."""

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        self._engine = cache(make)
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
            engine, call = self._engine(), _Call(frozenset(each.request_id for each in requests))
            for each in requests:
                engine.check(each)
            for each in requests:
                engine.submit(each)
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
                for name in filter(engine.is_unfinished, call.names):
                    engine.abort(name)

    def _next(self, call: _Call) -> StepReport | None:
        """Return the next step of a call, which may have to be computed; None at its end."""
        with self._lock:
            is_unfinished = self._engine().is_unfinished
            calls = [each for each in self._calls if any(map(is_unfinished, each.names))]
            if not call.unread and call in calls:
                report = self._engine().step()
                for each in calls:
                    each.unread.append(report)
            return call.unread.popleft() if call.unread else None
