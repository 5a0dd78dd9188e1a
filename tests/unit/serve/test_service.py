"""One engine and many callers: accepted and refused requests, failures, and what remains."""

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
from longtail.serve.service import Service
from longtail.serve.stream import Chunk, CompletionStream, RequestState
from longtail.types import FinishReason, Request, SamplingParams
from support.serving import (
    LIMITS,
    FailingEngine,
    HeldEngine,
    PoisonedEngine,
    is_free,
    make_engine,
    make_service,
    shared_tokenizer,
)


def request(seed: int = 0, max_tokens: int = 8, prompt: tuple[int, ...] = (7, 8, 9)) -> Request:
    return Request(
        request_id="",
        prompt_tokens=prompt,
        noise_key=noise_key(seed),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


@asynccontextmanager
async def started(service: Service) -> Any:
    service.start()
    try:
        yield service
    finally:
        await service.stop()


async def read(stream: CompletionStream) -> list[Chunk]:
    async with stream:
        return [chunk async for chunk in stream]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_every_choice_ends_once_and_frees_its_kv() -> None:
    engine = make_engine()

    async def test() -> None:
        async with started(make_service(engine)) as service:
            calls = [
                service.submit([request(seed, 5 + seed), request(seed + 10, 3)])
                for seed in range(4)
            ]
            for seed, chunks in enumerate(await asyncio.gather(*map(read, calls))):
                endings = {p.choice: p.ending for p in chunks if p.ending is not None}
                assert len([p for p in chunks if p.ending]) == 2
                for choice, num_tokens in ((0, 5 + seed), (1, 3)):
                    tokens = [t for p in chunks if p.choice == choice for t in p.tokens]
                    assert len(tokens) == endings[choice].num_tokens == num_tokens
                    assert endings[choice].reason is FinishReason.LENGTH
            assert service.num_running == service.num_waiting == 0
            assert is_free(engine)

    asyncio.run(test())


def test_requests_beyond_the_queue_are_refused_until_there_is_room() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with started(make_service(engine)) as service:
            calls = [service.submit([request(seed)]) for seed in range(8)]
            assert (service.num_running, service.num_waiting) == (4, 4)
            with pytest.raises(OverloadedError, match="at most 4 run at a time and 4 wait"):
                service.submit([request()])
            assert 1 <= service.retry_after_s() <= 60
            gate.set()
            await asyncio.gather(*map(read, calls))
            await read(service.submit([request()]))
            assert is_free(engine)

    asyncio.run(test())


def test_a_caller_that_leaves_frees_its_kv_at_once() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with started(make_service(engine)) as service:
            gate.set()
            async with service.submit([request(1, 100), request(2, 100)]) as stream:
                async for _ in stream:
                    break
            assert service.num_running == 0
            await until(lambda: is_free(engine))
            waiting = [service.submit([request(seed)]) for seed in range(8)]
            async with waiting[-1]:
                pass  # its caller leaves before it runs
            assert len(await asyncio.gather(*map(read, waiting[:-1]))) == 7
            await until(lambda: is_free(engine))

    asyncio.run(test())


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def answers(service: Service, requests: list[Request]) -> list[Any]:
    """Submit each request as a call of its own and return all results or errors."""
    calls = [service.submit([request]) for request in requests]
    return await asyncio.gather(*map(read, calls), return_exceptions=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_is_replaced_and_no_text_changes() -> None:
    requests = [request(seed, 20 + seed) for seed in range(7)]
    last = make_engine()

    async def test() -> None:
        async with started(make_service(make_engine())) as service:
            expected = await answers(service, requests)
        service = make_service(make_engine(FailingEngine), then=[make_engine(), last])
        async with started(service):
            found = await answers(service, requests)
            await service.probe()
            for before, after in zip(expected, found, strict=True):
                assert tokens_of(after) == tokens_of(before)
                assert text_of(after) == text_of(before)
                assert after[-1].ending == before[-1].ending
            assert service.num_running == service.num_waiting == 0

    asyncio.run(test())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_fails_two_engines_gets_an_error_and_all_others_their_texts() -> None:
    poisoned = request(1, 50, prompt=(PoisonedEngine.poison,))
    good = [request(seed, 30) for seed in range(6)]
    engines = [make_engine(PoisonedEngine) for _ in range(4)]

    async def test() -> None:
        async with started(make_service(make_engine())) as service:
            expected = [tokens_of(chunks) for chunks in await answers(service, good)]
        service = make_service(engines[0], then=engines[1:])
        async with started(service):
            *before, error, after = await answers(service, [*good[:-1], poisoned, good[-1]])
            assert isinstance(error, CompletionError)
            assert "the engine failed twice while it generated this completion" in str(error)
            assert [tokens_of(chunks) for chunks in (*before, after)] == expected
            await service.probe()
            (again,) = await answers(service, good[:1])
            assert tokens_of(again) == expected[0]

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_caller_may_leave_while_its_request_waits_to_be_generated_again() -> None:
    engines = [make_engine(PoisonedEngine) for _ in range(3)]
    poisoned = request(1, 50, prompt=(PoisonedEngine.poison,))

    async def test() -> None:
        service = make_service(engines[0], then=engines[1:])
        async with started(service):
            leaving = [service.submit([poisoned]), service.submit([request(2, 100)])]
            staying = service.submit([request(3, 30)])
            with pytest.raises(CompletionError):
                await read(leaving[0])  # two engines failed on it; the others are suspects
            async with leaving[1]:
                pass
            assert len(tokens_of(await read(staying))) == 30
            assert service.num_running == 0

    asyncio.run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_and_later_callers_get_an_error_if_the_engine_cannot_be_made_again() -> None:
    async def test() -> None:
        async with started(make_service(make_engine(FailingEngine))) as service:
            calls = [service.submit([request(seed, 50)]) for seed in range(6)]
            for error in await asyncio.gather(*map(read, calls), return_exceptions=True):
                assert isinstance(error, UnavailableError)
                assert "cannot be restarted" in str(error)
            with pytest.raises(UnavailableError, match="the engine failed"):
                service.submit([request()])
            with pytest.raises(UnavailableError, match="the engine failed"):
                await service.probe()
            assert service.num_running == 0

    asyncio.run(test())


def test_a_text_that_cannot_be_decoded_fails_its_own_completion_alone() -> None:
    engine = make_engine()

    def decode(tokens: Sequence[int]) -> str:
        if threading.current_thread().name == "longtail-engine" and len(tokens) > 3:
            raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
        return shared_tokenizer().decode(tokens)

    async def test() -> None:
        service = Service(lambda: engine, decode, LIMITS)
        async with started(service):
            bad, good = await answers(service, [request(1, 20), request(2, 3)])
            assert isinstance(bad, CompletionError)
            assert len(tokens_of(good)) == 3
            await until(lambda: is_free(engine))

    asyncio.run(test())


def test_a_regenerated_text_that_differs_from_the_sent_one_is_an_error() -> None:
    stream = CompletionStream(["a"], lambda _: None)
    state = RequestState(request(), stream, 0, Reader(shared_tokenizer().decode, ()), 0.0)
    first, second, other = (Emitted(request_id="a", token=t, logprob=-1.0) for t in (7, 8, 9))
    sent = state.chunk([first, second], None)
    assert sent is not None
    assert sent.tokens == (7, 8)
    state.restart()
    assert state.chunk([first], None) is None
    more = state.chunk([second, other], None)
    assert more is not None
    assert more.tokens == (9,)
    state.restart()
    with pytest.raises(CompletionError, match="generated a different text"):
        state.chunk([first, other], None)


def test_callers_get_an_error_if_the_engine_hangs() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        limits = dataclasses.replace(LIMITS, stall_s=0.05, health_s=0.05)
        async with started(make_service(engine, limits)) as service:
            with pytest.raises(UnavailableError, match="generated no token within"):
                await service.probe()
            with pytest.raises(UnavailableError, match="hangs"):
                await read(service.submit([request()]))
            with pytest.raises(UnavailableError, match="hangs"):
                service.submit([request()])
            gate.set()

    asyncio.run(test())


def test_a_probe_waits_for_a_token_of_any_request() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with started(make_service(engine)) as service:
            probes = [asyncio.create_task(service.probe()) for _ in range(3)]
            await asyncio.sleep(0.05)
            assert not any(probe.done() for probe in probes)
            gate.set()
            await asyncio.gather(*probes)
            await until(lambda: is_free(engine))
            async with service.submit([request(1, 100)]) as stream:
                await asyncio.gather(service.probe(), service.probe())
                assert stream.unfinished

    asyncio.run(test())


def test_draining_finishes_requests_in_time() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with started(make_service(engine)) as service:
            gate.set()
            reading = asyncio.create_task(read(service.submit([request(1, 20)])))
            await service.drain(20.0)
            chunks = await reading
            assert chunks[-1].ending is not None
            with pytest.raises(UnavailableError, match="shutting down"):
                service.submit([request()])

    asyncio.run(test())


def test_draining_aborts_requests_that_take_too_long() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)

    async def test() -> None:
        gate = engine.hold()
        async with started(make_service(engine)) as service:
            reading = asyncio.create_task(read(service.submit([request(1, 20)])))
            await service.drain(0.05)
            with pytest.raises(UnavailableError, match="shutting down"):
                await reading
            gate.set()
        assert is_free(engine)

    asyncio.run(test())


def test_stopping_during_generation_frees_the_kv() -> None:
    engine = make_engine()

    async def test() -> None:
        async with started(make_service(engine)) as service:
            reading = [
                asyncio.create_task(read(service.submit([request(s, 100)]))) for s in range(6)
            ]
            await until(lambda: engine.num_unfinished > 0)
        errors = await asyncio.gather(*reading, return_exceptions=True)
        assert all(isinstance(each, UnavailableError) for each in errors)

    asyncio.run(test())
    assert is_free(engine)


def test_a_request_that_the_engine_refuses_fails_alone() -> None:
    engine = make_engine()

    async def test() -> None:
        async with started(make_service(engine)) as service:
            good, bad = (
                service.submit([request()]),
                service.submit([request(), request(prompt=(10**6,))]),
            )
            with pytest.raises(RequestError, match="holds token 1000000"):
                await read(bad)
            assert (await read(good))[-1].ending is not None
            await until(lambda: is_free(engine))

    asyncio.run(test())
