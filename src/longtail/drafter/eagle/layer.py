"""The EAGLE layer: one decoder layer on the target's features, with its embedding and LM head.

Position i of a sequence pairs the target's feature at token i with the embedding of token i + 1
and predicts token i + 2. NOTE: an off-by-one here is silent: everything still trains and drafts,
only worse. tests/unit/drafter/test_eagle_drafter.py checks the pairing.

    target          f0   f1   f2   f3              features of tokens x0 .. x3
    pairs          f0x1 f1x2 f2x3 f3x4             x4 is the root: sampled, not yet computed
    predicts         x2   x3   x4   x5             x5: depth 1 of the draft

At greater depths the feature is the layer's own output. Two recipes (EAGLE-1, Li et al. 2024,
arXiv 2401.15077; EAGLE-3, Li et al. 2025, arXiv 2503.01840):

    eagle1   feature = final hidden state; fc([embedding; feature]) is the layer's input; the
             output is a feature again, and goes to the head unchanged
    eagle3   feature = fc([low; middle; high]); attention reads [norm(embedding); norm(feature)],
             the residual is the feature; the head reads the normed output, the next depth the
             output before the norm

The target's embedding and head are arguments: they are never copied, saved or trained.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.config.sections import Amount, Positive
from longtail.drafter.kind import DraftConfig, DraftLayer
from longtail.model.kernels.linear import Linear, pack_layers
from longtail.model.kernels.ops import HeadNorms, Kernels, QueryKeyValue, select_kernels
from longtail.model.kernels.training_ops import select_training_kernels
from longtail.model.rope import Rope, Rotation
from longtail.model.transformer import FeedForward, ModelConfig, Norm
from longtail.speculation.drafter import Taps

Recipe = Literal["eagle1", "eagle3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DraftConfig):
    """Shape of an EAGLE drafter."""

    recipe: Recipe
    own_shape: ModelConfig | None = None
    """Shape of the drafter's layer if its heads, inner size or rope differ from the target's; width
    and vocabulary are always the target's. Only published drafters have one."""
    norm_before_residual: bool = False
    """eagle3: whether the residual is the normed feature, as in some published drafters."""
    layers: tuple[int, ...] = ()
    """eagle3: target layers whose input is tapped (low, middle, high); empty: `default_layers`."""
    window: Amount = 64
    """Number of pairs that a pair attends to, itself included; 0: all before it."""
    feature_scale: Positive = 1.0
    """eagle3: factor of the features before `fc`; see `fresh.fresh_drafter`."""

    def __post_init__(self) -> None:
        if self.recipe == "eagle3" and not self.layers:
            object.__setattr__(self, "layers", default_layers(self.target.num_layers))
        if not all(0 <= each < self.target.num_layers for each in self.layers):
            raise ValueError(
                f"layers = {list(self.layers)}: the target has {self.target.num_layers} layers, "
                "counted from 0"
            )

    @property
    def shape(self) -> ModelConfig:
        """Shape of the drafter's layer."""
        return self.own_shape or self.target

    @property
    def taps(self) -> Taps:
        """Target states that the layer reads."""
        return Taps(final=True) if self.recipe == "eagle1" else Taps(layers=self.layers)

    @property
    def feature_size(self) -> int:
        """Number of values a token that the taps return."""
        return self.target.hidden_size * (1 if self.recipe == "eagle1" else len(self.layers))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the EAGLE-3 taps that the engines assume if a checkpoint names none.

    A target with few layers has fewer than three.

    Example: default_layers(32) == (2, 16, 29)
    """
    low, high = min(2, num_layers - 1), max(num_layers - 3, 0)
    return tuple(sorted({low, num_layers // 2, high}))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutput:
    """Output of the decoder layer."""

    feature: Float[Tensor, "pairs hidden"]
    """Replacement of the target's feature at the next depth."""
    scored: Float[Tensor, "pairs hidden"]
    """Input of the LM head."""


