"""Drafts whose passes are replayed from graphs are those of passes that run as they are."""

import pytest
import torch

from eagle_requests import PROMPT_LEN, KeyedNoise, features_of, make_layer, show, text
from fake_graphs import FakeGraphs, Recorder
from longtail.drafter import eagle
from longtail.drafter.eagle_drafter import EagleDrafter
from longtail.drafter.weights import own_tensors
from longtail.model.gpu_kernels import GpuKernels
from longtail.model.graphs import GraphPool
from longtail.model.pages import TorchPageKernels
from longtail.speculation.drafter import Draftable
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree
from longtail.types import SamplingParams
from tiny_models import tiny_model


def propose(drafter: EagleDrafter, texts: dict[str, list[int]], shape: Strategy) -> list[DraftTree]:
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


@pytest.mark.parametrize("depth", [1, 7])
def test_a_draft_is_launched_without_a_look_at_the_device(depth, monkeypatch):
    """Whatever its depth: what was drafted is read once, at the end."""
    model = tiny_model(dtype=torch.float64)
    monkeypatch.setattr(eagle, "select_kernels", lambda *_: GpuKernels(TorchPageKernels()))
    drafter, tokens = EagleDrafter(make_layer(model, "eagle1"), model), text(9)
    show(drafter, "a", tokens, features_of(model, drafter, tokens[:-1]), 0, 8)
    reads, read = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or read(self))
    with Recorder():  # refuses all other ways of asking for a value
        (tree,) = propose(drafter, {"a": tokens}, Strategy(depth=depth, width=2, beam=1))
    assert tree.size == depth
    assert len(reads) == 4, "tokens, margins, parents, reach"


@pytest.mark.parametrize("recipe", ["eagle1", "eagle3"])
def test_captured_passes_draft_the_same(recipe, monkeypatch):
    """Chains and beams, one request to eleven (whose windows move when the ninth comes), and other

    weights in the middle.
    """
    plain_model = tiny_model(dtype=torch.float64)
    plain = EagleDrafter(make_layer(plain_model, recipe), plain_model)
    model, backend = tiny_model(dtype=torch.float64), FakeGraphs()
    model.graphs = GraphPool(backend)
    chosen = GpuKernels(TorchPageKernels())
    monkeypatch.setattr(eagle, "select_kernels", lambda *_: chosen)
    captured = EagleDrafter(make_layer(model, recipe), model)
    texts: dict[str, list[int]] = {}
    for number in range(11):
        name, tokens = f"r{number}", text(5 + number, seed=number)
        features = features_of(plain_model, plain, tokens[:-1])
        for drafter in (plain, captured):
            show(drafter, name, tokens, features, 0, len(tokens) - 1)
        texts[name] = tokens
        if number == 9:
            other = make_layer(plain_model, recipe)
            other.initialize(torch.Generator().manual_seed(8))
            for drafter in (plain, captured):
                drafter.adopt(own_tensors(other))
        for shape in (Strategy(depth=4), Strategy(depth=3, width=2, size=7, beam=2)):
            expected = propose(plain, texts, shape)
            found = propose(captured, texts, shape)
            for one, other_tree in zip(expected, found, strict=True):
                assert one.tokens == other_tree.tokens
                assert one.parents == other_tree.parents
                assert one.margins == pytest.approx(other_tree.margins, abs=1e-9)
    assert 0 < backend.num_captures < backend.num_replays
