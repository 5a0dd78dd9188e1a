"""One engine, many callers: who is taken on, who is told, what is left behind (nothing)."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from longtail.engine.report import Emitted
from longtail.engine.text import Reader
from longtail.errors import CompletionError, OverloadedError, RequestError, UnavailableError
from longtail.sampling import noise_key
from longtail.serve.metrics import ServeMetrics
from longtail.serve.service import Service
from longtail.serve.stream import Chunk, Generation
from longtail.serve.ticket import Ticket
from longtail.types import FinishReason, Request, SamplingParams
from support.serving import (
    LIMITS,
    FailingEngine,
    HeldEngine,
    PoisonedEngine,
    is_free,
    make_engine,
    make_service,
    the_tokenizer,
)


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


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def answers(service: Service, requests: list[Request]) -> list[Any]:
    """What each request gets, asked at once; requests are of calls of their own."""
    calls = [service.submit([request]) for request in requests]
    return await asyncio.gather(*map(read, calls), return_exceptions=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_is_replaced_and_nobody_hears_of_it() -> None:
    """It ended for good: whoever waited and whoever came was told to go away."""
    requests = [ask(seed, 20 + seed) for seed in range(7)]
    last = make_engine()

    async def test() -> None:
        async with at_work(make_service(make_engine())) as service:
            undisturbed = await answers(service, requests)
        service = make_service(make_engine(FailingEngine), then=[make_engine(), last])
        async with at_work(service):
            disturbed = await answers(service, requests)
            await service.probe()
            for was, now in zip(undisturbed, disturbed, strict=True):
                assert tokens_of(now) == tokens_of(was)
                assert text_of(now) == text_of(was)
                assert now[-1].ending == was[-1].ending
            assert service.num_running == service.num_waiting == 0

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_breaks_every_engine_is_told_and_all_others_get_their_texts() -> None:
    poisoned = ask(1, 50, prompt=(PoisonedEngine.poison,))
    good = [ask(seed, 30) for seed in range(6)]
    engines = [make_engine(PoisonedEngine) for _ in range(4)]

    async def test() -> None:
        async with at_work(make_service(make_engine())) as service:
            expected = [tokens_of(chunks) for chunks in await answers(service, good)]
        service = make_service(engines[0], then=engines[1:])
        async with at_work(service):
            *before, told, after = await answers(service, [*good[:-1], poisoned, good[-1]])
            assert isinstance(told, CompletionError)
            assert "the engine failed twice while it wrote this completion" in str(told)
            assert [tokens_of(chunks) for chunks in (*before, after)] == expected
            await service.probe()
            (again,) = await answers(service, good[:1])
            assert tokens_of(again) == expected[0]

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_caller_may_leave_while_its_completion_waits_to_be_written_again() -> None:
    engines = [make_engine(PoisonedEngine) for _ in range(3)]
    poisoned = ask(1, 50, prompt=(PoisonedEngine.poison,))

    async def test() -> None:
        service = make_service(engines[0], then=engines[1:])
        async with at_work(service):
            leaving = [service.submit([poisoned]), service.submit([ask(2, 100)])]
            staying = service.submit([ask(3, 30)])
            with pytest.raises(CompletionError):
                await read(leaving[0])  # two engines ended over it; the others are suspects
            async with leaving[1]:
                pass
            assert len(tokens_of(await read(staying))) == 30
            assert service.num_running == 0

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_be_made_again_is_told_to_those_who_wait_and_those_who_come() -> None:
    async def test() -> None:
        async with at_work(make_service(make_engine(FailingEngine))) as service:
            calls = [service.submit([ask(seed, 50)]) for seed in range(6)]
            for told in await asyncio.gather(*map(read, calls), return_exceptions=True):
                assert isinstance(told, UnavailableError)
                assert "cannot be started again" in str(told)
            with pytest.raises(UnavailableError, match="the engine failed"):
                service.submit([ask()])
            with pytest.raises(UnavailableError, match="the engine failed"):
                await service.probe()
            assert service.num_running == 0

    asyncio.run(test())


def test_a_text_that_cannot_be_decoded_ends_its_own_completion_alone() -> None:
    engine = make_engine()

    def decode(tokens: Sequence[int]) -> str:
        if threading.current_thread().name == "longtail-engine" and len(tokens) > 3:
            raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
        return the_tokenizer().decode(tokens)

    async def test() -> None:
        service = Service(lambda: engine, decode, LIMITS, ServeMetrics())
        async with at_work(service):
            bad, good = await answers(service, [ask(1, 20), ask(2, 3)])
            assert isinstance(bad, CompletionError)
            assert len(tokens_of(good)) == 3
            await until(lambda: is_free(engine))

    asyncio.run(test())


def test_a_text_that_becomes_another_when_it_is_written_again_is_not_continued() -> None:
    generation = Generation(["a"], lambda _: None)
    ticket = Ticket(ask(), generation, 0, Reader(the_tokenizer().decode, ()), 0.0)
    first, second, other = (Emitted(request_id="a", token=t, logprob=-1.0) for t in (7, 8, 9))
    told = ticket.chunk([first, second], None)
    assert told is not None
    assert told.tokens == (7, 8)
    ticket.begin_again()
    assert ticket.chunk([first], None) is None
    more = ticket.chunk([second, other], None)
    assert more is not None
    assert more.tokens == (9,)
    ticket.begin_again()
    with pytest.raises(CompletionError, match="wrote another text"):
        ticket.chunk([first, other], None)


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
