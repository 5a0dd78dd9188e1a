"""The EAGLE drafter (EAGLE-1 and EAGLE-3), from features that the engine captured.

    observe     features of new tokens ---> Windows
    propose     prefill        new pairs  -> fc, keys, values     (one pass, all requests)
                root           root pairs -> attention, head      -> children of the root
                each level     nodes      -> attention, head      -> children of the nodes

The embedding and the LM head are the target's own modules, so they follow every policy update.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.window_cache import Windows
from longtail.drafter.weights import drafting_head, load_parameters
from longtail.model.kernels.draft import EagleChains
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.ops import NATIVE_HEAD_DIMS, Places, text_places
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Draftable, Noise, Observed, Taps
from longtail.speculation.grow import Frontier, GrowingDrafter, Walker
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree


@final
class EagleDrafter(GrowingDrafter):
    """Drafts with an EAGLE layer for one target; the layer is packed and belongs to the drafter.

    `head` replaces the target's, for published drafters that have one.
    """

    def __init__(
        self,
        layer: EagleLayer,
        target: Transformer,
        *,
        draft_ids: Int[Tensor, "draft_vocab"] | None = None,
        head: Float[Tensor, "draft_vocab hidden"] | None = None,
    ) -> None:
        super().__init__(draft_ids)
        self._config, self._target, self._own_head = layer.config, target, head
        self.windows = Windows(layer.config, target.dtype)
        self._layer = self._packed(layer)
        self._gather_head()

    @property
    def taps(self) -> Taps:
        """Features of the recipe."""
        return self._config.taps

    @property
    def lookback(self) -> int:
        """Window in tokens."""
        return self._config.window

    def refresh(self) -> None:
        """Drop the features of the old policy, and copy the draft vocabulary's head rows."""
        self.windows.clear()
        self._gather_head()

    @torch.inference_mode()
    def _gather_head(self) -> None:
        self._head = drafting_head(self._target, self._draft_ids, self._own_head)
        # Made at the first draft: only then is the target certain to be packed.
        self.__dict__.pop("_kernel", None)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the layer; the confidence curve is kept, and adapts within a few steps."""
        dtype = next((each.dtype for each in weights.values() if each.is_floating_point()), None)
        layer = EagleLayer(self._config).to(self._target.device, dtype or self._layer.dtype)
        load_parameters(layer, weights)
        self._layer = self._packed(layer)
        self.windows.restart()
        self._gather_head()

    def _packed(self, layer: EagleLayer) -> EagleLayer:
        """Prepare a trained layer for drafting, in the target's dtype."""
        layer.fold()
        layer.to(self._target.dtype).eval()
        layer.pack()
        return layer

    @cached_property
    def _kernel(self) -> EagleChains | None:
        """The native draft round for the present weights, if this machine supports one."""
        own, shape, head = self._layer, self._config.shape, self._head.native
        mlp, eagle3 = own.feed_forward, self._config.recipe == "eagle3"
        linear = {"fc": own.fc, "qkv": own.qkv, "output": own.output}
        linear |= {"gate_up": mlp.gate_up, "down": mlp.down}
        packed = {name: each.native for name, each in linear.items()}
        if head is None or None in packed.values() or own.config.norm_before_residual:
            return None
        if shape.head_dim not in NATIVE_HEAD_DIMS:
            return None
        names = ("embedding_norm", "feature_norm", "norm") if eagle3 else ()
        norms = {n: getattr(own, n).weight.detach() for n in ("feed_forward_norm", *names)}
        return EagleChains(
            own.rope, head, self._draft_ids, eagle3=eagle3, hidden=shape.hidden_size,
            inner_size=shape.intermediate_size, heads=shape.num_heads, kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, feature_size=own.config.feature_size, window=own.config.window,
            eps=shape.norm_eps, embedding=self._target.embedding.weight.detach(), **packed, **norms,
        )  # fmt: skip

    @torch.inference_mode()
    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Store the features of new tokens."""
        assert features is not None, "EAGLE reads the target's features"
        if seen:
            self.windows.observe(seen, features)

    def forget(self, request_id: str) -> None:
        """Free the request's window."""
        self.windows.forget(request_id)

    def _walker(self, requests: Sequence[Draftable]) -> Walker:
        return _EagleWalker(self._layer, self._target, self._head, self.windows, requests)

    def _chains(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree] | None:
        if self._kernel is None:
            return None
        kept = self.windows.features, self.windows.keys, self.windows.values
        pending = self.windows.catch_up(requests)
        return self._kernel.run(requests, strategy, noise, self.curve, pending, kept)

    def _is_observed(self, request: Draftable) -> bool:
        window = self.windows.of.get(request.request_id)
        return window is not None and window.next_token == len(request.tokens) - 1


