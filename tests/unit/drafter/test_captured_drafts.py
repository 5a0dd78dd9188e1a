"""Drafts from captured passes equal those from eager passes."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longtail.drafter.eagle import layer as eagle
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.weights import copy_parameters
from longtail.model.graphs import GraphPool
from longtail.model.kernels.gpu import GpuKernels
from longtail.model.kernels.pages import TorchPageKernels
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Draftable, Drafter
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree
from longtail.types import SamplingParams
from support.eagle_requests import PROMPT_LEN, KeyedNoise, features_of, make_layer, observe, text
from support.fake_graphs import FakeGraphs
from support.tiny_models import tiny_model

CHAIN, BEAM = Strategy(depth=4), Strategy(depth=3, width=2, size=7, beam=2)
TOLERANCE = {"rtol": 0.0, "atol": 1e-9}
"""float64 sums in another order: 1e-16 an operation, some thousands of them."""


def propose(drafter: Drafter, texts: dict[str, list[int]], shape: Strategy) -> list[DraftTree]:
    requests = [
        Draftable(
            request_id=name,
            tokens=tokens,
            prompt_len=PROMPT_LEN,
            sampling=SamplingParams(),
            max_depth=50,
        )
        for name, tokens in texts.items()
    ]
    noise = KeyedNoise([len(tokens) for tokens in texts.values()], 128)
    return drafter.propose(requests, shape, noise)


def assert_same_drafts(found: list[DraftTree], expected: list[DraftTree]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.parents == other.parents
        assert one.margins == pytest.approx(other.margins, abs=1e-9)


def eagle1(model: Transformer) -> EagleDrafter:
    return EagleDrafter(make_layer(model, "eagle1"), model)


def eagle3(model: Transformer) -> EagleDrafter:
    return EagleDrafter(make_layer(model, "eagle3"), model)


def kept(drafter: EagleDrafter) -> list[Tensor]:
    """Return all stored keys and values; padding writes after them."""
    return [each[:, :-1] for each in (drafter.windows.keys, drafter.windows.values)]


def other_weights(model: Transformer) -> dict[str, Tensor]:
    layer = make_layer(model, "eagle1")
    layer.initialize(torch.Generator().manual_seed(8))
    return copy_parameters(layer)


@pytest.mark.slow
@pytest.mark.parametrize("make", [eagle1, eagle3])
def test_captured_and_eager_passes_draft_the_same(
    make: Callable[[Transformer], EagleDrafter], monkeypatch
):
    """Requests start, grow and end: rows are reused and reallocated; windows
    slide. Those that are new have most to catch up on. In the middle come other weights.
    """
    rng, backend = random.Random(1), FakeGraphs()
    plain_model, model = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    model.graphs = GraphPool(backend)
    plain = make(plain_model)
    monkeypatch.setattr(eagle, "select_kernels", lambda *_: GpuKernels(TorchPageKernels()))
    captured = make(model)
    texts: dict[str, list[int]] = {}
    for number in range(12):
        if number % 4 == 3:
            gone = rng.choice(sorted(texts))
            del texts[gone]
            for drafter in (plain, captured):
                drafter.forget(gone)
        told = {name: len(tokens) - 1 for name, tokens in texts.items()}
        for name in texts:
            texts[name] = texts[name] + text(rng.randint(1, 9), seed=number)
        if number < 14:
            texts[f"r{number}"] = text(5 + number, seed=number)
        if number == 9 and make is eagle1:
            for drafter in (plain, captured):
                drafter.load_weights(other_weights(plain_model))
        for drafter in (plain, captured):
            for name, tokens in texts.items():
                features = features_of(plain_model, plain, tokens[:-1])
                observe(drafter, name, tokens, features, told.get(name, 0), len(tokens) - 1)
        shape, before = (CHAIN, BEAM)[number % 2], backend.num_replays
        found = propose(captured, texts, shape)
        assert_same_drafts(found, propose(plain, texts, shape))
        assert backend.num_replays - before == shape.depth + 1, "prefill, root and levels"
        for one, other in zip(kept(captured), kept(plain), strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)
    assert model.graphs.num_graphs == backend.num_captures < backend.num_replays