class EagleLayer(DraftLayer):
    """The decoder layer with its input and its norms."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        shape = config.shape
        hidden, heads, kv_heads = shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.config = config
        eagle1 = config.recipe == "eagle1"
        fused, inputs = (2 * hidden, hidden) if eagle1 else (config.feature_size, 2 * hidden)
        self.fc = Linear(fused, hidden)
        self.qkv = Linear(inputs, (heads + 2 * kv_heads) * shape.head_dim)
        self.output = Linear(heads * shape.head_dim, hidden)
        self.feed_forward_norm = Norm(hidden)
        self.feed_forward = FeedForward(replace(shape, mlp_bias=False))
        if not eagle1:
            self.embedding_norm, self.feature_norm = Norm(hidden), Norm(hidden)
            self.norm = Norm(hidden)
        self.rope = Rope(shape.head_dim, shape.rope)
        self.kernels = Kernels()

    def initialize(self, generator: torch.Generator) -> None:
        """Draw fresh weights: normal(0, inputs ** -0.5), half of that for residual outputs."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    residual = name.endswith(("output.weight", "down.weight"))
                    std = parameter.shape[1] ** -0.5 * (0.5 if residual else 1.0)
                    parameter.normal_(0.0, std, generator=generator)

    def fuse(self) -> None:
        """Select the training kernels."""
        self.kernels = select_training_kernels(self.dtype, self.fc.weight.device)

    def pack(self) -> None:
        """Pack the weights for drafting; call again after the weights change."""
        self.kernels = select_kernels(self.dtype, self.config.shape.head_dim)
        pack_layers(self)

    def fold(self) -> None:
        """Multiply `feature_scale` into `fc`; the layer computes the same function."""
        with torch.no_grad():
            self.fc.weight.mul_(self.config.feature_scale)
        self.config = replace(self.config, feature_scale=1.0)

    def fuse_features(
        self, features: Float[Tensor, "pairs features"]
    ) -> Float[Tensor, "pairs hidden"]:
        """Project the tapped states to a feature of the layer's width."""
        if self.config.recipe == "eagle1":
            return features
        return self.fc(features * self.config.feature_scale)

    def make_input(
        self,
        features: Float[Tensor, "pairs hidden"],
        embeddings: Float[Tensor, "pairs hidden"],
    ) -> tuple[Float[Tensor, "pairs hidden"], Float[Tensor, "pairs inputs"]]:
        """Join the feature of a token with the embedding of the next.

        Returns the residual stream, and the input of the query, key and value projection.
        """
        if self.config.recipe == "eagle1":
            stream = self.fc(torch.cat((embeddings, features), -1)).to(features.dtype)
            return stream, stream
        add_norm, eps = self.kernels.add_norm, self.config.shape.norm_eps
        embedded = add_norm(embeddings, None, self.embedding_norm.weight, eps).normed
        stream, normed = add_norm(features, None, self.feature_norm.weight, eps)
        stream = normed if self.config.norm_before_residual else stream
        return stream, torch.cat((embedded, normed), -1)

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotary angles of pairs by the position of their feature's token."""
        return self.rope.rotation(positions, self.kernels.rotation_dtype(self.dtype))

    def heads(self, attended: Float[Tensor, "pairs inputs"], rotation: Rotation) -> QueryKeyValue:
        """Project to queries, keys and values, and rotate queries and keys."""
        shape = self.config.shape
        qkv = self.qkv(attended).view(attended.shape[0], -1, shape.head_dim)
        return self.kernels.rotate(qkv, HeadNorms(shape.num_heads, shape.norm_eps), rotation)

    def finish(
        self,
        stream: Float[Tensor, "pairs hidden"],
        attended: Float[Tensor, "pairs heads head_dim"],
    ) -> LayerOutput:
        """Compute the layer from the attention's output on: projection, residual, feed-forward."""
        add_norm, eps = self.kernels.add_norm, self.config.shape.norm_eps
        projected = self.output(attended.reshape(stream.shape[0], -1))
        stream, normed = add_norm(stream, projected, self.feed_forward_norm.weight, eps)
        delta = self.feed_forward(normed, self.kernels)
        if self.config.recipe == "eagle1":
            feature = stream + delta
            return LayerOutput(feature=feature, scored=feature)
        feature, scored = add_norm(stream, delta, self.norm.weight, eps)
        return LayerOutput(feature=feature, scored=scored)