_Stored = tuple[Float[Tensor, "pairs hidden"], Float[Tensor, "pairs heads head_dim"]]
"""Residual stream and queries of pairs whose keys and values are stored."""


@final
class _EagleWalker(Walker):
    """One draft round for requests whose windows reach up to their roots.

    Keys and values of nodes follow the window's slots in the order of expansion; the next round
    overwrites them.
    """

    def __init__(
        self,
        layer: EagleLayer,
        target: Transformer,
        head: Linear,
        windows: Windows,
        requests: Sequence[Draftable],
    ) -> None:
        self._layer, self._target, self._head = layer, target, head
        self._windows, self._requests = windows, requests
        states = [windows.of[each.request_id] for each in requests]
        self._rows = torch.tensor([state.row for state in states])
        self._ends = torch.tensor([state.end for state in states])
        self._visible, self._num_placed = torch.zeros(len(states), 1, dtype=torch.int64), 0
        self._positions = torch.tensor([state.next_token - 1 for state in states])
        self._feature = windows.features[:0, 0]

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Prefill the pairs that lack keys and values, and score the successors of the roots."""
        pending = self._windows.catch_up(self._requests)
        rows, slots, tokens, positions = pending.pairs
        layer = self._layer
        features = layer.fuse_features(self._windows.features[rows, slots])
        stored = self._store(features, tokens, positions, text_places(rows, slots))
        stream, queries = (each[pending.lasts] for each in stored)
        return self._score((stream, queries), text_places(self._rows, self._ends - 1))

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Score the successors of the next level's nodes: pair each with its parent's feature."""
        features, many = self._feature, frontier.per_request
        positions = (self._positions + frontier.depth).repeat_interleave(many)
        if many > 1:
            first = torch.arange(len(self._requests)).repeat_interleave(many)
            features = features[first * (len(features) // len(self._requests)) + frontier.parents]
        places = self._place(frontier)
        stored = self._store(features, frontier.tokens, positions, places)
        return self._score(stored, places)

    def _place(self, frontier: Frontier) -> Places:
        """Place the next level after each sequence; a node sees it, its ancestors and itself."""
        num, many, first = len(self._rows), frontier.per_request, self._num_placed
        self._num_placed += many
        own = torch.arange(first, first + many)
        above = self._visible.gather(1, frontier.parents.view(num, many))
        self._visible = above | (1 << own)
        ends = self._ends.repeat_interleave(many)
        return Places(
            rows=self._rows.repeat_interleave(many),
            slots=ends + own.repeat(num),
            contexts=ends,
            depths=torch.full_like(ends, frontier.depth),
            visible=self._visible.flatten(),
        )

    def _store(
        self, features: Tensor, tokens: Tensor, positions: Tensor, places: Places
    ) -> _Stored:
        """Store keys and values of pairs, and return their queries."""
        layer, kept = self._layer, self._windows
        stream, attended = layer.make_input(features, self._target.embedding(tokens))
        heads = layer.heads(attended, layer.rotation(positions))
        layer.kernels.store_rows(heads.keys, heads.values, kept.keys, kept.values, places)
        return stream, heads.queries

    def _score(self, stored: _Stored, places: Places) -> Float[Tensor, "pairs vocab"]:
        """Attend, finish the layer, keep its features and score the successors."""
        layer, kept, (stream, queries) = self._layer, self._windows, stored
        attended = layer.kernels.attend_rows(
            queries, kept.keys, kept.values, places, layer.config.window
        )
        output = layer.finish(stream, attended)
        self._feature = output.feature
        return self._head(output.scored)
