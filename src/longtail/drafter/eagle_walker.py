"""One drafting round of an EAGLE layer: catch up, then down the drafts level by level."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longtail.drafter.eagle import EagleLayer
from longtail.drafter.nodes import NodePlaces
from longtail.drafter.windows import Windows
from longtail.model.graphs import GraphedPass, GraphPool
from longtail.model.kernels import Places, QueryKeyValue
from longtail.model.linear import Linear
from longtail.model.rope import Rotation
from longtail.speculation.drafter import Draftable
from longtail.speculation.grow import Frontier, Walker

MAX_NODES_AT_ONCE = 512
"""More nodes keep the device busy without a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleParts:
    """What a round computes with: the drafter's layer, and the target's embedding and head."""

    layer: EagleLayer
    embedding: nn.Embedding
    head: Linear
    window: int
    graphs: GraphPool | None
    """Where passes over nodes are captured; None: they run as they are."""


class Scored(NamedTuple):
    """What the layer and the head say of nodes."""

    logits: Float[Tensor, "nodes vocab"]
    feature: Float[Tensor, "nodes hidden"]


@final
class NodePass:
    """The layer and the head over the nodes of one level, for as long as the parts stay."""

    def __init__(self, parts: EagleParts, windows: Windows) -> None:
        self.parts, self._windows = parts, windows
        self._graphed: GraphedPass | None = None
        if parts.graphs is not None:
            shape, like = parts.layer.config.target, windows.features
            nobody = torch.tensor([0, 0, windows.spare_slot, 0, 0, 0], device=like.device)
            hidden = like.new_zeros(shape.hidden_size)
            angles = parts.layer.rotation(nobody[:1])
            self._graphed = GraphedPass(
                parts.graphs,
                self._captured,
                [nobody, hidden, angles.cos[0], angles.sin[0]],
                max_tokens=MAX_NODES_AT_ONCE,
            )

    def run(
        self,
        tokens: Int[Tensor, "nodes"],
        places: Places,
        features: Float[Tensor, "nodes hidden"],
        rotation: Rotation,
    ) -> Scored:
        """Pair each node's token with the feature predicted at its parent; store, attend, score."""
        graphed = self._graphed
        if graphed is None or len(tokens) > graphed.max_tokens:
            return self._compute(tokens, places, features, rotation)
        numbers = torch.stack((tokens, *places), 1)
        # Keys and values move when there are more rows.
        where = self._windows.keys.data_ptr()
        return Scored(*graphed(numbers, features, rotation.cos, rotation.sin, about=where))

    def _captured(self, numbers: Tensor, features: Tensor, cos: Tensor, sin: Tensor) -> Scored:
        tokens, *places = numbers.T.contiguous()
        return self._compute(tokens, Places(*places), features, Rotation(cos=cos, sin=sin))

    def _compute(
        self, tokens: Tensor, places: Places, features: Tensor, rotation: Rotation
    ) -> Scored:
        layer = self.parts.layer
        entered = layer.enter(features, self.parts.embedding(tokens))
        heads = layer.heads(entered.attended, rotation)
        self.store(heads, places.rows, places.slots)
        return self.leave(entered.stream, heads.queries, places)

    def store(
        self, heads: QueryKeyValue, rows: Int[Tensor, "pairs"], slots: Int[Tensor, "pairs"]
    ) -> None:
        """Keep keys and values."""
        kept, kernels = self._windows, self.parts.layer.kernels
        kernels.store_rows(heads.keys, heads.values, kept.keys, kept.values, rows, slots)

    def leave(
        self,
        stream: Float[Tensor, "nodes hidden"],
        queries: Float[Tensor, "nodes heads head_dim"],
        places: Places,
    ) -> Scored:
        """Attend, finish the layer, score."""
        layer, kept = self.parts.layer, self._windows
        attended = layer.kernels.attend_rows(
            queries, kept.keys, kept.values, places, self.parts.window
        )
        left = layer.leave(stream, attended)
        return Scored(self.parts.head(left.scored), left.feature)


@final
class EagleWalker(Walker):
    """Walks down the drafts of requests whose windows reach up to their roots.

    Keys and values of nodes lie behind the window's slots in the order in which the nodes are
    drafted on; nothing reads them in the next round.
    """

    def __init__(
        self, node_pass: NodePass, windows: Windows, requests: Sequence[Draftable], depth: int
    ) -> None:
        self._pass, self._windows, self._requests = node_pass, windows, requests
        states = [windows.of(each.request_id) for each in requests]
        rows, ends = [state.row for state in states], [state.end for state in states]
        roots = [[state.next_token - 1 + d for state in states] for d in range(depth)]
        device = windows.features.device
        self._nodes = NodePlaces(*torch.tensor([rows, ends], device=device))
        positions = torch.tensor(roots, device=device).flatten()
        rotation = node_pass.parts.layer.rotation(positions)
        shape = (depth, len(requests), 1, -1)
        self._cos, self._sin = rotation.cos.view(shape), rotation.sin.view(shape)
        self._feature = windows.features[:0, 0]
        self.seconds = 0.0
        """In forward passes."""

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Compute keys and values of all pairs that lack them, and score behind the last ones."""
        started = time.perf_counter()
        parts, windows = self._pass.parts, self._windows
        layer, pending = parts.layer, windows.catch_up(self._requests)
        rows, slots, tokens, positions = pending.pairs
        features = layer.fuse_features(windows.features[rows, slots])
        entered = layer.enter(features, parts.embedding(tokens))
        heads = layer.heads(entered.attended, layer.rotation(positions))
        self._pass.store(heads, rows, slots)
        stream, queries = entered.stream[pending.lasts], heads.queries[pending.lasts]
        logits, self._feature = self._pass.leave(stream, queries, self._nodes.roots())
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Pair each node's token with the feature that was predicted at its parent."""
        started = time.perf_counter()
        depth, many = frontier.depth, frontier.per_request
        features = self._feature
        cos, sin = self._cos[depth], self._sin[depth]
        if many > 1:
            first = torch.arange(len(self._requests), device=features.device)
            above = len(features) // len(self._requests)
            features = features[first.repeat_interleave(many) * above + frontier.parents]
            cos, sin = cos.repeat_interleave(many, 0), sin.repeat_interleave(many, 0)
        places = self._nodes.place(frontier)
        rotation = Rotation(cos=cos, sin=sin)
        logits, self._feature = self._pass.run(frontier.tokens, places, features, rotation)
        self.seconds += time.perf_counter() - started
        return logits
