"""A draft round of an EAGLE layer: prefill of new pairs, then one pass a level of the drafts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.windows import Windows
from longtail.model.graphs import GraphedPass, GraphPool
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.ops import Places
from longtail.model.rope import Rotation
from longtail.speculation.drafter import Draftable
from longtail.speculation.grow import Frontier, Walker


@final
class NodePlaces:
    """Assigns the slots after each request's text to nodes, in the order of expansion."""

    def __init__(self, rows: Int[Tensor, "requests"], ends: Int[Tensor, "requests"]) -> None:
        self._rows, self._ends = rows, ends
        self._visible = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
        self._num_placed = 0

    def roots(self) -> Places:
        """Return the places of the roots, the last slot of each text."""
        none = torch.zeros_like(self._rows)
        return Places(self._rows, self._ends - 1, self._ends, none, none)

    def place(self, frontier: Frontier) -> Places:
        """Place the next level; a node attends to the text, its ancestors and itself."""
        num, many = len(self._rows), frontier.per_request
        first = self._num_placed
        self._num_placed += many
        own = torch.arange(first, first + many, device=self._rows.device)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModules:
    """Modules of a draft round: the drafter's layer, and the target's embedding and head."""

    layer: EagleLayer
    embedding: nn.Embedding
    head: Linear
    window: int
    graphs: GraphPool | None
    """CUDA graphs in which passes are captured; None: passes run eagerly."""


class LayerQueries(NamedTuple):
    """Input of attention for pairs or nodes whose keys and values are stored."""

    stream: Float[Tensor, "pairs hidden"]
    """The residual stream."""
    queries: Float[Tensor, "pairs heads head_dim"]


class Scored(NamedTuple):
    """Output of the layer and the head for nodes."""

    logits: Float[Tensor, "nodes vocab"]
    feature: Float[Tensor, "nodes hidden"]


@final
class EaglePasses:
    """The layer and the head as passes over pairs, roots and nodes; captured on a GPU.

    A round stores keys and values of all pairs that lack them (prefill) and scores the last pair of
    each request, its root. A level of nodes does both in one pass. Padding writes its keys to the
    spare slot.
    """

    def __init__(self, modules: DraftModules, windows: Windows) -> None:
        self.modules, self._windows = modules, windows
        config, like, spare = modules.layer.config, windows.features, windows.spare_slot
        pair, place, node = (
            torch.tensor(numbers, device=like.device)
            for numbers in ([0, spare, 0, 0], [0, spare, 0, 0, 0], [0, 0, spare, 0, 0, 0])
        )
        stream = like.new_zeros(config.target.hidden_size)
        queries = like.new_zeros(config.shape.num_heads, config.shape.head_dim)
        angles = modules.layer.rotation(pair[:1])
        graphs = modules.graphs
        self._pairs = GraphedPass(graphs, self._prefill, [pair])
        self._roots = GraphedPass(graphs, self._score, [place, stream, queries])
        self._nodes = GraphedPass(
            graphs, self._store_and_score, [node, stream, angles.cos[0], angles.sin[0]]
        )

    def prefill(self, pairs: Int[Tensor, "4 pairs"]) -> LayerQueries:
        """Store keys and values of pairs (as `Pending.pairs`) and return their queries."""
        return LayerQueries(*self._pairs(pairs.T, key=self._storage))

    def score_roots(self, roots: LayerQueries, places: Places) -> Scored:
        """Attend from the roots, finish the layer and score their successors."""
        return Scored(*self._roots(torch.stack(places, 1), *roots, key=self._storage))

    def score_nodes(
        self,
        tokens: Int[Tensor, "nodes"],
        places: Places,
        features: Float[Tensor, "nodes hidden"],
        rotation: Rotation,
    ) -> Scored:
        """Pair each node's token with its parent's predicted feature; store, attend, score."""
        numbers = torch.stack((tokens, *places), 1)
        angles = rotation.cos, rotation.sin
        return Scored(*self._nodes(numbers, features, *angles, key=self._storage))

    @property
    def _storage(self) -> int:
        """Key of the present window tensors, which are replaced when rows are added."""
        return len(self._windows.keys)

    def _prefill(self, numbers: Int[Tensor, "pairs 4"]) -> LayerQueries:
        rows, slots, tokens, positions = numbers.T.contiguous()
        layer = self.modules.layer
        features = layer.fuse_features(self._windows.gather(rows, slots))
        return self._store(features, tokens, layer.rotation(positions), rows, slots)

    def _store_and_score(
        self, numbers: Int[Tensor, "nodes 6"], features: Tensor, cos: Tensor, sin: Tensor
    ) -> Scored:
        tokens, rows, slots = numbers.T[:3].contiguous()
        stored = self._store(features, tokens, Rotation(cos=cos, sin=sin), rows, slots)
        return self._score(numbers[:, 1:], *stored)

    def _store(
        self, features: Tensor, tokens: Tensor, rotation: Rotation, rows: Tensor, slots: Tensor
    ) -> LayerQueries:
        layer, kept = self.modules.layer, self._windows
        inputs = layer.make_input(features, self.modules.embedding(tokens))
        heads = layer.heads(inputs.attended, rotation)
        layer.kernels.store_rows(heads.keys, heads.values, kept.keys, kept.values, rows, slots)
        return LayerQueries(inputs.stream, heads.queries)

    def _score(self, numbers: Int[Tensor, "nodes 5"], stream: Tensor, queries: Tensor) -> Scored:
        layer, kept = self.modules.layer, self._windows
        places = Places(*numbers.T.contiguous())
        attended = layer.kernels.attend_rows(
            queries, kept.keys, kept.values, places, self.modules.window
        )
        output = layer.finish(stream, attended)
        return Scored(self.modules.head(output.scored), output.feature)


@final
class EagleWalker(Walker):
    """One draft round for requests whose windows reach up to their roots.

    Keys and values of nodes follow the window's slots in the order of expansion; the next round
    overwrites them.
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
        rotation = passes.modules.layer.rotation(positions)
        shape = (depth, len(requests), 1, -1)
        self._cos, self._sin = rotation.cos.view(shape), rotation.sin.view(shape)
        self._feature = windows.features[:0, 0]

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Prefill the pairs that lack keys and values, and score the successors of the roots."""
        started = time.perf_counter()
        pending = self._windows.catch_up(self._requests)
        stored = self._passes.prefill(pending.pairs)
        roots = LayerQueries(*(each[pending.lasts] for each in stored))
        logits, self._feature = self._passes.score_roots(roots, self._nodes.roots())
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Score the successors of the next level's nodes."""
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
        scored = self._passes.score_nodes(frontier.tokens, places, features, rotation)
        logits, self._feature = scored
        self.seconds += time.perf_counter() - started
        return logits
