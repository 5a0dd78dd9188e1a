"""Drafting with a ridge layer: one product for the block of a request, one small one per level.

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
from longtail.model.kernels.linear import Linear
from longtail.model.transformer import Transformer
from longtail.speculation.confidence import ConfidenceCurve
from longtail.speculation.drafter import Draftable, Drafter, Noise, Observed, Taps
from longtail.speculation.grow import Frontier, Scoring, Walker, grow
from longtail.speculation.strategy import Strategy, select_depth_policy
from longtail.speculation.tree import EMPTY, Accepted, DraftTree


@final
class RidgeDrafter(Drafter):
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
        self._target, self._draft_ids = target, draft_ids
        self._layer = layer.to(target.dtype).eval()
        self._layer.pack()
        self._curve, self._forward_s = ConfidenceCurve(), 0.0
        self._depth_policy = select_depth_policy(target.device)
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

    @property
    def forward_s(self) -> float:
        """Seconds of passes of the layer and the head."""
        return self._forward_s

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of node confidences so far."""
        return self._curve.calibration_error()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Drop the states of the old policy, and copy the draft vocabulary's head rows."""
        self._states.clear()
        if self._draft_ids is not None:
            rows = self._target.head.weight[self._draft_ids]
            self._head = Linear(rows.shape[1], len(rows))
            self._head.weight.data = rows
            self._head.pack()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the layer's weights, between any two calls."""
        self._layer.load_state_dict(weights)
        self._layer.pack()

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

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Update the confidence curve."""
        for tree, found in zip(trees, accepted, strict=True):
            self._curve.learn(tree, found)

    def forget(self, request_id: str) -> None:
        """Drop the request's state."""
        self._states.pop(request_id, None)

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft for every request whose token before the root was observed; EMPTY for others."""
        ready = [at for at, each in enumerate(requests) if self._is_observed(each)]
        trees = [EMPTY] * len(requests)
        if not ready:
            return trees
        chosen = [requests[at] for at in ready]
        if noise is not None and len(ready) < len(requests):
            noise = noise.rows(ready, self._target.device)
        walker = _RidgeWalker(self._layer, self._target, self._head, self._inputs(chosen))
        scoring = Scoring(
            requests=chosen, noise=noise, device=self._target.device, draft_ids=self._draft_ids
        )
        strategy = replace(strategy, depth=min(strategy.depth, self._layer.config.slots))
        found = grow(walker, scoring, strategy, self._curve, self._depth_policy)
        self._forward_s += walker.seconds
        for at, tree in zip(ready, found, strict=True):
            trees[at] = tree
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
    """One draft round: the streams of all slots come first."""

    def __init__(
        self,
        layer: RidgeLayer,
        target: Transformer,
        head: Linear,
        inputs: tuple[Float[Tensor, "requests hidden"], Int[Tensor, "requests"]],
    ) -> None:
        self._layer, self._target, self._head = layer, target, head
        self._inputs = inputs
        self._streams = inputs[0]
        self.seconds = 0.0
        """Seconds of products."""

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Compute the streams, and score the successors of the roots."""
        started = time.perf_counter()
        states, roots = self._inputs
        self._streams = self._layer.block(states, self._target.embedding(roots)).transpose(0, 1)
        logits = self._head(self._streams[0].contiguous())
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Score the successors of nodes: their slot's stream, moved by their token."""
        started = time.perf_counter()
        stream = self._streams[frontier.depth].repeat_interleave(frontier.per_request, 0)
        embeddings = self._target.embedding(frontier.tokens)
        logits = self._head(self._layer.move(stream, frontier.depth + 1, embeddings))
        self.seconds += time.perf_counter() - started
        return logits
