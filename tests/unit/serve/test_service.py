"""One engine and many callers: accepted and refused requests, failures, and what remains."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from longtail.errors import UnavailableError
from longtail.sampling import noise_key
from longtail.serve.service import CompletionStream, Event, Service
from longtail.types import Completion, Request, SamplingParams
from support.serving import OPTIONS, HeldEngine, is_free, make_engine


def request(seed: int = 0, max_tokens: int = 8, prompt: tuple[int, ...] = (7, 8, 9)) -> Request:
    return Request(
        request_id="",
        prompt_tokens=prompt,
        noise_key=noise_key(seed),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


@asynccontextmanager
async def started(engine: Any) -> AsyncIterator[Service]:
    service = Service(engine, OPTIONS)
    service.start()
    try:
        yield service
    finally:
        await service.stop()


async def read(stream: CompletionStream) -> list[tuple[int, Event]]:
    try:
        return [(choice, event) async for choice, events in stream for event in events]
    finally:
        stream.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture
def held() -> HeldEngine:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)
    return engine


def test_a_caller_that_leaves_frees_its_kv_at_once(held: HeldEngine) -> None:
    async def test() -> None:
        gate = held.hold()
        async with started(held) as service:
            gate.set()
            stream = service.submit([request(1, 100), request(2, 100)])
            await anext(aiter(stream))
            stream.close()
            assert service.num_running == 0
            await until(lambda: is_free(held))
            waiting = [service.submit([request(seed)]) for seed in range(8)]
            waiting[-1].close()  # its caller leaves before it runs
            assert len(await asyncio.gather(*map(read, waiting[:-1]))) == 7
            await until(lambda: is_free(held))

    asyncio.run(test())


def test_draining_refuses_new_requests_and_finishes_the_others(held: HeldEngine) -> None:
    async def test() -> None:
        gate = held.hold()
        async with started(held) as service:
            reading = asyncio.create_task(read(service.submit([request(1, 20)])))
            draining = asyncio.create_task(service.drain(20.0))
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError, match="shutting down"):
                service.submit([request()])
            gate.set()
            assert isinstance((await reading)[-1][1], Completion)
            await draining

    asyncio.run(test())
