"""One drafting round of an EAGLE layer: catch up, then down the drafts level by level."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longtail.drafter.eagle import EagleLayer
from longtail.drafter.nodes import NodePlaces
from longtail.drafter.windows import Windows
from longtail.model.kernels import Places, QueryKeyValue
from longtail.model.linear import Linear
from longtail.model.rope import Rotation
from longtail.speculation.drafter import Draftable
from longtail.speculation.grow import Frontier, Walker


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleParts:
    """What a round computes with: the drafter's layer, and the target's embedding and head."""

    layer: EagleLayer
    embedding: nn.Embedding
    head: Linear
    window: int


@final
class EagleWalker(Walker):
    """Walks down the drafts of requests whose windows reach up to their roots.

    Keys and values of nodes lie behind the window's slots in the order in which the nodes are
    drafted on; nothing reads them in the next round.
    """

    def __init__(
        self, parts: EagleParts, windows: Windows, requests: Sequence[Draftable], depth: int
    ) -> None:
        self._parts, self._windows, self._requests = parts, windows, requests
        states = [windows.of(each.request_id) for each in requests]
        rows, ends = [state.row for state in states], [state.end for state in states]
        roots = [[state.next_token - 1 + d for state in states] for d in range(depth)]
        device = windows.features.device
        self._nodes = NodePlaces(*torch.tensor([rows, ends], device=device))
        positions = torch.tensor(roots, device=device).flatten()
        rotation = parts.layer.rotation(positions)
        shape = (depth, len(requests), 1, -1)
        self._cos, self._sin = rotation.cos.view(shape), rotation.sin.view(shape)
        self._feature = windows.features[:0, 0]
        self.seconds = 0.0
        """In forward passes."""

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Compute keys and values of all pairs that lack them, and score behind the last ones."""
        started = time.perf_counter()
        layer, windows = self._parts.layer, self._windows
        pending = windows.catch_up(self._requests)
        rows, slots, tokens, positions = pending.pairs
        features = layer.fuse_features(windows.features[rows, slots])
        entered = layer.enter(features, self._parts.embedding(tokens))
        heads = layer.heads(entered.attended, layer.rotation(positions))
        self._store(heads, rows, slots)
        stream, queries = entered.stream[pending.lasts], heads.queries[pending.lasts]
        logits = self._leave(stream, queries, self._nodes.roots())
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Pair each node's token with the feature that was predicted at its parent."""
        started = time.perf_counter()
        layer, depth, many = self._parts.layer, frontier.depth, frontier.per_request
        features = self._feature
        places = self._nodes.place(frontier)
        cos, sin = self._cos[depth], self._sin[depth]
        if many > 1:
            first = torch.arange(len(self._requests), device=features.device)
            above = len(features) // len(self._requests)
            features = features[first.repeat_interleave(many) * above + frontier.parents]
            cos, sin = cos.repeat_interleave(many, 0), sin.repeat_interleave(many, 0)
        entered = layer.enter(features, self._parts.embedding(frontier.tokens))
        heads = layer.heads(entered.attended, Rotation(cos=cos, sin=sin))
        self._store(heads, places.rows, places.slots)
        logits = self._leave(entered.stream, heads.queries, places)
        self.seconds += time.perf_counter() - started
        return logits

    def _store(self, heads: QueryKeyValue, rows: Tensor, slots: Tensor) -> None:
        kept, kernels = self._windows, self._parts.layer.kernels
        kernels.store_rows(heads.keys, heads.values, kept.keys, kept.values, rows, slots)

    def _leave(
        self,
        stream: Float[Tensor, "nodes hidden"],
        queries: Float[Tensor, "nodes heads head_dim"],
        places: Places,
    ) -> Float[Tensor, "nodes vocab"]:
        """Attend, finish the layer, score; keep the feature for the level below."""
        layer, kept = self._parts.layer, self._windows
        attended = layer.kernels.attend_rows(
            queries, kept.keys, kept.values, places, self._parts.window
        )
        left = layer.leave(stream, attended)
        self._feature = left.feature
        return self._parts.head(left.scored)
