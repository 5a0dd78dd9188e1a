"""A soak of the server: requests good and bad, callers that hang up; nothing may be left behind.

Every seed is asked for alone first. Then, of every hundred requests, some sixty want such a text
again, at once or as a stream, half of them under extreme sampling; twenty hang up somewhere on the
way, in the middle of their body, too; twenty are no proper request. More come at a time than may
wait, so some are refused and asked again. What is promised, and told one by one: every good request
is answered with a whole text, that of its seed alone; every bad one with a 4xx that says why;
nothing with a 5xx but 503; memory is flat over the last half; and at the end all KV is free.
"""

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, final

from longtail.bench.serve.client import PATH, Answer, ask
from longtail.bench.serve.hostile import BAD, SAMPLINGS
from longtail.serve.server import ModelServer, running
from longtail.system import machine

_SEEDS = 20
_PATIENCE_S = 30.0
_ENOUGH = 1000
"""Requests from which memory is judged: before, caches and allocators are still filling."""
_FLAT_SHARE, _FLAT_MB = 0.01, 4.0
"""Growth from the third to the last quarter that counts as none; an allocator is never still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a soak found.

    Example: Soaked(num_requests=100, seconds=2.0, num_whole=60, num_left=20, num_refused=20,
                    num_asked_again=7, statuses={200: 60, 400: 20, 429: 7}, faults={},
                    is_kv_free=True, rss_mb=(300.0, 301.0, 301.0, 301.0))
    """

    num_requests: int
    seconds: float
    num_whole: int
    """Answered with the whole text of their seed."""
    num_left: int
    """Whose callers hung up."""
    num_refused: int
    """Bad, and told so with a 4xx in the envelope."""
    num_asked_again: int
    """Times that a good one was told 429."""
    statuses: dict[int, int]
    """Answers by their status."""
    faults: dict[str, int]
    """Whatever else happened, and how often; there must be nothing."""
    is_kv_free: bool
    rss_mb: tuple[float, float, float, float]
    """Mean resident memory of this process in each quarter of the requests; 0 where unknown."""

    @property
    def promises(self) -> dict[str, bool | None]:
        """Tell of each promise whether it held; None: too few requests to tell."""
        answered = self.num_whole + self.num_left + self.num_refused
        third, last = self.rss_mb[2:]
        flat = last - third <= max(_FLAT_SHARE * third, _FLAT_MB)
        return {
            "no 5xx but 503": all(status < 500 or status == 503 for status in self.statuses),
            "texts unchanged alone and under load": _OTHER_TEXT not in self.faults,
            "all answered as they should be": not self.faults and answered == self.num_requests,
            "memory flat over the last half": flat if self.num_requests >= _ENOUGH else None,
            "all KV free at the end": self.is_kv_free,
        }

    @property
    def is_clean(self) -> bool:
        """Tell whether no promise was broken."""
        return False not in self.promises.values()

    def numbers(self) -> dict[str, Any]:
        """Return everything for JSON."""
        told = {"promises": self.promises, "is_clean": self.is_clean}
        return {"bench": "serve soak", **asdict(self), **told}


_OTHER_TEXT = "a seed was answered with another text"


@final
class _Soak:
    """The callers."""

    def __init__(self, port: int, model: str, seed: int, max_tokens: int) -> None:
        self._port, self._model, self._max_tokens = port, model, max_tokens
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self._texts: dict[int, str] = {}

    async def begin(self) -> None:
        """Have every seed's text written alone."""
        for seed in range(_SEEDS):
            await self._good(seed, self._body(seed, stream=False))
        self.counts.clear()

    async def call(self) -> None:
        """Make one request of some kind."""
        kind = self._rng.choices(("whole", "stream", "leave", "bad"), (4, 2, 2, 2))[0]
        if kind == "bad":
            await self._bad()
            return
        seed = self._rng.randrange(_SEEDS)
        body = self._body(seed, stream=self._rng.random() < 0.5 or kind == "stream")
        if kind == "leave":
            await asyncio.wait_for(self._leave(body), _PATIENCE_S)
            self.counts["left"] += 1
            return
        await self._good(seed, body)

    def _body(self, seed: int, *, stream: bool) -> bytes:
        asked = {
            "model": self._model,
            "prompt": f"{seed}+{seed}=",
            "seed": seed,
            "max_tokens": self._max_tokens,
            "stream": stream,
            **SAMPLINGS[seed % len(SAMPLINGS)],
        }
        return json.dumps(asked).encode()

    async def _ask(self, body: bytes) -> Answer:
        answer = await asyncio.wait_for(ask(self._port, body, path=PATH), _PATIENCE_S)
        self.statuses[answer.status] += 1
        return answer

    async def _good(self, seed: int, body: bytes) -> None:
        while (answer := await self._ask(body)).status == 429:
            self.counts["again"] += 1
            await asyncio.sleep(0.02)
        if answer.status != 200 or not answer.is_whole:
            self.faults[f"a good request was answered {answer.status}"] += 1
        elif self._texts.setdefault(seed, answer.text) != answer.text:
            self.faults[_OTHER_TEXT] += 1
        else:
            self.counts["whole"] += 1

    async def _leave(self, body: bytes) -> None:
        after = self._rng.choice((None, 0, 1, 300, 700))
        if after is not None:
            await ask(self._port, body, leave_after=after)
            return
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body))
        writer.write(body[: len(body) // 2])
        await writer.drain()
        writer.close()

    async def _bad(self) -> None:
        raw, status = self._rng.choice(BAD)
        answer = await self._ask(raw.replace(b"MODEL", self._model.encode()))
        if answer.status == status and json.loads(answer.text)["error"]["message"]:
            self.counts["refused"] += 1
        else:
            self.faults[f"{raw[:60].decode('latin-1')} was answered {answer.status}"] += 1


def soak(
    served: ModelServer,
    model: str,
    num_requests: int,
    *,
    callers: int,
    max_tokens: int,
    seed: int = 0,
) -> Soaked:
    """Let so many callers at a time make so many requests of a server that is started for it."""
    began = time.perf_counter()
    quarters: tuple[list[float], ...] = ([], [], [], [])
    with running(served) as port:
        calls = _Soak(port, model, seed, max_tokens)
        numbers = iter(range(num_requests))

        async def caller() -> None:
            for number in numbers:  # all callers count together
                await calls.call()
                quarters[4 * number // num_requests].append(_rss_mb())

        async def everybody() -> None:
            await calls.begin()
            await asyncio.gather(*(caller() for _ in range(callers)))

        asyncio.run(everybody())
    usage = served.service.kv_usage()
    first, second, third, last = (
        round(statistics.mean(each), 1) if each else 0.0 for each in quarters
    )
    return Soaked(
        num_requests=num_requests,
        seconds=round(time.perf_counter() - began, 2),
        num_whole=calls.counts["whole"],
        num_left=calls.counts["left"],
        num_refused=calls.counts["refused"],
        num_asked_again=calls.counts["again"],
        statuses=dict(calls.statuses),
        faults=dict(calls.faults),
        is_kv_free=usage.free == usage.total,
        rss_mb=(first, second, third, last),
    )


def _rss_mb() -> float:
    return (machine.resident_bytes() or 0) / 2**20
