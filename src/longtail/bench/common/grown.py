"""A model of 100M parameters with the text of the tiny reasoner: the same function, grown.

A benchmark of speculation needs a model of a realistic size and a drafter trained on it. So the
tiny reasoner and its drafter are placed into the corner of a large shape with zeros around them
(function-preserving growth, as Net2Net: Chen, Goodfellow and Shlens 2016). Speed is that of the
large shape, acceptance that of the small one: every product is computed in full.

    stream      [ small | 0 ]          norms divide by more dims: weights times sqrt(small / large)
    head        pairs (0, 16) (1, 17) ...  ->  (0, 32) (2, 34) ...       the same frequencies
    heads       of a key head: 0 1  ->  0 1 -                            - is zero
    layers      0 .. 7  ->  0 .. 7, then layers that add zero

Exact but for rounding: a norm over more dims sees its epsilon as larger, so `grown_shape` shrinks
it, and queries and keys (whose norm grows by another factor) are scaled to meet the same one.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.model.hf.model import load_config
from longtail.model.kernels.linear import Linear
from longtail.model.transformer import (
    DecoderLayer,
    FeedForward,
    ModelConfig,
    Norm,
    SelfAttention,
    Transformer,
)
from longtail.tiny import REASONER


def grown_shape(small: ModelConfig, large: ModelConfig) -> ModelConfig:
    """Return the small config with the large one's sizes, except for the vocabulary."""
    return replace(
        small,
        hidden_size=large.hidden_size,
        intermediate_size=large.intermediate_size,
        num_layers=large.num_layers,
        num_heads=large.num_heads,
        num_kv_heads=large.num_kv_heads,
        head_dim=large.head_dim,
        norm_eps=small.norm_eps * small.hidden_size / large.hidden_size,
    )


def large_shape(small: ModelConfig) -> ModelConfig:
    """Return the shape of a decoder of 100M parameters for a small one's text."""
    large = replace(
        small,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=16,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
    )
    return grown_shape(small, large)


LARGE = large_shape(load_config(REASONER))


def grow_target(model: Transformer, shape: ModelConfig) -> Transformer:
    """Return a decoder of `shape` with the model's logits; its states end in zeros."""
    places = _places(model.config, shape)
    grown = Transformer(shape).to(model.device, model.dtype)
    hidden = places.hidden(1)
    with torch.no_grad():
        for parameter in grown.parameters():
            parameter.zero_()
        grown.embedding.weight[:, hidden] = model.embedding.weight
        if not shape.tied_embeddings:
            grown.head.weight[:, hidden] = model.head.weight
        places.norm(model.norm, grown.norm)
        for old, new in zip(model.layers, grown.layers, strict=False):
            assert isinstance(old, DecoderLayer)
            assert isinstance(new, DecoderLayer)
            places.norm(old.attention_norm, new.attention_norm)
            places.norm(old.feed_forward_norm, new.feed_forward_norm)
            places.attention(old.attention, new.attention)
            places.feed_forward(old.feed_forward, new.feed_forward)
    return grown


def grow_drafter(layer: EagleLayer, shape: ModelConfig) -> EagleLayer:
    """Return a drafter of the grown target with the same proposals."""
    config = layer.config
    places = _places(config.target, shape)
    grown = EagleLayer(replace(config, target=shape, feature_scale=1.0))
    grown = grown.to(layer.device, layer.dtype)
    hidden = places.hidden(1)
    inputs = 2 if config.recipe == "eagle1" else len(config.layers)
    with torch.no_grad():
        for parameter in grown.parameters():
            parameter.zero_()
        places.fill(layer.fc, grown.fc, rows=hidden, columns=places.hidden(inputs))
        if config.recipe == "eagle3":
            grown.fc.weight.mul_(config.feature_scale)
            for old, new in (
                (layer.embedding_norm, grown.embedding_norm),
                (layer.feature_norm, grown.feature_norm),
                (layer.norm, grown.norm),
            ):
                places.norm(old, new)
        blocks = 1 if config.recipe == "eagle1" else 2
        places.heads(layer.qkv, grown.qkv, blocks, *places.bare_factors)
        places.fill(layer.output, grown.output, rows=hidden, columns=places.queries())
        places.norm(layer.feed_forward_norm, grown.feed_forward_norm)
        places.feed_forward(layer.feed_forward, grown.feed_forward)
    return grown


