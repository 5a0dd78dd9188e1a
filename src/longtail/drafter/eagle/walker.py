"""One drafting round of an EAGLE layer: catch up, then down the drafts level by level."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.nodes import NodePlaces
from longtail.drafter.eagle.windows import Windows
from longtail.model.graphs import GraphedPass, GraphPool
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.ops import Places
from longtail.model.rope import Rotation
from longtail.speculation.drafter import Draftable
from longtail.speculation.grow import Frontier, Walker


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModules:
    """What a round computes with: the drafter's layer, and the target's embedding and head."""

    layer: EagleLayer
    embedding: nn.Embedding
    head: Linear
    window: int
    graphs: GraphPool | None
    """Where passes are captured; None: they run as they are."""


class LayerQueries(NamedTuple):
    """Pairs or nodes whose keys and values are kept, as they go into attention."""

    stream: Float[Tensor, "pairs hidden"]
    """The residual stream."""
    queries: Float[Tensor, "pairs heads head_dim"]


class Scored(NamedTuple):
    """What the layer and the head say of nodes."""

    logits: Float[Tensor, "nodes vocab"]
    feature: Float[Tensor, "nodes hidden"]


@final
class EaglePasses:
    """The layer and the head over pairs, roots and nodes, for as long as the parts stay.

    A round enters all pairs that lack keys and values, and leaves with the last one of each
    request, its root; each level of nodes does both at once. Padding's keys go to the spare slot.
    """

    def __init__(self, parts: DraftModules, windows: Windows) -> None:
        self.parts, self._windows = parts, windows
        config, like, spare = parts.layer.config, windows.features, windows.spare_slot
        pair, place, node = (
            torch.tensor(numbers, device=like.device)
            for numbers in ([0, spare, 0, 0], [0, spare, 0, 0, 0], [0, 0, spare, 0, 0, 0])
        )
        stream = like.new_zeros(config.target.hidden_size)
        queries = like.new_zeros(config.shape.num_heads, config.shape.head_dim)
        angles = parts.layer.rotation(pair[:1])
        graphs = parts.graphs
        self._pairs = GraphedPass(graphs, self._prefill, [pair])
        self._roots = GraphedPass(graphs, self._score, [place, stream, queries])
        self._nodes = GraphedPass(
            graphs, self._compute_nodes, [node, stream, angles.cos[0], angles.sin[0]]
        )

    def prefill(self, pairs: Int[Tensor, "4 pairs"]) -> LayerQueries:
        """Compute pairs up to attention, and keep their keys and values; as `Pending.pairs`."""
        return LayerQueries(*self._pairs(pairs.T, about=self._storage))

    def score_roots(self, entered: LayerQueries, places: Places) -> Scored:
        """Attend, finish the layer, score."""
        return Scored(*self._roots(torch.stack(places, 1), *entered, about=self._storage))

    def score_nodes(
        self,
        tokens: Int[Tensor, "nodes"],
        places: Places,
        features: Float[Tensor, "nodes hidden"],
        rotation: Rotation,
    ) -> Scored:
        """Pair each node's token with the feature predicted at its parent; keep, attend, score."""
        numbers = torch.stack((tokens, *places), 1)
        angles = rotation.cos, rotation.sin
        return Scored(*self._nodes(numbers, features, *angles, about=self._storage))

    @property
    def _storage(self) -> int:
        """Names the tensors of the windows: there are others when there are more rows."""
        return len(self._windows.keys)

    def _prefill(self, numbers: Int[Tensor, "pairs 4"]) -> LayerQueries:
        rows, slots, tokens, positions = numbers.T.contiguous()
        layer = self.parts.layer
        features = layer.fuse_features(self._windows.gather(rows, slots))
        return self._store(features, tokens, layer.rotation(positions), rows, slots)

    def _compute_nodes(
        self, numbers: Int[Tensor, "nodes 6"], features: Tensor, cos: Tensor, sin: Tensor
    ) -> Scored:
        tokens, rows, slots = numbers.T[:3].contiguous()
        entered = self._store(features, tokens, Rotation(cos=cos, sin=sin), rows, slots)
        return self._score(numbers[:, 1:], *entered)

    def _store(
        self, features: Tensor, tokens: Tensor, rotation: Rotation, rows: Tensor, slots: Tensor
    ) -> LayerQueries:
        layer, kept = self.parts.layer, self._windows
        entered = layer.make_input(features, self.parts.embedding(tokens))
        heads = layer.heads(entered.attended, rotation)
        layer.kernels.store_rows(heads.keys, heads.values, kept.keys, kept.values, rows, slots)
        return LayerQueries(entered.stream, heads.queries)

    def _score(self, numbers: Int[Tensor, "nodes 5"], stream: Tensor, queries: Tensor) -> Scored:
        layer, kept = self.parts.layer, self._windows
        places = Places(*numbers.T.contiguous())
        attended = layer.kernels.attend_rows(
            queries, kept.keys, kept.values, places, self.parts.window
        )
        output = layer.finish(stream, attended)
        return Scored(self.parts.head(output.scored), output.feature)


@final
class EagleWalker(Walker):
    """Walks down the drafts of requests whose windows reach up to their roots.

    Keys and values of nodes lie behind the window's slots in the order in which the nodes are
    drafted on; nothing reads them in the next round.
    """

    def __init__(
        self, passes: EaglePasses, windows: Windows, requests: Sequence[Draftable], depth: int
    ) -> None:
        self._passes, self._windows, self._requests = passes, windows, requests
        states = [windows.of(each.request_id) for each in requests]
        rows, ends = [state.row for state in states], [state.end for state in states]
        roots = [[state.next_token - 1 + d for state in states] for d in range(depth)]
        device = windows.features.device
        self._nodes = NodePlaces(*torch.tensor([rows, ends], device=device))
        positions = torch.tensor(roots, device=device).flatten()
        rotation = passes.parts.layer.rotation(positions)
        shape = (depth, len(requests), 1, -1)
        self._cos, self._sin = rotation.cos.view(shape), rotation.sin.view(shape)
        self._feature = windows.features[:0, 0]
        self.seconds = 0.0
        """In forward passes."""

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Compute keys and values of all pairs that lack them, and score behind the last ones."""
        started = time.perf_counter()
        pending = self._windows.catch_up(self._requests)
        entered = self._passes.prefill(pending.pairs)
        roots = LayerQueries(*(each[pending.lasts] for each in entered))
        logits, self._feature = self._passes.score_roots(roots, self._nodes.roots())
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
        logits, self._feature = self._passes.score_nodes(
            frontier.tokens, places, features, rotation
        )
        self.seconds += time.perf_counter() - started
        return logits
