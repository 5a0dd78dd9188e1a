"""An engine that is replaced by a larger one when requests do not fit it."""

import math
from collections.abc import Callable, Sequence
from typing import final

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.text import Decode
from longtail.types import Request

_STEP_TOKENS = 512
_LENGTH_STEP = 256
"""Tokens by which the longest text grows; a new engine measures its costs again."""


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

    def ready(self, requests: Sequence[Request]) -> RolloutEngine:
        """Return an idle engine with room for the requests."""
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
