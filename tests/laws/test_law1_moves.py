"""Law 1: a text that moves between generators is the same text, wherever it is cut.

Exact in float64, and to the bit in float32 on native kernels. Each worker has a drafter of its own
kind, which reads the text anew. The interface as a whole, vLLM's, too: `support.contract`.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.history import HistoryDrafter
from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import RequestError
from longtail.generator import Generator
from longtail.model.transformer import Transformer
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, FinishReason, Request
from support.contract import wander
from support.eagle_requests import make_layer, text
from support.engine_requests import request_of
from support.tiny_models import NATIVE_DTYPES, tiny_model

LIMITS = EngineLimits(max_running=8, max_step_tokens=40, max_len=64)
CRAMPED = EngineLimits(max_running=4, max_step_tokens=11, max_len=64, kv_tokens=96)
STOPS = tuple(range(0, 128, 25))


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def drafter(kind: str, model: Transformer) -> Drafter:
    if kind == "history":
        return HistoryDrafter()
    layer = make_layer(model, kind)
    return RidgeDrafter(layer, model) if kind == "ridge" else EagleDrafter(layer, model)


def engine(dtype: torch.dtype, limits: EngineLimits, kind: str | None) -> RolloutEngine:
    model = tiny_model("llama", dtype=dtype, head_dim=16)
    found = RolloutEngine(model, decode, limits)
    if kind is not None:
        found.speculate(Speculation.fixed(drafter(kind, model), Strategy(depth=3)))
    return found


def ask(plain: Generator) -> tuple[list[Request], list[Completion]]:
    """Return requests of every kind and end, and what they write: a stop string in mid-text."""
    kinds: tuple[dict[str, object], ...] = (
        {"stop_token_ids": STOPS},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 9, "stop_token_ids": STOPS},
        {"max_tokens": 12},
    )
    asked = [
        request_of(
            f"r{number}",
            text(4 + 17 * (number % 3), seed=number % 3),
            noise_key(8, number),
            f"g{number % 3}" if number < 6 else "",
            **{"max_tokens": 24, **kinds[number % 5]},
        )
        for number in range(10)
    ]
    for number in (1, 6):  # a string of three tokens ends these
        (done,) = plain.generate([asked[number]])
        sampling = replace(asked[number].sampling, stop=(decode(done.tokens[5:8]),))
        asked[number] = replace(asked[number], sampling=sampling)
    return asked, plain.generate(asked)


def cut(done: Completion, length: int) -> Completion:
    """Return the beginning of a text as a generator that gives it up returns it."""
    return replace(
        done,
        tokens=done.tokens[:length],
        logprobs=done.logprobs[:length],
        finish_reason=FinishReason.ABORT,
    )


@pytest.mark.parametrize("dtype", [torch.float64, *NATIVE_DTYPES])
def test_a_text_is_the_same_wherever_it_is_cut(dtype: torch.dtype) -> None:
    """Short and long, before an end, too; then it moves on between drafters, with neighbours."""
    asked, plain = ask(engine(dtype, LIMITS, None))
    assert {each.finish_reason for each in plain} == {FinishReason.STOP, FinishReason.LENGTH}
    assert sum(decode(each.tokens) != each.text for each in plain) >= 2, "ends of strings"
    workers = [
        engine(dtype, limits, kind)
        for kind, limits in (("ridge", LIMITS), ("eagle3", CRAMPED), ("history", LIMITS))
    ]
    tolerance, every = (1e-12, 4) if dtype is torch.float64 else (0.0, 2)
    for length in range(0, 24, every):
        begun = [cut(each, length) for each in plain if length < len(each.tokens)]
        company = [workers[length % 3], workers[(length + 1 + length // 3 % 2) % 3]]
        found = wander(company, asked, begun, seed=length)
        assert all(each.kv_usage().free == each.kv_usage().total for each in workers)
        for one, other in zip(found, plain, strict=True):
            assert replace(one, logprobs=()) == replace(other, logprobs=()), length
            assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance, rel=0.0), length


def test_only_the_beginning_of_the_same_request_is_continued() -> None:
    worker = engine(torch.float64, LIMITS, None)
    asked, plain = ask(worker)
    begun = cut(plain[0], 1)
    for other in (
        replace(begun, request_id="r1"),
        replace(begun, policy_version=1),
        replace(begun, finish_reason=FinishReason.LENGTH),
    ):
        with pytest.raises(RequestError, match=r"'r0' cannot continue .* submit it without"):
            worker.submit(asked[0], other)
    assert worker.num_unfinished == 0
    emitted: list[int] = []
    (done,) = worker.generate(
        asked[:1], lambda step: emitted.extend(each.token for each in step.emitted), [begun]
    )
    assert (done.tokens, done.text) == (plain[0].tokens, plain[0].text)
    assert tuple(emitted) == done.tokens[1:], "only what is written here is reported"
