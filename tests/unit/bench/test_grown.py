"""Growth keeps the function: logits, features and drafts are the small model's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longtail.bench.common.grown import LARGE, grow_drafter, grow_target, large_shape
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, Recipe
from longtail.model.attention import PackedAttention
from longtail.model.transformer import ModelConfig, Transformer
from longtail.speculation.drafter import Draftable, Observed
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import Taps
from longtail.speculation.tree import DraftTree
from longtail.types import SamplingParams
from support.tiny_models import tiny_model

TOKENS = torch.arange(40) * 7 % 128
CLOSE = {"rtol": 0.0, "atol": 1e-12}
"""float64: values of size 1 to 10 pass some 20 operations, each rounding to 1e-16 of their size."""


def small_target(tied: bool = False) -> Transformer:
    """Random weights, and an epsilon so large that it would be seen if it were not right."""
    model = tiny_model("qwen3", dtype=torch.float64)
    other = Transformer(replace(model.config, norm_eps=1e-2, tied_embeddings=tied)).double()
    other.load_state_dict(model.state_dict())
    return other


def grown_shape(small: ModelConfig) -> ModelConfig:
    """Larger in everything, in different proportions, and still quick in float64."""
    return replace(
        small,
        hidden_size=96,
        intermediate_size=80,
        num_layers=4,
        num_heads=12,
        num_kv_heads=4,
        head_dim=32,
        norm_eps=small.norm_eps * small.hidden_size / 96,
    )


@torch.no_grad()
def states(model: Transformer, taps: Taps) -> tuple[Tensor, Tensor]:
    """Logits and features of the text."""
    attention = PackedAttention((0, len(TOKENS)))
    tapped = model.forward_with_features(TOKENS, torch.arange(len(TOKENS)), attention, taps)
    assert tapped.features is not None
    return model.logits(tapped.hidden), tapped.features


@pytest.mark.parametrize("tied", [False, True])
def test_a_grown_target_has_the_states_and_the_logits_of_the_small_one(tied: bool):
    small = small_target(tied)
    grown = grow_target(small, grown_shape(small.config))
    taps = Taps(layers=(0, 1), final=True)
    logits, features = states(small, taps)
    wider_logits, wider = states(grown, taps)
    torch.testing.assert_close(wider_logits, logits, **CLOSE)
    assert logits.std() > 0.5, "logits that are all alike would prove nothing"
    expected = features.view(len(TOKENS), 3, 32)
    wider = wider.view(len(TOKENS), 3, 96)
    torch.testing.assert_close(wider[..., :32], expected, **CLOSE)
    assert not wider[..., 32:].any()
    assert (grown.head.weight is grown.embedding.weight) == tied


@pytest.mark.parametrize("recipe", ["eagle1", "eagle3"])
def test_a_grown_drafter_proposes_what_the_small_one_does(recipe: Recipe):
    small = small_target()
    shape = grown_shape(small.config)
    layer = drafter_layer(recipe, small.config)
    grown = grow_drafter(layer, shape)
    expected, found = propose(small, layer), propose(grow_target(small, shape), grown)
    assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
    assert expected.size == 12
    assert found.margins == pytest.approx(expected.margins, abs=1e-10)


def drafter_layer(recipe: Recipe, target: ModelConfig) -> EagleLayer:
    """Random weights; no norm is left at its identity."""
    eagle3 = recipe == "eagle3"
    config = EagleConfig(
        recipe=recipe,
        target=target,
        layers=(0, 1) if eagle3 else (),
        window=16,
        feature_scale=0.5 if eagle3 else 1.0,
    )
    layer = EagleLayer(config).double()
    generator = torch.Generator().manual_seed(1)
    layer.initialize(generator)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return layer


def propose(target: Transformer, layer: EagleLayer) -> DraftTree:
    """Draft a tree behind the text."""
    drafter = EagleDrafter(layer, target)
    features = states(target, drafter.taps)[1]
    tokens = TOKENS.tolist()
    seen = Observed(request_id="a", tokens=tokens, start=0, num_tokens=39, prompt_len=3)
    drafter.observe([seen], features[:39])
    asked = Draftable(
        request_id="a", tokens=tokens, prompt_len=3, sampling=SamplingParams(), max_depth=8
    )
    (tree,) = drafter.propose([asked], Strategy(depth=5, width=3, size=12), None)
    return tree


def test_growing_leaves_the_small_drafter_as_it_is():
    layer = drafter_layer("eagle3", small_target().config)
    config, before = layer.config, layer.fc.weight.clone()
    grow_drafter(layer, grown_shape(config.target))
    assert layer.config == config
    assert torch.equal(layer.fc.weight, before)


def test_the_large_shape_has_a_hundred_million_parameters():
    with torch.device("meta"):
        model = Transformer(LARGE)
    assert 95e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 110e6


def test_a_shape_with_the_small_epsilon_is_refused():
    small = small_target()
    with pytest.raises(AssertionError, match="grown_shape"):
        grow_target(small, replace(grown_shape(small.config), norm_eps=1e-2))
    assert large_shape(small.config).norm_eps == pytest.approx(1e-2 * 32 / 768)
