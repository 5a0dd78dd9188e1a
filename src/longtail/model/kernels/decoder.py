"""Interface to decoder.c: one call runs all layers of a decoder over rows of a contiguous cache.

`model.transformer` defines the computation, which runs layer by layer where this does not; the bits
are the same. This module passes pointers and keeps their tensors alive.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.model.kernels import native
from longtail.model.kernels.linear import NativeProduct
from longtail.model.kernels.ops import CachedAttention
from longtail.model.rope import Rotation
from longtail.speculation.drafter import Taps

_PTR, _INT = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _PTR) for name in ("attention_norm", "q_norm", "k_norm", "feed_forward_norm")),
        *((name, _PTR) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _PTR) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        ("window", _INT),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "dim")),
        *((name, _PTR) for name in ("layer", "norm")),
        ("eps", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("tokens", "threads")),
        *((name, _PTR) for name in ("stream", "normed", "cos", "sin", "cache")),
        *((name, _INT) for name in ("layer_stride", "value_stride", "row_stride")),
        *((name, _PTR) for name in ("rows", "slots", "contexts", "depths", "visible", "taps")),
        *((name, _INT) for name in ("num_taps", "feature_stride")),
        *((name, _PTR) for name in ("features", "scratch")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer; norms that a family lacks are None."""

    attention_norm: Float[Tensor, "hidden"]
    q_norm: Float[Tensor, "head_dim"] | None
    k_norm: Float[Tensor, "head_dim"] | None
    feed_forward_norm: Float[Tensor, "hidden"]
    qkv: NativeProduct
    output: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Sizes and weights of a decoder."""

    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    layers: Sequence[LayerWeights]
    norm: Float[Tensor, "hidden"]


@final
class NativeDecoder:
    """The function of decoder.c for one set of weights."""

    def __init__(self, weights: DecoderWeights) -> None:
        functions = native.functions(weights.norm.dtype)
        assert functions is not None, "layers are packed only for a product that runs here"
        self._function, self._weights = functions["decode"], weights
        self._layers = (_Layer * len(weights.layers))(*map(_pointers, weights.layers))
        w = weights
        self._decoder = _Decoder(
            layers=len(w.layers), hidden=w.hidden_size, inner=w.inner_size, heads=w.num_heads,
            kv_heads=w.num_kv_heads, dim=w.head_dim, layer=ctypes.addressof(self._layers),
            norm=w.norm.data_ptr(), eps=w.eps,
        )  # fmt: skip
        all_heads = 2 * (w.num_heads + w.num_kv_heads) * w.head_dim
        self._per_token = all_heads + w.hidden_size + 3 * w.inner_size

    def run(
        self,
        stream: Float[Tensor, "tokens hidden"],
        rotation: Rotation,
        attention: CachedAttention,
        taps: Taps,
    ) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens features"] | None]:
        """Return the final hidden states and the features of `taps`; the stream is overwritten."""
        tokens, hidden = stream.shape
        cache, places = attention.storage, attention.places
        layers = (_INT * len(taps.layers))(*taps.layers)
        normed, features = torch.empty_like(stream), None
        size = (len(layers) + taps.final) * hidden if layers else 0
        if size:
            features = stream.new_empty(tokens, size)
        scratch = stream.new_empty(tokens * self._per_token)
        call = _Step(
            tokens=tokens, threads=torch.get_num_threads(), stream=stream.data_ptr(),
            normed=normed.data_ptr(), cos=rotation.cos.data_ptr(), sin=rotation.sin.data_ptr(),
            cache=cache.data_ptr(), layer_stride=cache.stride(0), value_stride=cache.stride(1),
            row_stride=cache.stride(2), rows=places.rows.data_ptr(),
            slots=places.slots.data_ptr(), contexts=places.contexts.data_ptr(),
            depths=places.depths.data_ptr(), visible=places.visible.data_ptr(),
            taps=ctypes.addressof(layers), num_taps=len(layers),
            feature_stride=size,
            features=None if features is None else features.data_ptr(),
            scratch=scratch.data_ptr(),
        )  # fmt: skip
        self._function(ctypes.byref(self._decoder), ctypes.byref(call))
        if taps.final and features is not None:
            features[:, -hidden:] = normed
        return normed, normed if taps.final and features is None else features


def _pointers(weights: LayerWeights) -> _Layer:
    def at(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    w = weights
    return _Layer(
        attention_norm=at(w.attention_norm), q_norm=at(w.q_norm), k_norm=at(w.k_norm),
        feed_forward_norm=at(w.feed_forward_norm), qkv=at(w.qkv.packed), output=at(w.output.packed),
        gate_up=at(w.gate_up.packed), down=at(w.down.packed), qkv_bias=w.qkv.shift,
        output_bias=w.output.shift, gate_up_bias=w.gate_up.shift, down_bias=w.down.shift,
        window=w.window,
    )  # fmt: skip
