"""A soak test of the server: valid and invalid requests, and clients that disconnect.

Each seed's text is first requested alone. Then, of every hundred requests, about sixty ask for such
a text again, at once or as a stream, half of them with extreme sampling; twenty disconnect, some in
the middle of their body; twenty are invalid. More arrive at a time than the queue holds, so some
are refused with 429 and repeated. The checks are those of `SoakResult.promises`.
"""

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, final

from longtail.bench.serve.client import PATH, Answer, head, request
from longtail.bench.serve.hostile import BAD, SAMPLINGS
from longtail.serve.server import ModelServer, running
from longtail.system import machine

_SEEDS = 20
_TIMEOUT_S = 30.0
_ENOUGH = 1000
"""Requests from which memory is judged: before, caches and allocators are still filling."""
_FLAT_SHARE, _FLAT_MB = 0.01, 4.0
"""Growth from the third to the last quarter that counts as none."""
_OTHER_TEXT = "a seed was answered with another text"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """Counts of a soak test.

    Example: SoakResult(num_requests=100, seconds=2.0, num_whole=60, num_left=20, num_refused=20,
                        num_asked_again=7, statuses={200: 60, 400: 20, 429: 7}, faults={},
                        is_kv_free=True, rss_mb=(300.0, 301.0, 301.0, 301.0))
    """

    num_requests: int
    seconds: float
    num_whole: int
    """Requests answered with the whole text of their seed."""
    num_left: int
    """Requests whose clients disconnected."""
    num_refused: int
    """Invalid requests answered with a 4xx and a message."""
    num_asked_again: int
    """Valid requests answered with 429, and repeated."""
    statuses: dict[int, int]
    """Number of answers by status."""
    faults: dict[str, int]
    """Number of wrong answers by kind; it must be empty."""
    is_kv_free: bool
    rss_mb: tuple[float, float, float, float]
    """Mean resident memory of this process in each quarter of the requests; 0 where unknown."""

    @property
    def promises(self) -> dict[str, bool | None]:
        """Whether each check passed; None with too few requests for a judgement."""
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
        """Whether no check failed."""
        return False not in self.promises.values()

    def numbers(self) -> dict[str, Any]:
        """Return everything for JSON."""
        judged = {"promises": self.promises, "is_clean": self.is_clean}
        return {"bench": "serve soak", **asdict(self), **judged}


@final
class _Client:
    """The requests of all clients, and counts of their answers."""

    def __init__(self, port: int, model: str, seed: int, max_tokens: int) -> None:
        self._port, self._model, self._max_tokens = port, model, max_tokens
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self._texts: dict[int, str] = {}

    async def request_each_seed(self) -> None:
        """Request every seed's text alone."""
        for seed in range(_SEEDS):
            await self._valid(seed, self._body(seed, stream=False))
        self.counts.clear()

    async def request_any(self) -> None:
        """Make one request of a random kind."""
        kind = self._rng.choices(("whole", "stream", "leave", "bad"), (4, 2, 2, 2))[0]
        if kind == "bad":
            await self._invalid()
            return
        seed = self._rng.randrange(_SEEDS)
        body = self._body(seed, stream=self._rng.random() < 0.5 or kind == "stream")
        if kind == "leave":
            await asyncio.wait_for(self._disconnect(body), _TIMEOUT_S)
            self.counts["left"] += 1
            return
        await self._valid(seed, body)

    def _body(self, seed: int, *, stream: bool) -> bytes:
        fields = {
            "model": self._model,
            "prompt": f"{seed}+{seed}=",
            "seed": seed,
            "max_tokens": self._max_tokens,
            "stream": stream,
            **SAMPLINGS[seed % len(SAMPLINGS)],
        }
        return json.dumps(fields).encode()

    async def _request(self, body: bytes) -> Answer:
        answer = await asyncio.wait_for(request(self._port, body), _TIMEOUT_S)
        self.statuses[answer.status] += 1
        return answer

    async def _valid(self, seed: int, body: bytes) -> None:
        while (answer := await self._request(body)).status == 429:
            self.counts["again"] += 1
            await asyncio.sleep(0.02)
        if answer.status != 200 or not answer.is_whole:
            self.faults[f"a good request was answered {answer.status}"] += 1
        elif self._texts.setdefault(seed, answer.text) != answer.text:
            self.faults[_OTHER_TEXT] += 1
        else:
            self.counts["whole"] += 1

    async def _disconnect(self, body: bytes) -> None:
        after = self._rng.choice((None, 0, 1, 300, 700))
        if after is not None:
            await request(self._port, body, leave_after=after)
            return
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head(PATH, len(body)) + body[: len(body) // 2])
        await writer.drain()
        writer.close()

    async def _invalid(self) -> None:
        raw, status = self._rng.choice(BAD)
        answer = await self._request(raw.replace(b"MODEL", self._model.encode()))
        if answer.status == status and json.loads(answer.text)["error"]["message"]:
            self.counts["refused"] += 1
        else:
            self.faults[f"{raw[:60].decode('latin-1')} was answered {answer.status}"] += 1


def soak(
    served: ModelServer, model: str, num_requests: int, *, clients: int, max_tokens: int
) -> SoakResult:
    """Start the server and let `clients` at a time make `num_requests` requests."""
    began = time.perf_counter()
    quarters: tuple[list[float], ...] = ([], [], [], [])
    with running(served) as port:
        client = _Client(port, model, 0, max_tokens)
        numbers = iter(range(num_requests))

        async def work() -> None:
            for number in numbers:  # shared by all clients
                await client.request_any()
                rss_mb = (machine.resident_bytes() or 0) / 2**20
                quarters[4 * number // num_requests].append(rss_mb)

        async def everything() -> None:
            await client.request_each_seed()
            await asyncio.gather(*(work() for _ in range(clients)))

        asyncio.run(everything())
    usage = served.service.kv_usage()
    first, second, third, last = (
        round(statistics.mean(each), 1) if each else 0.0 for each in quarters
    )
    return SoakResult(
        num_requests=num_requests,
        seconds=round(time.perf_counter() - began, 2),
        num_whole=client.counts["whole"],
        num_left=client.counts["left"],
        num_refused=client.counts["refused"],
        num_asked_again=client.counts["again"],
        statuses=dict(client.statuses),
        faults=dict(client.faults),
        is_kv_free=usage.free == usage.total,
        rss_mb=(first, second, third, last),
    )
