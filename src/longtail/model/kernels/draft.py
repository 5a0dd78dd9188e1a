"""Interface to draft.c: one call runs a round of drafting for all requests.

`speculation.grow`, `drafter.eagle.layer` and `drafter.ridge.layer` define the computation; this
module passes pointers and keeps their tensors alive.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.model.kernels import native
from longtail.model.kernels.linear import NativeProduct
from longtail.model.rope import Rope
from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.drafter import Draftable, Noise
from longtail.speculation.grow import deepest
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree

_PTR, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_EDGES = (_DOUBLE * len(EDGES))(*EDGES)


class _Growth(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("requests", "depth", "width", "size", "vocab", "bins")),
        *((name, _DOUBLE) for name in ("verify", "expand", "level")),
        *((name, _PTR) for name in ("edges", "confidences", "draft_ids", "depths")),
        *((name, _PTR) for name in ("keys", "positions", "inverse_temperatures")),
        *((name, _PTR) for name in ("live", "counts", "drafted", "parents", "margins", "reach")),
    )


class _Eagle(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("eagle3", "hidden", "inner_size", "heads", "kv_heads")),
        *((name, _INT) for name in ("head_dim", "feature_size", "window")),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int),
        *((name, _PTR) for name in ("embedding", "fc", "qkv", "output", "gate_up", "down")),
        *((name, _PTR) for name in ("head", "embedding_norm", "feature_norm")),
        *((name, _PTR) for name in ("feed_forward_norm", "norm", "cos", "sin")),
    )


class _Pairs(ctypes.Structure):
    _fields_ = (
        ("pairs", _INT),
        *((name, _PTR) for name in ("rows", "slots", "tokens", "positions", "lasts")),
        *((name, _PTR) for name in ("features", "keys", "values")),
        *((name, _INT) for name in ("feature_stride", "kv_stride")),
        *((name, _PTR) for name in ("places", "scratch")),
    )


class _Ridge(ctypes.Structure):
    _fields_ = (
        ("hidden", _INT),
        ("threads", ctypes.c_int),
        *((name, _PTR) for name in ("embedding", "head", "streams", "transitions")),
    )


class _Chains:
    """A function of draft.c for one set of weights, and its call."""

    def __init__(self, name: str, head: NativeProduct, draft_ids: Int[Tensor, "draft"] | None):
        functions = native.functions(head.packed.dtype)
        assert functions is not None, "a head is packed only for a product that runs here"
        self._function, self._head, self._draft_ids = functions[name], head, draft_ids
        self._scratch = head.packed.new_empty(0)

    def _reserve(self, size: int) -> int:
        """Return the address of scratch memory of `size` elements."""
        if self._scratch.numel() < size:
            self._scratch = self._scratch.new_empty(2 * size)
        return self._scratch.data_ptr()

    def _grow(
        self,
        requests: Sequence[Draftable],
        strategy: Strategy,
        noise: Noise | None,
        curve: ConfidenceCurve,
        *inputs: Any,
    ) -> list[DraftTree]:
        """Draft for every request; `inputs` are the function's own."""
        assert strategy.num_expanded == 1, "draft.c expands one node per level"
        assert strategy.width <= 2, "a node has at most one sibling"
        num, depth, thresholds = len(requests), deepest(requests, strategy), strategy.thresholds
        room = num * depth * strategy.width
        table, temperatures = curve.table(), [each.sampling.temperature for each in requests]
        drafted, parents = (_INT * room)(), (_INT * room)()
        margins, reach = (_DOUBLE * room)(), (_DOUBLE * room)()
        counts = (_INT * num)()
        arrays = {
            "edges": _EDGES,
            "confidences": (_DOUBLE * len(table))(*table),
            "depths": (_INT * num)(*(each.max_depth for each in requests)),
            "keys": None if noise is None else (_INT * num)(*noise.keys),
            "positions": None if noise is None else (_INT * num)(*noise.positions),
            "inverse_temperatures": (ctypes.c_float * num)(
                *(1.0 / t if t else 0.0 for t in temperatures)
            ),
            "live": (_INT * (4 * num))(),
        }
        growth = native.structure(
            _Growth, requests=num, depth=depth, width=strategy.width, size=strategy.num_nodes,
            vocab=self._head.outputs, bins=len(table), verify=thresholds.verify,
            expand=thresholds.expand, level=thresholds.level, draft_ids=self._draft_ids, **arrays,
            counts=counts, drafted=drafted, parents=parents, margins=margins, reach=reach,
        )  # fmt: skip
        self._function(ctypes.byref(growth), *inputs)
        trees, end = [], 0
        for count in counts:
            start, end = end, end + count
            trees.append(
                DraftTree(
                    tokens=tuple(drafted[start:end]),
                    parents=tuple(parents[start:end]),
                    margins=tuple(margins[start:end]),
                    reach=tuple(reach[start:end]),
                )
            )
        return trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Pairs without keys and values, request by request; the last of each is its root pair."""

    pairs: Int[Tensor, "4 pairs"]
    """Row, slot, token (the one after the feature's) and position of each pair."""
    lasts: Int[Tensor, "requests"]
    """Index of each request's root pair."""
    furthest: int
    """Greatest position."""


@final
class EagleChains(_Chains):
    """Chains of an EAGLE layer."""

    def __init__(
        self,
        rope: Rope,
        head: NativeProduct,
        draft_ids: Int[Tensor, "draft"] | None,
        **layer: Any,
    ) -> None:
        """Take sizes and weights of a layer, without norms that its recipe lacks."""
        super().__init__("eagle_chains", head, draft_ids)
        self._weights, self._rope = layer, rope
        self._layer = native.structure(_Eagle, head=head, **layer)
        self._cos = self._sin = torch.empty(0, self._layer.head_dim)

    def run(
        self,
        requests: Sequence[Draftable],
        strategy: Strategy,
        noise: Noise | None,
        curve: ConfidenceCurve,
        pending: Pending,
        kept: tuple[Tensor, Tensor, Tensor],
    ) -> list[DraftTree]:
        """Compute the pairs' keys and values, then draft; `kept` are features, keys and values."""
        w, pairs, (features, keys, values) = self._layer, pending.pairs, kept
        assert pairs.is_contiguous(), "draft.c reads dense rows"
        assert self._scratch.dtype == features.dtype == keys.dtype, "all tensors have one dtype"
        self._reach(pending.furthest + deepest(requests, strategy) + 1)
        self._layer.threads = torch.get_num_threads()
        hidden, most = w.hidden, max(pairs.shape[1], len(requests))
        projected = (w.heads + 2 * w.kv_heads) * w.head_dim
        # 2 float32 per dimension for cos and sin take the bytes of 4 elements of a 2-byte type
        per_pair = w.feature_size + 5 * hidden + projected + 4 * w.head_dim
        per_request = w.heads * w.head_dim + 2 * hidden + 3 * w.inner_size + self._head.outputs
        places = (_INT * (4 * len(requests)))()
        rows, slots, tokens, positions = pairs
        inputs = native.structure(
            _Pairs, pairs=pairs.shape[1], rows=rows, slots=slots, tokens=tokens,
            positions=positions, lasts=pending.lasts, features=features, keys=keys, values=values,
            feature_stride=features.stride(0), kv_stride=keys.stride(0), places=places,
            scratch=self._reserve(most * (per_pair + per_request) + 64),
        )  # fmt: skip
        own = ctypes.byref(self._layer), ctypes.byref(inputs)
        return self._grow(requests, strategy, noise, curve, *own)

    def _reach(self, furthest: int) -> None:
        """Extend the angles to a position."""
        if furthest > len(self._cos):
            positions = torch.arange(max(furthest, 3 * len(self._cos) // 2, 1024))
            rotation = self._rope.rotation(positions, torch.float32)
            self._cos, self._sin = rotation.cos[:, 0], rotation.sin[:, 0]
            self._layer.cos, self._layer.sin = self._cos.data_ptr(), self._sin.data_ptr()


@final
class RidgeChains(_Chains):
    """Chains of a ridge layer: its streams, and the transitions of the slots from the second on."""

    def __init__(
        self,
        streams: Sequence[NativeProduct],
        transitions: Sequence[NativeProduct],
        embedding: Float[Tensor, "vocab hidden"],
        head: NativeProduct,
        draft_ids: Int[Tensor, "draft"] | None,
    ) -> None:
        super().__init__("ridge_chains", head, draft_ids)
        self._weights = embedding, streams, transitions
        self._lists = [
            (_PTR * len(each))(*(product.data_ptr() for product in each))
            for each in (streams, transitions)
        ]
        first, second = self._lists
        self._layer = native.structure(
            _Ridge, hidden=embedding.shape[1], embedding=embedding, head=head, streams=first,
            transitions=second,
        )  # fmt: skip

    def run(
        self,
        requests: Sequence[Draftable],
        strategy: Strategy,
        noise: Noise | None,
        curve: ConfidenceCurve,
        states: Float[Tensor, "requests hidden"],
    ) -> list[DraftTree]:
        """Draft after the states before the roots."""
        num, hidden = states.shape
        assert states.is_contiguous(), "draft.c reads dense rows"
        assert states.dtype == self._scratch.dtype, "all tensors have one dtype"
        assert strategy.depth <= len(self._lists[0]), "a block has a slot per token"
        self._layer.threads = torch.get_num_threads()
        roots = (_INT * num)(*(each.tokens[-1] for each in requests))
        scratch = self._reserve(num * (5 * hidden + self._head.outputs))
        own = ctypes.byref(self._layer), states, roots, scratch
        return self._grow(requests, strategy, noise, curve, *own)
