"""Interface to draft.c: one call runs a round of EAGLE drafting for all requests.

`drafter.eagle.layer` and `speculation.grow` define the computation; this module passes pointers and
keeps their tensors alive.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.model.kernels import native
from longtail.model.kernels.linear import NativeProduct
from longtail.model.rope import Rope
from longtail.speculation.strategy import Strategy

_PTR, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("eagle3", "hidden", "inner", "heads", "kv_heads", "dim")),
        *((name, _INT) for name in ("features", "vocab", "window")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int),
        *((name, _PTR) for name in ("embedding", "fc", "qkv", "output", "gate_up", "down")),
        *((name, _PTR) for name in ("head", "embedding_norm", "feature_norm")),
        *((name, _PTR) for name in ("feed_forward_norm", "norm", "cos", "sin", "draft_ids")),
    )


class _Round(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("requests", "pairs", "depth", "width", "size", "bins")),
        *((name, _DOUBLE) for name in ("verify", "extend", "level")),
        *((name, _PTR) for name in ("rows", "slots", "tokens", "positions", "lasts", "depths")),
        *((name, _PTR) for name in ("features", "keys", "values")),
        *((name, _INT) for name in ("feature_stride", "kv_stride")),
        *((name, _PTR) for name in ("noise", "inverse_temperatures", "edges", "confidences")),
        *((name, _PTR) for name in ("scratch", "places", "counts", "drafted", "parents")),
        *((name, _PTR) for name in ("margins", "reach")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainWeights:
    """Weights of an EAGLE layer for draft.c; norms that a recipe lacks are None."""

    eagle3: bool
    heads: int
    kv_heads: int
    head_dim: int
    feature_size: int
    window: int
    eps: float
    embedding: Float[Tensor, "vocab hidden"]
    fc: NativeProduct
    qkv: NativeProduct
    output: NativeProduct
    gate_up: NativeProduct
    down: NativeProduct
    head: NativeProduct
    head_size: int
    inner_size: int
    embedding_norm: Float[Tensor, "hidden"] | None
    feature_norm: Float[Tensor, "hidden"] | None
    feed_forward_norm: Float[Tensor, "hidden"]
    norm: Float[Tensor, "hidden"] | None
    draft_ids: Int[Tensor, "head_size"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRound:
    """Inputs of a round. Pairs are the positions that lack keys and values, request by request."""

    pairs: Int[Tensor, "4 pairs"]
    """Rows, slots, tokens and positions of the pairs."""
    lasts: Int[Tensor, "requests"]
    """Index of the pair that is each request's root."""
    furthest: int
    """Largest position of a pair."""
    depth: int
    """Maximum depth of all requests."""
    depths: Sequence[int]
    """Maximum depth of each request."""
    strategy: Strategy
    """Its depth is not used; one node per level is expanded, with one or two children."""
    confidences: Sequence[float]
    """Confidence of margins from edge i - 1 to edge i; one more than there are edges."""
    noise: Int[Tensor, "2 requests"] | None
    """Noise key and first drafted position of each request; None without noise."""
    inverse_temperatures: Float[Tensor, "requests"]
    """Inverse temperature of each request; 0 if it is greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """Nodes of all requests' drafts, request by request.

    Example: two requests, a chain of one node, then one of two with the second's sibling:
    counts (1, 3), tokens (5, 6, 7, 8), parents (0, 0, 1, 1)
    """

    counts: Sequence[int]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Parent of each node, as a node number of its own draft; 0 is the root."""
    margins: tuple[float, ...]
    reach: tuple[float, ...]


