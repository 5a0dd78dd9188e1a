"""A drafter that takes over other weights in mid-text drafts as if it had always had them."""

import pytest
import torch
from torch import Tensor

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, Recipe
from longtail.drafter.weights import copy_parameters
from longtail.model.transformer import Transformer
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import Accepted, DraftTree
from support.eagle_requests import PROMPT_LEN, features_of, keyed_noise, observe, text
from support.engine_requests import draftable
from support.tiny_models import tiny_model

LENGTHS = (9, 31, 90)
CHAIN, SIBLINGS = Strategy(depth=5), Strategy(depth=4, width=2, beam=1, size=8)
TREE = Strategy(depth=3, width=2, size=7)
EVEN = torch.arange(0, 128, 2)


def _layer(model: Transformer, recipe: Recipe, seed: int, *, reduced: bool = False) -> EagleLayer:
    """A layer as training leaves it: features are scaled outside of `fc`."""
    config = EagleConfig(
        recipe=recipe,
        target=model.config,
        layers=(0, 1) if recipe == "eagle3" else (),
        window=5,
        draft_vocab_size=64 if reduced else 0,
        feature_scale=0.25 if recipe == "eagle3" else 1.0,
    )
    layer = EagleLayer(config)
    layer.initialize(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in layer.parameters():  # no norm is left at its identity
            parameter.mul_(1.0 + 0.1 * torch.sin(torch.arange(parameter.shape[-1]) + seed))
    return layer.double() if model.dtype == torch.float64 else layer


def _drafter(
    model: Transformer, recipe: Recipe, seed: int, ids: Tensor | None = None
) -> EagleDrafter:
    kept = None if ids is None else ids.clone()
    return EagleDrafter(_layer(model, recipe, seed, reduced=ids is not None), model, draft_ids=kept)


def _features(model: Transformer, drafter: EagleDrafter) -> dict[int, Tensor]:
    return {n: features_of(model, drafter, text(n + 10, seed=n)) for n in LENGTHS}


def _see(drafter: EagleDrafter, features: dict[int, Tensor], start: int, back: int) -> None:
    """Observe each text from `start` up to `back` tokens before its end."""
    for n in LENGTHS:
        observe(
            drafter, str(n), text(n + 10, seed=n), features[n], max(n + start, 0), n + 10 - back
        )


def _ask(drafter: EagleDrafter, strategy: Strategy, back: int) -> list[DraftTree]:
    """Ask for the texts without their last `back - 1` tokens."""
    requests = [
        draftable(
            str(n),
            text(n + 10, seed=n)[: n + 11 - back],
            PROMPT_LEN,
            temperature=0.0 if n == 31 else 1.0,
            max_depth=9,
        )
        for n in LENGTHS
    ]
    noise = keyed_noise([len(each.tokens) for each in requests], 128)
    return drafter.propose(requests, strategy, noise)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "ids", "dtype", "strategy"),
    [
        ("eagle1", None, torch.float32, CHAIN),
        ("eagle1", None, torch.float64, SIBLINGS),
        ("eagle3", None, torch.bfloat16, CHAIN),
        ("eagle3", None, torch.bfloat16, TREE),
        ("eagle3", EVEN, torch.float64, SIBLINGS),
        ("eagle3", EVEN, torch.bfloat16, TREE),
        ("eagle3", EVEN, torch.float32, CHAIN),
    ],
)
def test_weights_loaded_during_a_text_draft_like_a_fresh_drafter(dtype, recipe, ids, strategy):
    """To the last bit of every margin; chains by the native round, trees level by level."""
    model = tiny_model(dtype=dtype)
    model.pack()
    swapped = _drafter(model, recipe, 1, ids)
    fresh = _drafter(model, recipe, 2, ids)
    features = _features(model, fresh)
    for drafter in (swapped, fresh):
        _see(drafter, features, -1000, 4)
    before = _ask(swapped, strategy, 4)
    layer = _layer(model, recipe, 2, reduced=ids is not None)
    swapped.load_weights(copy_parameters(layer))
    after = _ask(swapped, strategy, 4)
    assert after == _ask(fresh, strategy, 4) != before
    for drafter in (swapped, fresh):  # and further on
        _see(drafter, features, 6, 1)
    assert _ask(swapped, strategy, 1) == _ask(fresh, strategy, 1)


@pytest.mark.slow
def test_confidences_are_kept_when_weights_are_loaded():
    model = tiny_model(dtype=torch.float64)
    drafter = _drafter(model, "eagle1", 1)
    _see(drafter, _features(model, drafter), -1000, 1)
    fresh = _drafter(model, "eagle1", 2)
    _see(fresh, _features(model, fresh), -1000, 1)
    for _ in range(20):  # whatever it proposes is wrong
        trees = _ask(drafter, CHAIN, 1)
        drafter.learn(trees, [Accepted(path=(), tokens=(0,)) for _ in trees])
    drafter.load_weights(copy_parameters(_layer(model, "eagle1", 2)))
    for one, other in zip(_ask(drafter, CHAIN, 1), _ask(fresh, CHAIN, 1), strict=True):
        assert one.tokens == other.tokens
        assert one.reach[0] < other.reach[0]
