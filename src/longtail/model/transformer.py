"""One decoder for four dense families: Llama, Mistral, Qwen2 and Qwen3.

Pre-norm decoder with RMSNorm, grouped-query attention, rotary positions and SwiGLU. The families
differ in biases, a norm on queries and keys, windows and the rope, which `ModelConfig` describes.
This module has the parameters and the arithmetic; `model.hf.model` reads and writes files, and
`model.attention` provides keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtail.model.attention import Attention
from longtail.model.kernels.decoder import NativeDecoder
from longtail.model.kernels.linear import Linear, pack_layers
from longtail.model.kernels.ops import (
    CachedAttention,
    HeadNorms,
    Kernels,
    NativeKernels,
    select_kernels,
)
from longtail.model.kernels.training_ops import select_training_kernels
from longtail.model.rope import Rope, RopeConfig, Rotation
from longtail.speculation.drafter import NO_TAPS, Taps
from longtail.system import machine

Family = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. `hidden_size` may differ from num_heads * head_dim."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for none; empty if no layer has one."""

    def window(self, layer: int) -> int:
        """Return the sliding window of a layer, 0 for full attention."""
        return self.windows[layer] if self.windows else 0


class Norm(nn.Module):
    """Weight of a root mean square norm (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class SelfAttention(nn.Module):
    """Grouped-query attention with one projection: rows are all queries, all keys, all values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(config.hidden_size, (heads + 2 * kv_heads) * dim, bias=config.qkv_bias)
        self.output = Linear(heads * dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = Norm(dim) if config.qk_norm else None
        self.k_norm = Norm(dim) if config.qk_norm else None
        self._layer, self._window = layer, config.window(layer)
        self._num_heads, self._head_dim, self._eps = heads, dim, config.norm_eps

    def forward(
        self, x: Float[Tensor, "tokens hidden"], context: "Context"
    ) -> Float[Tensor, "tokens hidden"]:
        """Project, normalise, rotate, attend, project back."""
        norms = HeadNorms(self._num_heads, self._eps)
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self._num_heads, self._eps, self.q_norm.weight, self.k_norm.weight)
        qkv = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        heads = context.kernels.rotate(qkv, norms, context.rotation)
        attended = context.attention.attend(
            self._layer, heads.queries, heads.keys, heads.values, self._window
        )
        return self.output(attended.reshape(x.shape[0], -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020) with one projection: rows are all gates, then all ups."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down = Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], kernels: Kernels
    ) -> Float[Tensor, "tokens hidden"]:
        """Return down(silu(gate(x)) * up(x))."""
        return self.down(kernels.swiglu(self.gate_up(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Rotation, attention and kernels of one forward pass."""

    rotation: Rotation
    attention: Attention
    kernels: Kernels


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.hidden_size)
        self.attention = SelfAttention(config, layer)
        self.feed_forward_norm = Norm(config.hidden_size)
        self.feed_forward = FeedForward(config)
        self._eps = config.norm_eps

    def forward(
        self,
        stream: Float[Tensor, "tokens hidden"],
        delta: Float[Tensor, "tokens hidden"] | None,
        context: Context,
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"]]:
        """Return the residual stream and the output that is still to be added to it.

        The next norm adds it, in one kernel.
        """
        add_norm = context.kernels.add_norm
        stream, normed = add_norm(stream, delta, self.attention_norm.weight, self._eps)
        attended = self.attention(normed, context)
        stream, normed = add_norm(stream, attended, self.feed_forward_norm.weight, self._eps)
        return stream, self.feed_forward(normed, context.kernels)


class Transformer(nn.Module):
    """The decoder. `forward` returns final hidden states; `logits` applies the LM head to them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Given its weight, it draws none: on the device "meta" that would import for four seconds.
        size = config.vocab_size, config.hidden_size
        self.embedding = nn.Embedding(size[0], size[1], _weight=torch.empty(size))
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = Norm(config.hidden_size)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tied_embeddings:
            embedding = self.embedding.weight
            assert isinstance(embedding, nn.Parameter)
            self.head.weight = embedding
        self._rope = Rope(config.head_dim, config.rope)
        self._kernels = Kernels()
        self._decoder: NativeDecoder | None = None
        """All layers in one call, for attention over rows of a cache; None where there is none."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.embedding.weight.device

    def initialize(self, generator: torch.Generator) -> None:
        """Draw initial weights: normal(0, 0.02), residual outputs scaled by 1/sqrt(2 layers)."""
        residual = (2 * self.config.num_layers) ** -0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    scaled = name.endswith(("output.weight", "down.weight"))
                    std = 0.02 * (residual if scaled else 1.0)
                    parameter.normal_(0.0, std, generator=generator)

    def fuse(self) -> None:
        """Prepare for training: select fused kernels with gradients where they exist."""
        self._kernels, self._decoder = select_training_kernels(self.dtype, self.device), None

    def hold_casts(self, dtype: torch.dtype | None) -> None:
        """Convert all matrices for autocast on a CPU, once for many passes; None drops the copies.

        Call it again after the weights change.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.hold_cast(dtype)

    def pack(self) -> None:
        """Prepare for inference: pack weights, select kernels. Repeat it after weights change."""
        self._kernels = select_kernels(self.dtype, self.config.head_dim)
        pack_layers(self)
        self._decoder = _native_decoder(self) if isinstance(self._kernels, NativeKernels) else None

    def forward(
        self,
        tokens: Int[Tensor, "tokens"],
        positions: Int[Tensor, "tokens"],
        attention: Attention,
        *,
        recompute: bool = False,
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the normed final hidden states of a flat list of tokens.

        `recompute`: layers are `recomputed`.
        """
        return self.forward_with_features(
            tokens, positions, attention, NO_TAPS, recompute=recompute
        )[0]

    def forward_with_features(
        self,
        tokens: Int[Tensor, "tokens"],
        positions: Int[Tensor, "tokens"],
        attention: Attention,
        taps: Taps,
        *,
        recompute: bool = False,
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens features"] | None]:
        """Run `forward`, and also return the features of `taps`; None if these are empty."""
        stream, delta = self.embedding(tokens), None
        # Under autocast queries have its dtype; the rotation must not promote them.
        device = stream.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else stream.dtype
        rotation = self._rope.rotation(positions, self._kernels.rotation_dtype(dtype))
        if self._decoder is not None and isinstance(attention, CachedAttention):
            return self._decoder.run(stream, rotation, attention, taps)
        attention = self._kernels.attention(attention, dtype)
        context = Context(rotation=rotation, attention=attention, kernels=self._kernels)
        kept: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if index in taps.layers:  # a new tensor: kernels may overwrite the stream
                kept.append(stream.clone() if delta is None else stream + delta)
            if recompute:
                stream, delta = recomputed(layer, stream, delta, context)
            else:
                stream, delta = layer(stream, delta, context)
        eps = self.config.norm_eps
        hidden = self._kernels.add_norm(stream, delta, self.norm.weight, eps).normed
        if taps.final:
            kept.append(hidden)
        features = None if not kept else kept[0] if len(kept) == 1 else torch.cat(kept, -1)
        return hidden, features

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """Return the logits of the next token."""
        return self.head(hidden)


def recomputed(layer: Callable[..., Any], *inputs: Any) -> Any:
    """Compute a layer, and its activations again in the backward pass (gradient checkpointing).

    They are kept while an eighth of a CPU's memory is free, with the same bits.
    """
    on_cpu = any(isinstance(each, Tensor) and each.device.type == "cpu" for each in inputs)
    memory = machine.memory() if on_cpu else None
    if memory and memory.total and (memory.available or 0) > memory.total / 8:
        return layer(*inputs)
    return checkpoint(layer, *inputs, use_reentrant=False)


def _native_decoder(model: Transformer) -> NativeDecoder | None:
    """Return the decoder that runs all layers in one call; None if a weight is packed otherwise."""
    layers, config = [], model.config
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        own, mlp = layer.attention, layer.feed_forward
        linear = {"qkv": own.qkv, "output": own.output, "gate_up": mlp.gate_up, "down": mlp.down}
        packed = {name: each.native for name, each in linear.items()}
        if None in packed.values():
            return None
        norms = {"attention_norm": layer.attention_norm, "q_norm": own.q_norm}
        norms |= {"k_norm": own.k_norm, "feed_forward_norm": layer.feed_forward_norm}
        weights = {n: None if norm is None else norm.weight.detach() for n, norm in norms.items()}
        layers.append({**weights, **packed, "window": config.window(index)})
    return NativeDecoder(
        layers,
        model.norm.weight.detach(),
        inner=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        eps=config.norm_eps,
    )