@final
class ChainKernel:
    """The function of draft.c for one set of weights."""

    def __init__(self, weights: ChainWeights, rope: Rope, edges: Sequence[float]) -> None:
        """`edges` are the rising boundaries between the bins of margins."""
        function = native.chains(weights.embedding.dtype)
        assert function is not None, "check `native.chains` first"
        self._function, self._weights, self._rope = function, weights, rope
        self._edges = (_DOUBLE * len(edges))(*edges)
        self._cos = self._sin = torch.empty(0, weights.head_dim)
        self._scratch = weights.embedding.new_empty(0)
        self._layer = self._pointers()

    def run(
        self,
        inputs: ChainRound,
        features: Float[Tensor, "rows slots features"],
        keys: Float[Tensor, "rows kv_slots kv_heads head_dim"],
        values: Float[Tensor, "rows kv_slots kv_heads head_dim"],
    ) -> Chains:
        """Compute the pairs' keys and values, then draft."""
        w, requests, pairs = self._weights, len(inputs.lasts), inputs.pairs.shape[1]
        strategy, thresholds = inputs.strategy, inputs.strategy.thresholds
        room = requests * inputs.depth * strategy.width
        assert strategy.num_expanded == 1, "draft.c expands one node per level"
        assert strategy.width <= 2, "a node has at most one sibling"
        assert len(inputs.confidences) == len(self._edges) + 1, "edges are between bins"
        assert len(inputs.depths) == requests, "every request has its own maximum depth"
        assert inputs.pairs.is_contiguous(), "draft.c reads dense rows"
        assert w.embedding.dtype == features.dtype == keys.dtype, "all tensors have one dtype"
        self._reserve(inputs)
        self._layer.threads = torch.get_num_threads()
        places = (_INT * (7 * requests))()
        counts, depths = (_INT * requests)(), (_INT * requests)(*inputs.depths)
        drafted, parents = (_INT * room)(), (_INT * room)()
        margins, reach = (_DOUBLE * room)(), (_DOUBLE * room)()
        confidences = (_DOUBLE * len(inputs.confidences))(*inputs.confidences)
        first, at = inputs.pairs.data_ptr(), ctypes.addressof
        rows, slots, text, positions = (first + row * pairs * 8 for row in range(4))
        call = _Round(
            requests=requests, pairs=pairs, depth=inputs.depth, width=strategy.width,
            size=strategy.num_nodes, bins=len(confidences), verify=thresholds.verify,
            extend=thresholds.expand, level=thresholds.level, rows=rows, slots=slots, tokens=text,
            positions=positions, lasts=inputs.lasts.data_ptr(), depths=at(depths),
            features=features.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(),
            feature_stride=features.stride(0), kv_stride=keys.stride(0),
            noise=None if inputs.noise is None else inputs.noise.data_ptr(),
            inverse_temperatures=inputs.inverse_temperatures.data_ptr(), edges=at(self._edges),
            confidences=at(confidences), scratch=self._scratch.data_ptr(), places=at(places),
            counts=at(counts), drafted=at(drafted), parents=at(parents), margins=at(margins),
            reach=at(reach),
        )  # fmt: skip
        self._function(ctypes.byref(self._layer), ctypes.byref(call))
        end = sum(counts)
        return Chains(
            counts=counts[:], tokens=tuple(drafted[:end]), parents=tuple(parents[:end]),
            margins=tuple(margins[:end]), reach=tuple(reach[:end]),
        )  # fmt: skip

    def _pointers(self) -> _Layer:
        w = self._weights

        def at(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        return _Layer(
            eagle3=w.eagle3, hidden=w.embedding.shape[1], inner=w.inner_size, heads=w.heads,
            kv_heads=w.kv_heads, dim=w.head_dim, features=w.feature_size, vocab=w.head_size,
            window=w.window, eps=w.eps, threads=1, embedding=at(w.embedding),
            fc=at(w.fc.packed), qkv=at(w.qkv.packed), output=at(w.output.packed),
            gate_up=at(w.gate_up.packed), down=at(w.down.packed), head=at(w.head.packed),
            embedding_norm=at(w.embedding_norm), feature_norm=at(w.feature_norm),
            feed_forward_norm=at(w.feed_forward_norm), norm=at(w.norm), cos=at(self._cos),
            sin=at(self._sin), draft_ids=at(w.draft_ids),
        )  # fmt: skip

    def _reserve(self, inputs: ChainRound) -> None:
        """Extend the angles to the largest position, and the scratch memory to its size."""
        w = self._weights
        furthest = inputs.furthest + inputs.depth + 1
        if furthest > len(self._cos):
            positions = torch.arange(max(furthest, 3 * len(self._cos) // 2, 1024))
            rotation = self._rope.rotation(positions, torch.float32)
            self._cos, self._sin = rotation.cos[:, 0], rotation.sin[:, 0]
            self._layer = self._pointers()
        hidden, most = w.embedding.shape[1], max(inputs.pairs.shape[1], len(inputs.lasts))
        projected = (w.heads + 2 * w.kv_heads) * w.head_dim
        # 2 float32 per dimension for cos and sin take the bytes of 4 elements of a 2-byte type
        per_pair = w.feature_size + 5 * hidden + projected + 4 * w.head_dim
        per_request = w.heads * w.head_dim + 2 * hidden + 3 * w.inner_size + w.head_size
        needed = most * (per_pair + per_request) + 64
        if self._scratch.numel() < needed:
            self._scratch = w.embedding.new_empty(2 * needed)
