"""Requests of the engine's tests, and the features of a text by their definition."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Family, Transformer
from longtail.sampling import noise_key
from longtail.speculation.drafter import Draftable, Observed, Taps
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, Request, SamplingParams

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
TREE = Strategy(depth=5, width=3, size=8)
ROOMY = EngineLimits(max_running=8, max_step_tokens=200, max_len=64)
CROWDED = EngineLimits(max_running=5, max_step_tokens=40, max_len=64, kv_tokens=96)
TEMPLATE = tuple(range(100, 118))
"""Beginning of prompts that is long enough to be shared without a group."""


def make_requests(prompts: str = "apart", *, seed: int = 9, **sampling: object) -> list[Request]:
    """Prompts of 1, 14 and 27 tokens: all different, beginning `alike`, or equal in groups."""
    template = TEMPLATE if prompts == "alike" else ()
    return [
        Request(
            request_id=f"r{i}",
            prompt_tokens=(
                *template,
                *(
                    (5 * (i // 3) + 3 * j + (0 if prompts == "grouped" else i % 3)) % 128
                    for j in range(1 + 13 * (i // 3))
                ),
            ),
            noise_key=noise_key(seed, i),
            sampling=SamplingParams(**{"max_tokens": 14 + 2 * (i % 3), **sampling}),
            group_id=str(i // 3) if prompts == "grouped" else "",
        )
        for i in range(9)
    ]


def request_of(
    name: str, prompt: Iterable[int], key: int = 0, group: str = "", **sampling: Any
) -> Request:
    """Return a request; `sampling` are fields of its parameters."""
    return Request(
        request_id=name,
        prompt_tokens=tuple(prompt),
        noise_key=key,
        sampling=SamplingParams(**sampling),
        group_id=group,
    )


def known_texts(
    requests: Sequence[Request], done: Sequence[Completion]
) -> dict[str, tuple[int, ...]]:
    """Return prompt and completion of each request by its name."""
    pairs = zip(requests, done, strict=True)
    return {each.request_id: (*each.prompt_tokens, *one.tokens) for each, one in pairs}


def write(engine: RolloutEngine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """Return prompts and completions."""
    return list(known_texts(requests, engine.generate(requests)).values())


@torch.no_grad()
def features_of(model: Transformer, text: Sequence[int], taps: Taps) -> torch.Tensor:
    """Return the features of one packed pass over a whole text."""
    tokens, attention = torch.tensor(text), PackedAttention((0, len(text)))
    _, features = model.forward_with_features(tokens, torch.arange(len(text)), attention, taps)
    assert features is not None
    return features


def draftable(
    name: str,
    tokens: Sequence[int],
    prompt_len: int = 1,
    *,
    max_depth: int = 50,
    temperature: float = 1.0,
) -> Draftable:
    """Return what a drafter is asked about a text."""
    return Draftable(
        request_id=name,
        tokens=tokens,
        prompt_len=prompt_len,
        sampling=SamplingParams(temperature=temperature),
        max_depth=max_depth,
    )


def observed(
    name: str, tokens: Sequence[int], start: int, end: int, prompt_len: int = 3, **more: Any
) -> Observed:
    """Return what a drafter is shown: the tokens [start, end) of a text."""
    return Observed(
        request_id=name,
        tokens=tokens,
        start=start,
        num_tokens=end - start,
        prompt_len=prompt_len,
        **more,
    )
