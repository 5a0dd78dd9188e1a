"""Drafting with a ridge layer: a product per level, none of which waits for the level before.

It remembers the state of one token a request, so it costs nothing while the engine decodes plainly.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.ridge.layer import RidgeLayer
from longtail.drafter.ridge.sums import TextSums
from longtail.drafter.weights import DRAFT_IDS, load_parameters
from longtail.model.kernels.linear import Linear
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Draftable, Noise, Observed, Taps
from longtail.speculation.grow import Frontier, GrowingDrafter, Scoring, Walker, grow
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree


@final
class RidgeDrafter(GrowingDrafter):
    """Drafts with a ridge layer for one target; the layer is packed and belongs to the drafter.

    `draft_ids` lists the target's tokens of a reduced draft vocabulary.
    """

    def __init__(
        self,
        layer: RidgeLayer,
        target: Transformer,
        *,
        draft_ids: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        super().__init__(target.device)
        self._target, self._draft_ids = target, draft_ids
        self._layer = layer.to(target.dtype).eval()
        self._layer.pack()
        self._states: dict[str, tuple[int, Tensor]] = {}
        """Index and state of each request's last computed token."""
        self._head = target.head
        self.refresh()

    @property
    def taps(self) -> Taps:
        """The final states."""
        return self._layer.config.taps

    @property
    def lookback(self) -> int:
        """Only the last token is read."""
        return 1

    def statistics(self) -> TextSums:
        """Return new sums, from which its weights can follow."""
        return TextSums(self._target, self._layer.config.slots)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the layer's weights and, if given, the draft vocabulary; between any two calls.

        Raises CheckpointError, with nothing changed, if they are misshapen.
        """
        load_parameters(self._layer, weights)
        self._layer.pack()
        ids = weights.get(DRAFT_IDS)
        if ids is not None:
            self._draft_ids = ids.to(self._target.device)
        self._gather_head()

    def refresh(self) -> None:
        """Drop the states of the old policy, and copy the draft vocabulary's head rows."""
        self._states.clear()
        self._gather_head()

    @torch.inference_mode()
    def _gather_head(self) -> None:
        if self._draft_ids is not None:
            rows = self._target.head.weight[self._draft_ids]
            self._head = Linear(rows.shape[1], len(rows))
            self._head.weight.data = rows
            self._head.pack()

    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Keep the state of each request's last token."""
        assert features is not None, "a ridge drafter reads the target's states"
        end = 0
        for each in seen:
            end += each.num_tokens
            last = each.start + each.num_tokens - 1
            self._states[each.request_id] = last, features[end - 1]

    def forget(self, request_id: str) -> None:
        """Drop the request's state."""
        self._states.pop(request_id, None)

    def _draft(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft level by level, as deep as a block."""
        walker = _RidgeWalker(self._layer, self._target, self._head, self._inputs(requests))
        scoring = Scoring(
            requests=requests, noise=noise, device=self._target.device, draft_ids=self._draft_ids
        )
        strategy = replace(strategy, depth=min(strategy.depth, self._layer.config.slots))
        trees = grow(walker, scoring, strategy, self._curve, self._depth_policy)
        self._forward_s += walker.seconds
        return trees

    def _is_observed(self, request: Draftable) -> bool:
        known = self._states.get(request.request_id)
        return known is not None and known[0] == len(request.tokens) - 2

    def _inputs(self, requests: Sequence[Draftable]) -> tuple[Tensor, Tensor]:
        """Return the states before the roots, and the roots."""
        states = torch.stack([self._states[each.request_id][1] for each in requests])
        roots = torch.tensor([each.tokens[-1] for each in requests], device=self._target.device)
        return states.to(self._target.dtype), roots


@final
class _RidgeWalker(Walker):
    """One draft round; the pairs of state and embedding are the inputs of every level."""

    def __init__(
        self,
        layer: RidgeLayer,
        target: Transformer,
        head: Linear,
        inputs: tuple[Float[Tensor, "requests hidden"], Int[Tensor, "requests"]],
    ) -> None:
        self._layer, self._target, self._head = layer, target, head
        self._states, self._roots = inputs
        self._inputs = self._states
        self.seconds = 0.0
        """Seconds of products."""

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Score the successors of the roots."""
        started = time.perf_counter()
        self._inputs = torch.cat((self._states, self._target.embedding(self._roots)), 1)
        logits = self._head(self._layer.stream(1, self._inputs))
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Score the successors of nodes: their slot's stream, moved by their token."""
        started = time.perf_counter()
        slot = frontier.depth + 1
        stream = self._layer.stream(slot, self._inputs)
        stream = stream.repeat_interleave(frontier.per_request, 0)
        moved = self._layer.move(stream, slot, self._target.embedding(frontier.tokens))
        logits = self._head(moved)
        self.seconds += time.perf_counter() - started
        return logits
