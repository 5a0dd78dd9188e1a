"""A soak of the server: requests good and bad, callers that hang up; nothing may be left behind.

Of every hundred requests some forty want a text at once, twenty a stream, twenty hang up somewhere
on the way, twenty are no proper request. More come at a time than may wait, so some are refused and
asked again. What is held: every good request is answered with a whole text, the same seed with the
same text; every bad one with a 4xx that says why; and at the end all KV is free.
"""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, final

from longtail import machine
from longtail.bench.serve_client import PATH, ask
from longtail.serve.server import Served, running

_SEEDS = 40
_PATIENCE_S = 30.0
_BAD: tuple[tuple[bytes, int], ...] = (
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"\xff\x00", 400),
    (b'{"model": 7}', 400),
    (b'{"model": "another", "prompt": "a"}', 404),
    (b'{"model": "MODEL", "prompt": ""}', 400),
    (b'{"model": "MODEL", "prompt": "a", "n": 0}', 400),
    (b'{"model": "MODEL", "prompt": "a", "n": 1000}', 400),
    (b'{"model": "MODEL", "prompt": "a", "temperature": NaN}', 400),
    (b'{"model": "MODEL", "prompt": "a", "max_tokens": 1000000}', 400),
    (b'{"model": "MODEL", "prompt": [1, -2]}', 400),
    (b'{"model": "MODEL", "prompt": "a", "tools": [1]}', 400),
    (b'{"model": "MODEL", "prompt": "a", "seed": 1e99}', 400),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a soak found.

    Example: Soaked(num_requests=100, seconds=2.0, num_whole=60, num_left=20, num_refused=20,
                    num_asked_again=7, faults={}, is_kv_free=True, rss_mb=(300.0, 301.0))
    """

    num_requests: int
    seconds: float
    num_whole: int
    """Answered with a whole text."""
    num_left: int
    """Whose callers hung up."""
    num_refused: int
    """Bad, and told so with a 4xx in the envelope."""
    num_asked_again: int
    """Times that a good one was told 429."""
    faults: dict[str, int]
    """Whatever else happened, and how often; there must be nothing."""
    is_kv_free: bool
    rss_mb: tuple[float, float]
    """Of this process, after a tenth of the requests and at the end; 0 where that is unknown."""

    @property
    def is_clean(self) -> bool:
        """Tell whether nothing was lost, unclear or left behind."""
        answered = self.num_whole + self.num_left + self.num_refused
        return not self.faults and self.is_kv_free and answered == self.num_requests

    def numbers(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {"bench": "serve soak", **asdict(self), "is_clean": self.is_clean}


@final
class _Soak:
    """The callers."""

    def __init__(self, port: int, model: str, seed: int, max_tokens: int) -> None:
        self._port, self._model, self._max_tokens = port, model, max_tokens
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._texts: dict[int, str] = {}

    async def call(self) -> None:
        """Make one request of some kind."""
        kind = self._rng.choices(("whole", "stream", "leave", "bad"), (4, 2, 2, 2))[0]
        if kind == "bad":
            await self._bad()
            return
        seed = self._rng.randrange(_SEEDS)
        body = json.dumps(self._body(seed, stream=self._rng.random() < 0.5 or kind == "stream"))
        if kind == "leave":
            await asyncio.wait_for(self._leave(body.encode()), _PATIENCE_S)
            self.counts["left"] += 1
            return
        await self._good(seed, body.encode())

    def _body(self, seed: int, *, stream: bool) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": f"{seed}+{seed}=",
            "seed": seed,
            "max_tokens": self._max_tokens,
            "stream": stream,
        }

    async def _good(self, seed: int, body: bytes) -> None:
        while True:
            answer = await asyncio.wait_for(ask(self._port, body), _PATIENCE_S)
            if answer.status != 429:
                break
            self.counts["again"] += 1
            await asyncio.sleep(0.02)
        if answer.status != 200 or not answer.is_whole:
            self.faults[f"a good request was answered {answer.status}"] += 1
        elif self._texts.setdefault(seed, answer.text) != answer.text:
            self.faults["a seed was answered with another text"] += 1
        else:
            self.counts["whole"] += 1

    async def _leave(self, body: bytes) -> None:
        await ask(self._port, body, leave_after=self._rng.choice((0, 1, 300, 700)))

    async def _bad(self) -> None:
        raw, status = self._rng.choice(_BAD)
        body = raw.replace(b"MODEL", self._model.encode())
        answer = await asyncio.wait_for(ask(self._port, body, path=PATH), _PATIENCE_S)
        if answer.status == status and json.loads(answer.text)["error"]["message"]:
            self.counts["refused"] += 1
        else:
            self.faults[f"{raw.decode('latin-1')} was answered {answer.status}"] += 1


def soak(
    served: Served, model: str, num_requests: int, *, callers: int, max_tokens: int, seed: int = 0
) -> Soaked:
    """Let so many callers at a time make so many requests of a server that is started for it."""
    began = time.perf_counter()
    with running(served) as port:
        calls = _Soak(port, model, seed, max_tokens)
        numbers, early = iter(range(num_requests)), _rss_mb()

        async def caller() -> None:
            nonlocal early
            for number in numbers:  # all callers count together
                await calls.call()
                if number == num_requests // 10:
                    early = _rss_mb()

        async def everybody() -> None:
            await asyncio.gather(*(caller() for _ in range(callers)))

        asyncio.run(everybody())
    usage = served.service.kv_usage()
    return Soaked(
        num_requests=num_requests,
        seconds=round(time.perf_counter() - began, 2),
        num_whole=calls.counts["whole"],
        num_left=calls.counts["left"],
        num_refused=calls.counts["refused"],
        num_asked_again=calls.counts["again"],
        faults=dict(calls.faults),
        is_kv_free=usage.free == usage.total,
        rss_mb=(early, _rss_mb()),
    )


def _rss_mb() -> float:
    return round((machine.resident_bytes() or 0) / 2**20, 1)
