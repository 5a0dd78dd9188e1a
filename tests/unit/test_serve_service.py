"""One engine, many callers: who is taken on, who is told, what is left behind (nothing)."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from longtail.errors import OverloadedError, RequestError, UnavailableError
from longtail.sampling import noise_key
from longtail.serve.generation import Chunk, Generation
from longtail.serve.service import Service
from longtail.types import FinishReason, Request, SamplingParams
from serving import LIMITS, FailingEngine, HeldEngine, is_free, make_engine, make_service


def ask(seed: int = 0, max_tokens: int = 8, prompt: tuple[int, ...] = (7, 8, 9)) -> Request:
    return Request(
        request_id="",
        prompt_tokens=prompt,
        noise_key=noise_key(seed),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


@asynccontextmanager
async def at_work(service: Service) -> Any:
    service.start()
    try:
        yield service
    finally:
        await service.stop()


async def read(generation: Generation) -> list[Chunk]:
    async with generation:
        return [chunk async for chunk in generation]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_every_choice_ends_once_and_nothing_is_left_behind() -> None:
    engine = make_engine()

    async def test() -> None:
        async with at_work(make_service(engine)) as service:
            calls = [service.submit([ask(seed, 5 + seed), ask(seed + 10, 3)]) for seed in range(4)]
            for seed, chunks in enumerate(await asyncio.gather(*map(read, calls))):
                endings = {p.choice: p.ending for p in chunks if p.ending is not None}
                assert len([p for p in chunks if p.ending]) == 2
                for choice, asked in ((0, 5 + seed), (1, 3)):
                    tokens = [t for p in chunks if p.choice == choice for t in p.tokens]
                    assert len(tokens) == endings[choice].num_tokens == asked
                    assert endings[choice].reason is FinishReason.LENGTH
            assert service.num_running == service.num_waiting == 0
            assert is_free(engine)

    asyncio.run(test())


def test_more_than_may_wait_are_refused_and_taken_on_when_there_is_room() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with at_work(make_service(engine)) as service:
            calls = [service.submit([ask(seed)]) for seed in range(8)]
            assert (service.num_running, service.num_waiting) == (4, 4)
            with pytest.raises(OverloadedError, match="at most 4 are written at a time and 4 wait"):
                service.submit([ask()])
            assert 1 <= service.retry_after_s() <= 60
            gate.set()
            await asyncio.gather(*map(read, calls))
            await read(service.submit([ask()]))
            assert is_free(engine)

    asyncio.run(test())


def test_whoever_leaves_frees_what_was_written_for_them_at_once() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with at_work(make_service(engine)) as service:
            gate.set()
            async with service.submit([ask(1, 100), ask(2, 100)]) as generation:
                async for _ in generation:
                    break
            assert service.num_running == 0
            await until(lambda: is_free(engine))
            waiting = [service.submit([ask(seed)]) for seed in range(8)]
            async with waiting[-1]:
                pass  # it left before its turn
            assert len(await asyncio.gather(*map(read, waiting[:-1]))) == 7
            await until(lambda: is_free(engine))

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_engine_is_told_to_those_who_wait_and_those_who_come() -> None:
    async def test() -> None:
        async with at_work(make_service(make_engine(FailingEngine))) as service:
            calls = [service.submit([ask(seed, 50)]) for seed in range(6)]
            for told in await asyncio.gather(*map(read, calls), return_exceptions=True):
                assert isinstance(told, UnavailableError)
                assert "the engine failed" in str(told)
            with pytest.raises(UnavailableError, match="the engine failed"):
                service.submit([ask()])
            with pytest.raises(UnavailableError, match="the engine failed"):
                await service.probe()
            assert service.num_running == 0

    asyncio.run(test())


def test_an_engine_that_hangs_is_told_too() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        limits = dataclasses.replace(LIMITS, stall_s=0.05, health_s=0.05)
        async with at_work(make_service(engine, limits)) as service:
            with pytest.raises(UnavailableError, match="wrote no token in"):
                await service.probe()
            with pytest.raises(UnavailableError, match="hangs"):
                await read(service.submit([ask()]))
            with pytest.raises(UnavailableError, match="hangs"):
                service.submit([ask()])
            gate.set()

    asyncio.run(test())


def test_a_probe_has_a_token_written_and_is_content_with_anybodys() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with at_work(make_service(engine)) as service:
            probes = [asyncio.create_task(service.probe()) for _ in range(3)]
            await asyncio.sleep(0.05)
            assert not any(probe.done() for probe in probes)
            gate.set()
            await asyncio.gather(*probes)
            await until(lambda: is_free(engine))
            async with service.submit([ask(1, 100)]) as generation:
                await asyncio.gather(service.probe(), service.probe())
                assert generation.open

    asyncio.run(test())


def test_draining_finishes_what_can_be_finished() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with at_work(make_service(engine)) as service:
            gate.set()
            reading = asyncio.create_task(read(service.submit([ask(1, 20)])))
            await service.drain(20.0)
            chunks = await reading
            assert chunks[-1].ending is not None
            with pytest.raises(UnavailableError, match="shutting down"):
                service.submit([ask()])

    asyncio.run(test())


def test_draining_gives_up_what_takes_too_long() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with at_work(make_service(engine)) as service:
            reading = asyncio.create_task(read(service.submit([ask(1, 20)])))
            await service.drain(0.05)
            with pytest.raises(UnavailableError, match="shutting down"):
                await reading
            gate.set()
        assert is_free(engine)

    asyncio.run(test())


def test_stopping_in_the_middle_leaves_nothing_behind() -> None:
    engine = make_engine()

    async def test() -> None:
        async with at_work(make_service(engine)) as service:
            reading = [asyncio.create_task(read(service.submit([ask(s, 100)]))) for s in range(6)]
            await until(lambda: engine.num_unfinished > 0)
        told = await asyncio.gather(*reading, return_exceptions=True)
        assert all(isinstance(each, UnavailableError) for each in told)

    asyncio.run(test())
    assert is_free(engine)


def test_what_the_engine_refuses_is_told_to_its_caller_alone() -> None:
    engine = make_engine()

    async def test() -> None:
        async with at_work(make_service(engine)) as service:
            good, bad = service.submit([ask()]), service.submit([ask(), ask(prompt=(10**6,))])
            with pytest.raises(RequestError, match="holds token 1000000"):
                await read(bad)
            assert (await read(good))[-1].ending is not None
            await until(lambda: is_free(engine))

    asyncio.run(test())
