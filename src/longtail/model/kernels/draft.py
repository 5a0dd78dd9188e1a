"""Calls draft.c: a round of EAGLE drafting, catch-up and drafts of all requests, in one call.

What it computes is defined by `drafter.eagle.layer` and `speculation.grow`; here are only pointers,
their order, and the tensors that keep them alive.
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
    """An EAGLE layer as draft.c reads it; norms that a recipe lacks are None."""

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
    """Whom to draft for; pairs are those that lack keys and values, request by request."""

    pairs: Int[Tensor, "4 pairs"]
    """Their rows, slots, tokens and positions."""
    lasts: Int[Tensor, "requests"]
    """Which pair is each request's root."""
    furthest: int
    """Greatest position among the pairs."""
    depth: int
    """The deepest node of any request."""
    depths: Sequence[int]
    """The deepest node of each."""
    strategy: Strategy
    """Its depth is not read; one node of a level is drafted on, of one or two children."""
    confidences: Sequence[float]
    """Of margins from edge i - 1 up to edge i, one more than there are edges."""
    noise: Float[Tensor, "requests depth head_size"] | None
    inverse_temperatures: Float[Tensor, "requests"]
    """0 where a request is greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """The nodes of all requests' drafts, one request's after the other's.

    Example: two requests, a chain of one node, then one of two with the second's sibling:
    counts (1, 3), tokens (5, 6, 7, 8), parents (0, 0, 1, 1)
    """

    counts: Sequence[int]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Node numbers of the same draft, 0 the root."""
    margins: tuple[float, ...]
    reach: tuple[float, ...]


@final
class ChainKernel:
    """draft.c for one set of weights."""

    def __init__(self, weights: ChainWeights, rope: Rope, edges: Sequence[float]) -> None:
        """`edges` are those between the bins of margins, rising."""
        function = native.chains(weights.embedding.dtype)
        assert function is not None, "ask `native.chains` first"
        self._function, self._weights, self._rope = function, weights, rope
        self._edges = (_DOUBLE * len(edges))(*edges)
        self._cos = self._sin = torch.empty(0, weights.head_dim)
        self._scratch = weights.embedding.new_empty(0)
        self._layer = self._point()

    def run(
        self,
        asked: ChainRound,
        features: Float[Tensor, "rows slots features"],
        keys: Float[Tensor, "rows kv_slots kv_heads head_dim"],
        values: Float[Tensor, "rows kv_slots kv_heads head_dim"],
    ) -> Chains:
        """Compute the pairs' keys and values, then draft."""
        w, requests, pairs = self._weights, len(asked.lasts), asked.pairs.shape[1]
        strategy, thresholds = asked.strategy, asked.strategy.thresholds
        room = requests * asked.depth * strategy.width
        assert strategy.num_expanded == 1, "draft.c drafts on one node of a level"
        assert strategy.width <= 2, "and that has one sibling"
        assert len(asked.confidences) == len(self._edges) + 1, "edges lie between bins"
        assert len(asked.depths) == requests, "each has its own deepest node"
        assert asked.pairs.is_contiguous(), "draft.c reads dense rows"
        assert w.embedding.dtype == features.dtype == keys.dtype, "one dtype for all"
        self._make_room(asked)
        self._layer.threads = torch.get_num_threads()
        places = (_INT * (7 * requests))()
        counts, depths = (_INT * requests)(), (_INT * requests)(*asked.depths)
        drafted, parents = (_INT * room)(), (_INT * room)()
        margins, reach = (_DOUBLE * room)(), (_DOUBLE * room)()
        confidences = (_DOUBLE * len(asked.confidences))(*asked.confidences)
        first, at = asked.pairs.data_ptr(), ctypes.addressof
        rows, slots, text, positions = (first + row * pairs * 8 for row in range(4))
        call = _Round(
            requests=requests, pairs=pairs, depth=asked.depth, width=strategy.width,
            size=strategy.num_nodes, bins=len(confidences), verify=thresholds.verify,
            extend=thresholds.expand, level=thresholds.level, rows=rows, slots=slots, tokens=text,
            positions=positions, lasts=asked.lasts.data_ptr(), depths=at(depths),
            features=features.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(),
            feature_stride=features.stride(0), kv_stride=keys.stride(0),
            noise=None if asked.noise is None else asked.noise.data_ptr(),
            inverse_temperatures=asked.inverse_temperatures.data_ptr(), edges=at(self._edges),
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

    def _point(self) -> _Layer:
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

    def _make_room(self, asked: ChainRound) -> None:
        """Have angles for the furthest position, and space to work in."""
        w = self._weights
        furthest = asked.furthest + asked.depth + 1
        if furthest > len(self._cos):
            positions = torch.arange(max(furthest, 3 * len(self._cos) // 2, 1024))
            rotation = self._rope.rotation(positions, torch.float32)
            self._cos, self._sin = rotation.cos[:, 0], rotation.sin[:, 0]
            self._layer = self._point()
        hidden, most = w.embedding.shape[1], max(asked.pairs.shape[1], len(asked.lasts))
        projected = (w.heads + 2 * w.kv_heads) * w.head_dim
        # 2 float32 a dimension of cos and sin are 4 of a 2-byte type
        a_pair = w.feature_size + 5 * hidden + projected + 4 * w.head_dim
        a_request = w.heads * w.head_dim + 2 * hidden + 3 * w.inner_size + w.head_size
        needed = most * (a_pair + a_request) + 64
        if self._scratch.numel() < needed:
            self._scratch = w.embedding.new_empty(2 * needed)
