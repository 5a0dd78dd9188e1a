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
from longtail.drafter.eagle.walker import DraftModules, EagleWalker
from longtail.drafter.eagle.windows import Windows
from longtail.drafter.weights import DRAFT_IDS, load_parameters
from longtail.model.kernels.draft import EagleChains, EagleWeights
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.ops import NATIVE_HEAD_DIMS
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Draftable, Noise, Observed, Taps
from longtail.speculation.grow import GrowingDrafter
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree


@final
class EagleDrafter(GrowingDrafter):
    """Drafts with an EAGLE layer for one target; the layer is packed and belongs to the drafter.

    `draft_ids` lists the target's tokens of a reduced draft vocabulary. `head` replaces the
    target's head, for published drafters that have one. `window` replaces the layer's window (0:
    unbounded).
    """

    def __init__(
        self,
        layer: EagleLayer,
        target: Transformer,
        *,
        draft_ids: Int[Tensor, "draft_vocab"] | None = None,
        head: Float[Tensor, "draft_vocab hidden"] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(draft_ids)
        self._config = config = layer.config
        self._target, self._own_head = target, head
        self._window = config.window if window is None else window
        self.windows = Windows(config, self._window, target.dtype)
        self._layer = self._packed(layer)
        self._head = target.head
        self.refresh()

    @property
    def taps(self) -> Taps:
        """Features of the recipe."""
        return self._layer.config.taps

    @property
    def lookback(self) -> int:
        """Window in tokens."""
        return self._window

    @torch.inference_mode()
    def refresh(self) -> None:
        """Drop the features of the old policy, and copy the draft vocabulary's head rows."""
        self.windows.clear()
        self._gather_head()

    def _gather_head(self) -> None:
        rows = self._own_head
        if rows is None and self._draft_ids is not None:
            rows = self._target.head.weight[self._draft_ids]
        if rows is not None:
            head = Linear(rows.shape[1], len(rows))
            head.weight.data = rows.to(self._target.device, self._target.dtype)
            head.pack()
            self._head = head
        self._drop_kernel()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the layer by one with these trained weights; CheckpointError if misshapen.

        Allowed between any two calls. Requests in progress get the drafts of a drafter that had
        these weights from the start. The confidence curve is kept; it adapts within a few steps.
        """
        dtype = next((each.dtype for each in weights.values() if each.is_floating_point()), None)
        layer = EagleLayer(self._config).to(self._target.device, dtype or self._layer.dtype)
        load_parameters(layer, weights)
        self._layer = self._packed(layer)
        self.windows.restart()
        ids = weights.get(DRAFT_IDS)
        if ids is None or (
            self._draft_ids is not None and ids.equal(self._draft_ids.to(ids.device))
        ):
            self._drop_kernel()
        else:
            self._draft_ids = ids.to(self._target.device)
            self._gather_head()

    def _packed(self, layer: EagleLayer) -> EagleLayer:
        """Prepare a trained layer for drafting, in the target's dtype."""
        layer.fold()
        layer.to(self._target.dtype).eval()
        layer.pack()
        return layer

    def _drop_kernel(self) -> None:
        # Made at the first draft: only then is the target certain to be packed.
        self.__dict__.pop("_kernel", None)

    @cached_property
    def _kernel(self) -> EagleChains | None:
        """The native draft round for the present weights, if this machine supports one."""
        own, eagle3 = self._layer, self._layer.config.recipe == "eagle3"
        mlp, shape = own.feed_forward, self._layer.config.shape
        packed = [each.native for each in (own.fc, own.qkv, own.output, mlp.gate_up, mlp.down)]
        packed.append(self._head.native)
        fc, qkv, output, gate_up, down, head = packed
        if shape.head_dim not in NATIVE_HEAD_DIMS or own.config.norm_before_residual:
            return None
        if not (fc and qkv and output and gate_up and down and head):
            return None
        weights = EagleWeights(
            eagle3=eagle3, heads=shape.num_heads, kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, feature_size=own.config.feature_size, window=self._window,
            eps=shape.norm_eps, embedding=self._target.embedding.weight.detach(), fc=fc, qkv=qkv,
            output=output, gate_up=gate_up, down=down, inner_size=shape.intermediate_size,
            embedding_norm=own.embedding_norm.weight.detach() if eagle3 else None,
            feature_norm=own.feature_norm.weight.detach() if eagle3 else None,
            feed_forward_norm=own.feed_forward_norm.weight.detach(),
            norm=own.norm.weight.detach() if eagle3 else None,
        )  # fmt: skip
        return EagleChains(weights, own.rope, head, self._draft_ids)

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

    def _walker(self, requests: Sequence[Draftable]) -> EagleWalker:
        modules = DraftModules(
            layer=self._layer,
            embedding=self._target.embedding,
            head=self._head,
            window=self._window,
        )
        return EagleWalker(modules, self.windows, requests)

    def _chains(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree] | None:
        if self._kernel is None:
            return None
        kept = self.windows.features, self.windows.keys, self.windows.values
        pending = self.windows.catch_up(requests)
        return self._kernel.run(requests, strategy, noise, self._curve, pending, kept)

    def _is_observed(self, request: Draftable) -> bool:
        window = self.windows.get(request.request_id)
        return window is not None and window.next_token == len(request.tokens) - 1
