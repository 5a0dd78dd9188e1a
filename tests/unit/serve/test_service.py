"""One engine and many callers: accepted and refused requests, failures, and what remains."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from longtail.engine.report import Emitted
from longtail.errors import OverloadedError, RequestError, UnavailableError
from longtail.sampling import noise_key
from longtail.serve.service import CompletionStream, Event, Service
from longtail.types import Completion, Request, SamplingParams
from support.serving import OPTIONS, FailingEngine, HeldEngine, is_free, make_engine


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


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@pytest.fixture
def held() -> HeldEngine:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)
    return engine


def test_every_choice_ends_once_and_frees_its_kv() -> None:
    engine = make_engine()

    async def test() -> None:
        async with started(engine) as service:
            calls = [
                service.submit([request(seed, 5 + seed), request(seed + 10, 3)])
                for seed in range(4)
            ]
            for seed, events in enumerate(await asyncio.gather(*map(read, calls))):
                for choice, num_tokens in ((0, 5 + seed), (1, 3)):
                    own = [event for index, event in events if index == choice]
                    (end,) = [each for each in own if isinstance(each, Completion)]
                    tokens = [each.token for each in own if isinstance(each, Emitted)]
                    assert tuple(tokens) == end.tokens
                    assert len(tokens) == num_tokens
            assert service.num_running == service.num_waiting == 0
            assert is_free(engine)

    run(test)


def test_requests_beyond_the_queue_are_refused_until_there_is_room(held: HeldEngine) -> None:
    async def test() -> None:
        gate = held.hold()
        async with started(held) as service:
            calls = [service.submit([request(seed)]) for seed in range(8)]
            assert (service.num_running, service.num_waiting) == (4, 4)
            with pytest.raises(OverloadedError, match="at most 4 run at a time and 4 wait"):
                service.submit([request()])
            gate.set()
            await asyncio.gather(*map(read, calls))
            await read(service.submit([request()]))
            assert is_free(held)

    run(test)


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

    run(test)


def test_all_callers_get_an_error_if_the_engine_fails() -> None:
    async def test() -> None:
        async with started(make_engine(FailingEngine)) as service:
            calls = [service.submit([request(seed, 50)]) for seed in range(6)]
            for error in await asyncio.gather(*map(read, calls), return_exceptions=True):
                assert isinstance(error, UnavailableError)
            for refused in (lambda: service.submit([request()]), service.check):
                with pytest.raises(UnavailableError, match="the engine failed"):
                    refused()
            assert service.num_running == 0

    run(test)


def test_a_request_that_the_engine_can_never_serve_is_refused_at_once() -> None:
    engine = make_engine()

    async def test() -> None:
        async with started(engine) as service:
            good = service.submit([request()])
            with pytest.raises(RequestError, match="holds token 1000000"):
                service.submit([request(), request(prompt=(10**6,))])
            assert isinstance((await read(good))[-1][1], Completion)
            assert is_free(engine)

    run(test)


def test_draining_finishes_requests_in_time_and_aborts_the_others(held: HeldEngine) -> None:
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
        gate.clear()

    run(test)

    async def late() -> None:
        engine = make_engine(HeldEngine)
        assert isinstance(engine, HeldEngine)
        gate = engine.hold()
        async with started(engine) as service:
            reading = asyncio.create_task(read(service.submit([request(1, 20)])))
            await service.drain(0.05)
            with pytest.raises(UnavailableError, match="shutting down"):
                await reading
            gate.set()
        assert is_free(engine)

    run(late)
