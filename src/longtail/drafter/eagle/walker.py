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
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.ops import Places, text_places
from longtail.model.rope import Rotation
from longtail.speculation.drafter import Draftable
from longtail.speculation.grow import Frontier, Walker


@final
class NodePlaces:
    """Assigns the slots after each request's text to nodes, in the order of expansion."""

    def __init__(self, rows: Int[Tensor, "requests"], ends: Int[Tensor, "requests"]) -> None:
        self._rows, self._ends = rows, ends
        self._visible = torch.zeros(len(rows), 1, dtype=torch.int64)
        self._num_placed = 0

    def roots(self) -> Places:
        """Return the places of the roots, the last slot of each text."""
        return text_places(self._rows, self._ends - 1)

    def place(self, frontier: Frontier) -> Places:
        """Place the next level; a node attends to the text, its ancestors and itself."""
        num, many = len(self._rows), frontier.per_request
        first = self._num_placed
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModules:
    """Modules of a draft round: the drafter's layer, and the target's embedding and head."""

    layer: EagleLayer
    embedding: nn.Embedding
    head: Linear
    window: int


class LayerQueries(NamedTuple):
    """Input of attention for pairs or nodes whose keys and values are stored."""

    stream: Float[Tensor, "pairs hidden"]
    """The residual stream."""
    queries: Float[Tensor, "pairs heads head_dim"]


@final
class EagleWalker(Walker):
    """One draft round for requests whose windows reach up to their roots.

    A round stores keys and values of all pairs that lack them (prefill) and scores the last pair of
    each request, its root. A level of nodes does both in one pass. Keys and values of nodes follow
    the window's slots in the order of expansion; the next round overwrites them.
    """

    def __init__(
        self, modules: DraftModules, windows: Windows, requests: Sequence[Draftable]
    ) -> None:
        self._modules, self._windows, self._requests = modules, windows, requests
        states = [windows.of(each.request_id) for each in requests]
        rows, ends = [state.row for state in states], [state.end for state in states]
        self._nodes = NodePlaces(torch.tensor(rows), torch.tensor(ends))
        self._positions = torch.tensor([state.next_token - 1 for state in states])
        self._feature = windows.features[:0, 0]

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Prefill the pairs that lack keys and values, and score the successors of the roots."""
        started = time.perf_counter()
        pending = self._windows.catch_up(self._requests)
        rows, slots, tokens, positions = pending.pairs
        layer = self._modules.layer
        features = layer.fuse_features(self._windows.features[rows, slots])
        stored = self._store(features, tokens, layer.rotation(positions), rows, slots)
        roots = LayerQueries(*(each[pending.lasts] for each in stored))
        logits = self._score(roots, self._nodes.roots())
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Score the successors of the next level's nodes: pair each with its parent's feature."""
        started = time.perf_counter()
        features, many = self._feature, frontier.per_request
        positions = (self._positions + frontier.depth).repeat_interleave(many)
        if many > 1:
            first = torch.arange(len(self._requests)).repeat_interleave(many)
            features = features[first * (len(features) // len(self._requests)) + frontier.parents]
        places = self._nodes.place(frontier)
        rotation = self._modules.layer.rotation(positions)
        stored = self._store(features, frontier.tokens, rotation, places.rows, places.slots)
        logits = self._score(stored, places)
        self.seconds += time.perf_counter() - started
        return logits

    def _store(
        self, features: Tensor, tokens: Tensor, rotation: Rotation, rows: Tensor, slots: Tensor
    ) -> LayerQueries:
        """Store keys and values of pairs, and return their queries."""
        layer, kept = self._modules.layer, self._windows
        inputs = layer.make_input(features, self._modules.embedding(tokens))
        heads = layer.heads(inputs.attended, rotation)
        layer.kernels.store_rows(heads.keys, heads.values, kept.keys, kept.values, rows, slots)
        return LayerQueries(inputs.stream, heads.queries)

    def _score(self, stored: LayerQueries, places: Places) -> Float[Tensor, "pairs vocab"]:
        """Attend, finish the layer, keep its features and score the successors."""
        layer, kept = self._modules.layer, self._windows
        attended = layer.kernels.attend_rows(
            stored.queries, kept.keys, kept.values, places, self._modules.window
        )
        output = layer.finish(stored.stream, attended)
        self._feature = output.feature
        return self._modules.head(output.scored)
