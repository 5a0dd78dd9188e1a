"""Requests for an EAGLE drafter whose layer and target are random and small."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.kind import DraftLayer
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Drafter, Noise
from support.engine_requests import features_of as packed_features
from support.engine_requests import observed

KEY, WINDOW = 12345, 5
PROMPT_LEN = 3


def keyed_noise(lengths: Sequence[int], vocab_size: int) -> Noise:
    """Return the noise of requests with texts of these lengths and one key."""
    return Noise([KEY] * len(lengths), lengths, vocab_size)


def make_layer(model: Transformer, recipe: str, window: int = WINDOW) -> DraftLayer:
    if recipe == "ridge":
        return ridge_layer(RidgeConfig(target=model.config)).to(model.dtype)
    layers = (0, 1) if recipe == "eagle3" else ()
    layer = EagleLayer(
        EagleConfig(recipe=recipe, target=model.config, layers=layers, window=window)
    )
    layer.initialize(torch.Generator().manual_seed(3))
    return layer.to(model.dtype)


def ridge_layer(config: RidgeConfig, seed: int = 2) -> RidgeLayer:
    """Return a layer with random weights."""
    layer, generator = RidgeLayer(config), torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return layer


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, (length,), generator=generator).tolist()


def features_of(model: Transformer, drafter: Drafter, tokens: Sequence[int]) -> Tensor:
    return packed_features(model, tokens, drafter.taps)


def observe(
    drafter: Drafter, name: str, tokens: Sequence[int], features: Tensor, start: int, end: int
) -> None:
    """Observe the tokens [start, end) of a text."""
    drafter.observe([observed(name, tokens, start, end, PROMPT_LEN)], features[start:end])
