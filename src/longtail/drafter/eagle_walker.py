"""One drafting round of an EAGLE layer: catch up, then down the drafts level by level."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longtail.drafter.eagle import EagleLayer
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
        self._states = [windows.of(each.request_id) for each in requests]
        rows = [state.row for state in self._states]
        ends = [state.end for state in self._states]
        roots = [[state.next_token - 1 + d for state in self._states] for d in range(depth)]
        device = windows.features.device
        self._rows, self._ends = torch.tensor([rows, ends], device=device)
        positions = torch.tensor(roots, device=device).flatten()
        rotation = parts.layer.rotation(positions)
        shape = (depth, len(requests), 1, -1)
        self._cos, self._sin = rotation.cos.view(shape), rotation.sin.view(shape)
        self._feature = windows.features[:0, 0]
        self._visible = torch.zeros(len(requests), 1, dtype=torch.int64, device=device)
        self._num_drafted_on = 0
        self.seconds = 0.0
        """In forward passes."""

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Compute keys and values of all pairs that lack them, and score behind the last ones."""
        started = time.perf_counter()
        layer, windows = self._parts.layer, self._windows
        pending = self._pending()
        features = layer.fuse_features(windows.features[pending.rows, pending.slots])
        entered = layer.enter(features, self._parts.embedding(pending.tokens))
        heads = layer.heads(entered.attended, layer.rotation(pending.positions))
        self._store(heads, pending.rows, pending.slots)
        stream, queries = entered.stream, heads.queries
        if pending.lasts is not None:
            stream, queries = stream[pending.lasts], queries[pending.lasts]
        none = torch.zeros_like(self._rows)
        logits = self._leave(stream, queries, Places(self._rows, none, self._ends, none, none))
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Pair each node's token with the feature that was predicted at its parent."""
        started = time.perf_counter()
        layer, depth, many = self._parts.layer, frontier.depth, frontier.per_request
        features = self._feature
        places = self._places(frontier)
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

    def _pending(self) -> "_Pending":
        """List the pairs without keys and values, at most a window's worth of each request."""
        rows: list[int] = []
        slots: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        lasts: list[int] = []
        for state, request in zip(self._states, self._requests, strict=True):
            start = max(state.done, state.end - (self._parts.window or state.end))
            rows += [state.row] * (state.end - start)
            slots += range(start, state.end)
            tokens += request.tokens[state.base + start + 1 : state.base + state.end + 1]
            positions += range(state.base + start, state.base + state.end)
            lasts.append(len(rows) - 1)
            state.done = state.end
        device = self._rows.device
        every = len(lasts) == len(rows)
        return _Pending(
            *torch.tensor([rows, slots, tokens, positions], device=device),
            lasts=None if every else torch.tensor(lasts, device=device),
        )

    def _places(self, frontier: Frontier) -> Places:
        """Nodes see their request's window, their ancestors and themselves."""
        num, many, depth = len(self._requests), frontier.per_request, frontier.depth
        first = self._num_drafted_on
        self._num_drafted_on += many
        own = torch.arange(first, first + many, device=self._rows.device)
        above = self._visible.gather(1, frontier.parents.view(num, many))
        self._visible = above | (1 << own)
        rows, ends = self._rows.repeat_interleave(many), self._ends.repeat_interleave(many)
        return Places(
            rows=rows,
            slots=ends + own.repeat(num),
            contexts=ends,
            depths=torch.full_like(ends, depth),
            visible=self._visible.flatten(),
        )

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


class _Pending(NamedTuple):
    """Pairs to catch up on, request by request; `lasts` are the root pairs, None where all are."""

    rows: Int[Tensor, "pairs"]
    slots: Int[Tensor, "pairs"]
    tokens: Int[Tensor, "pairs"]
    positions: Int[Tensor, "pairs"]
    lasts: Int[Tensor, "requests"] | None
