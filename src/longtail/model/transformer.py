"""One decoder for the families that reasoning RL trains: Llama, Mistral, Qwen2, Qwen3 (dense).

Pre-norm decoder with RMSNorm, grouped-query attention, rotary positions and SwiGLU. The families
differ by a bias, a norm on queries and keys, a window and the rope; all of them are data in
`ModelConfig`. It owns parameters and arithmetic. Files are `model.hf`'s business, context is
`model.attention`'s.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtail.model.attention import Attention
from longtail.model.linear import Linear
from longtail.model.rope import Rope, RopeConfig, Rotation

Family = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. `hidden_size` need not equal num_heads * head_dim."""

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
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0 for none; empty means none anywhere."""

    def window(self, layer: int) -> int:
        """Return the sliding window of a layer, 0 for full attention."""
        return self.windows[layer] if self.windows else 0


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        """Normalise; the statistics are taken in float32 or better."""
        # autocast hands over x in its own dtype, which the fused norm wants of the weight, too.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class SelfAttention(nn.Module):
    """Grouped-query attention with a fused projection: rows are all queries, all keys, all values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(config.hidden_size, (heads + 2 * kv_heads) * dim, bias=config.qkv_bias)
        self.output = Linear(heads * dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self._split = [heads, kv_heads, kv_heads]
        self._layer, self._window, self._head_dim = layer, config.window(layer), dim

    def forward(
        self, x: Float[Tensor, "tokens hidden"], rotation: Rotation, attention: Attention
    ) -> Float[Tensor, "tokens hidden"]:
        """Project, normalise, rotate, attend, project back."""
        qkv = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        queries, keys, values = qkv.split(self._split, 1)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        attended = attention.attend(
            self._layer, rotation.apply(queries), rotation.apply(keys), values, self._window
        )
        return self.output(attended.reshape(x.shape[0], -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020) with gate and up fused: rows are all gates, then all ups."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down = Linear(size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """down(silu(gate(x)) * up(x))."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = SelfAttention(config, layer)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x: Float[Tensor, "tokens hidden"], rotation: Rotation, attention: Attention
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream after this layer."""
        x = x + self.attention(self.attention_norm(x), rotation, attention)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """The decoder. `forward` gives final hidden states, `logits` turns chosen ones into scores."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self._rope = Rope(config.head_dim, config.rope)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.embedding.weight.device

    def initialize(self, generator: torch.Generator) -> None:
        """Draw fresh weights: normal(0, 0.02), residual outputs scaled by 1/sqrt(2 layers)."""
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

    def pack(self) -> None:
        """Prepare every linear layer for inference; call again after weights changed."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def forward(
        self,
        tokens: Int[Tensor, "tokens"],
        positions: Int[Tensor, "tokens"],
        attention: Attention,
        *,
        recompute: bool = False,
    ) -> Float[Tensor, "tokens hidden"]:
        """Run the decoder over a flat list of tokens and return normed final hidden states.

        `recompute` trades time for memory: activations inside layers are computed again in the
        backward pass (gradient checkpointing).
        """
        x = self.embedding(tokens)
        # autocast computes queries in its own dtype; the rotation must not promote them back.
        dtype = torch.get_autocast_dtype(x.device.type) if _autocasting(x) else x.dtype
        rotation = self._rope.rotation(positions, dtype)
        for layer in self.layers:
            if recompute:
                x = checkpoint(layer, x, rotation, attention, use_reentrant=False)
            else:
                x = layer(x, rotation, attention)
        return self.norm(x)

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """Unnormalised scores of the next token."""
        return self.head(hidden)


def _autocasting(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)
