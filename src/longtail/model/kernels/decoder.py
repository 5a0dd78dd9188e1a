"""Interface to decoder.c: one call runs all layers of a decoder over rows of a contiguous cache.

`model.transformer` defines the computation, which runs layer by layer where this does not; the bits
are the same. This module passes pointers and keeps their tensors alive.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, final

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


@final
class NativeDecoder:
    """The function of decoder.c for one set of weights."""

    def __init__(
        self, layers: Sequence[Mapping[str, Any]], norm: Float[Tensor, "hidden"], **sizes: Any
    ) -> None:
        """Take the fields of each `_Layer` (norms or None, products, window) and of `_Decoder`."""
        functions = native.functions(norm.dtype)
        assert functions is not None, "layers are packed only for a product that runs here"
        self._function, self._weights = functions["decode"], (layers, norm)
        self._layers = (_Layer * len(layers))(*map(_pointers, layers))
        counts = {"layers": len(layers), "hidden": len(norm)}
        made = native.structure(_Decoder, layer=self._layers, norm=norm, **counts, **sizes)
        self._per_token = 2 * (made.heads + made.kv_heads) * made.dim + len(norm) + 3 * made.inner
        self._decoder = made

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
        call = native.structure(
            _Step, tokens=tokens, threads=torch.get_num_threads(), stream=stream, normed=normed,
            cos=rotation.cos, sin=rotation.sin, cache=cache, layer_stride=cache.stride(0),
            value_stride=cache.stride(1), row_stride=cache.stride(2), **places._asdict(),
            taps=layers, num_taps=len(layers), feature_stride=size, features=features,
            scratch=scratch,
        )  # fmt: skip
        self._function(ctypes.byref(self._decoder), ctypes.byref(call))
        if taps.final and features is not None:
            features[:, -hidden:] = normed
        return normed, normed if taps.final and features is None else features


def _pointers(weights: Mapping[str, Any]) -> _Layer:
    products = {name: each for name, each in weights.items() if isinstance(each, NativeProduct)}
    biases = {f"{name}_bias": each.bias for name, each in products.items()}
    return native.structure(_Layer, **weights, **biases)
