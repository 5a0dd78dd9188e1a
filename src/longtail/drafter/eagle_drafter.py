"""EAGLE at work: drafts for the requests of an engine, from features that the engine captured.

    observe     features of new tokens ---> Windows
    propose     pairs to catch up on -> fc, keys, values        (one pass, all requests)
                root pairs           -> attention, head -> children of the root
                level by level       -> attention, head -> children of the nodes drafted on

The embedding and the LM head are the target's own modules, so they follow every policy update.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle import EagleLayer
from longtail.drafter.eagle_walker import EagleParts, EagleWalker
from longtail.drafter.windows import Windows
from longtail.model.linear import Linear
from longtail.model.transformer import Taps, Transformer
from longtail.speculation.confidence import ConfidenceCurve
from longtail.speculation.drafter import Draftable, Drafter, Noise, Seen, Strategy
from longtail.speculation.grow import Scoring, grow
from longtail.speculation.tree import EMPTY, DraftTree
from longtail.speculation.verify import Accepted


@final
class EagleDrafter(Drafter):
    """Drafts with an EAGLE layer for one target.

    `window` replaces the layer's own (0: unbounded); `draft_ids` names the target's tokens of a
    reduced draft vocabulary. The layer is packed for drafting and belongs to the drafter.
    """

    def __init__(
        self,
        layer: EagleLayer,
        target: Transformer,
        *,
        draft_ids: Int[Tensor, "draft_vocab"] | None = None,
        window: int | None = None,
    ) -> None:
        config = layer.config
        self._layer, self._target, self._draft_ids = (
            layer.to(target.dtype).eval(),
            target,
            draft_ids,
        )
        self._window = config.window if window is None else window
        self._windows = Windows(
            window=self._window,
            max_len=target.config.max_positions,
            feature_size=config.feature_size,
            kv_heads=config.target.num_kv_heads,
            head_dim=config.target.head_dim,
            dtype=target.dtype,
            device=target.device,
        )
        self._curve = ConfidenceCurve()
        self._forward_s = 0.0
        self._layer.pack()
        self._head = target.head
        self.refresh()

    @property
    def taps(self) -> Taps:
        """Features of the recipe."""
        return self._layer.config.taps

    @torch.inference_mode()
    def refresh(self) -> None:
        """Forget features of the old weights, and read the rows of the new head."""
        self._windows.clear()
        if self._draft_ids is not None:  # derived, never saved: the target's rows of the draft ids
            head = Linear(self._target.config.hidden_size, len(self._draft_ids))
            head.weight.data = self._target.head.weight[self._draft_ids]
            head.pack()
            self._head = head

    @property
    def forward_s(self) -> float:
        """Seconds in passes of the layer and the head."""
        return self._forward_s

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the confidences."""
        return self._curve.calibration_error()

    @torch.inference_mode()
    def observe(
        self, seen: Sequence[Seen], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Keep the features."""
        assert features is not None, "EAGLE reads the target's features"
        if seen:
            self._windows.observe(seen, features)

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Calibrate confidences."""
        for tree, found in zip(trees, accepted, strict=True):
            self._curve.learn(tree, found)

    def forget(self, request_id: str) -> None:
        """Free the request's window."""
        self._windows.forget(request_id)

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft for every request whose last computed token was seen."""
        ready = [i for i, each in enumerate(requests) if self._is_ready(each)]
        trees = [EMPTY] * len(requests)
        if not ready:
            return trees
        asking = [requests[i] for i in ready]
        if noise is not None and len(ready) < len(requests):
            noise = _NoiseOfSome(noise, torch.tensor(ready, device=self._target.device))
        parts = EagleParts(
            layer=self._layer,
            embedding=self._target.embedding,
            head=self._head,
            window=self._window,
        )
        depth = min(strategy.depth, max(each.max_depth for each in asking))
        walker = EagleWalker(parts, self._windows, asking, depth)
        scoring = Scoring(requests=asking, noise=noise, draft_ids=self._draft_ids)
        for i, tree in zip(ready, grow(walker, scoring, strategy, self._curve), strict=True):
            trees[i] = tree
        self._forward_s += walker.seconds
        return trees

    def _is_ready(self, request: Draftable) -> bool:
        window = self._windows.get(request.request_id)
        return window is not None and window.next_token == len(request.tokens) - 1


@final
class _NoiseOfSome(Noise):
    """Noise of some of the requests that it was asked for."""

    def __init__(self, noise: Noise, rows: Tensor) -> None:
        self._noise, self._rows = noise, rows

    def at_depth(self, depth: int) -> Float[Tensor, "requests vocab"]:
        """Pick the rows."""
        return self._noise.at_depth(depth)[self._rows]