@dataclass(frozen=True, slots=True)
class _Places:
    """Positions of the small shape's rows and columns in the large shape's matrices."""

    small: ModelConfig
    large: ModelConfig

    @property
    def hidden_ratio(self) -> float:
        return self.large.hidden_size / self.small.hidden_size

    @property
    def head_ratio(self) -> float:
        return self.large.head_dim / self.small.head_dim

    @property
    def normed_factors(self) -> tuple[float, float]:
        """Factors of normed queries and keys: mean square and epsilon shrink in proportion."""
        factor = (self.head_ratio / self.hidden_ratio) ** 0.5
        return factor, factor

    @property
    def bare_factors(self) -> tuple[float, float]:
        """Factors of plain queries and keys: the scale of the scores, 1 / sqrt(head_dim)."""
        return self.head_ratio**0.5, 1.0

    def hidden(self, blocks: int) -> Int[Tensor, "places"]:
        """Return the dims of `blocks` hidden vectors laid end to end."""
        return _blocks(
            torch.arange(self.small.hidden_size), self.large.hidden_size, list(range(blocks))
        )

    def dims(self) -> Int[Tensor, "places"]:
        """Return the dims of a head with the same frequencies, in either half."""
        step = self.large.head_dim // self.small.head_dim
        half = torch.arange(self.small.head_dim // 2) * step
        return torch.cat((half, half + self.large.head_dim // 2))

    def queries(self) -> Int[Tensor, "places"]:
        """Return the dims of all query heads; heads stay with their key head."""
        group = self.small.num_heads // self.small.num_kv_heads
        wider = self.large.num_heads // self.large.num_kv_heads
        heads = [i // group * wider + i % group for i in range(self.small.num_heads)]
        return _blocks(self.dims(), self.large.head_dim, heads)

    def attention(self, old: SelfAttention, new: SelfAttention) -> None:
        """Place a target's attention.

        With norms on queries and keys, their weights take the 1 / sqrt(ratio) of a norm over more
        dims and, half each, the sqrt(ratio) of the scores' scale, 1 / sqrt(head_dim).
        """
        normed = self.small.qk_norm
        self.heads(old.qkv, new.qkv, 1, *(self.normed_factors if normed else self.bare_factors))
        self.fill(old.output, new.output, rows=self.hidden(1), columns=self.queries())
        for norm, wider in ((old.q_norm, new.q_norm), (old.k_norm, new.k_norm)):
            if norm is not None and wider is not None:
                wider.weight[self.dims()] = norm.weight * self.head_ratio**-0.25

    def heads(self, old: Linear, new: Linear, blocks: int, query: float, key: float) -> None:
        """Place a fused projection of `blocks` hidden vectors, scaling queries and keys."""
        keys = _blocks(self.dims(), self.large.head_dim, list(range(self.small.num_kv_heads)))
        first_key = self.large.num_heads * self.large.head_dim
        first_value = first_key + self.large.num_kv_heads * self.large.head_dim
        queries = self.queries()
        rows = torch.cat((queries, keys + first_key, keys + first_value))
        self.fill(old, new, rows=rows, columns=self.hidden(blocks))
        new.weight[queries] *= query
        new.weight[keys + first_key] *= key

    def feed_forward(self, old: FeedForward, new: FeedForward) -> None:
        """Place gates, ups and downs."""
        inner = torch.arange(self.small.intermediate_size)
        both = torch.cat((inner, inner + self.large.intermediate_size))
        self.fill(old.gate_up, new.gate_up, rows=both, columns=self.hidden(1))
        self.fill(old.down, new.down, rows=self.hidden(1), columns=inner)

    def norm(self, old: Norm, new: Norm) -> None:
        """Place the weight of a norm over the stream."""
        new.weight[self.hidden(1)] = old.weight * self.hidden_ratio**-0.5

    def fill(self, old: Linear, new: Linear, *, rows: Tensor, columns: Tensor) -> None:
        """Place a matrix."""
        new.weight[rows[:, None], columns] = old.weight


def _blocks(inside: Tensor, size: int, chosen: list[int]) -> Tensor:
    """Return the positions `inside` each of the chosen blocks of `size`."""
    return torch.cat([inside + block * size for block in chosen])


def _places(small: ModelConfig, large: ModelConfig) -> _Places:
    """Check that the function stays the same between the shapes."""
    sizes = replace(grown_shape(small, large), norm_eps=large.norm_eps)
    assert large == sizes, "a grown model differs in its sizes only"
    assert small.rope.scaling == "default", "other scalings depend on the size of a head"
    assert not any((small.qkv_bias, small.output_bias, small.mlp_bias)), "biases are not grown"
    assert not small.windows, "windows are not grown"
    assert large.head_dim % small.head_dim == 0, "frequencies of a head must be among the larger's"
    assert large.hidden_size >= small.hidden_size, "growing is upwards"
    assert large.intermediate_size >= small.intermediate_size, "growing is upwards"
    assert large.num_layers >= small.num_layers, "growing is upwards"
    assert large.num_kv_heads >= small.num_kv_heads, "growing is upwards"
    group, wider = small.num_heads // small.num_kv_heads, large.num_heads // large.num_kv_heads
    assert wider >= group, "a key head must have room for its queries"
    expected = grown_shape(small, large).norm_eps
    assert abs(large.norm_eps - expected) <= 1e-6 * expected, "norm_eps: see grown_shape"
    return _Places(small, large)
