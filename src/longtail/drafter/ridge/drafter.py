"""The ridge drafter: proposes all levels of a draft from one state, by a product each.

It remembers the state of one token a request, so it costs nothing while the engine decodes plainly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.ridge.layer import RidgeLayer
from longtail.drafter.ridge.sums import SequenceSums
from longtail.drafter.weights import DRAFT_IDS, drafting_head, load_parameters
from longtail.model.kernels.draft import RidgeChains
from longtail.model.kernels.linear import Linear, pack_layers
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Draftable, Noise, Observed, Taps
from longtail.speculation.grow import Frontier, GrowingDrafter, Walker
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree


@final
class RidgeDrafter(GrowingDrafter):
    """Drafts with a ridge layer for one target; the layer is packed and belongs to the drafter."""

    def __init__(
        self,
        layer: RidgeLayer,
        target: Transformer,
        *,
        draft_ids: Int[Tensor, "draft_vocab"] | None = None,
        **_: object,  # the head is the target's
    ) -> None:
        super().__init__(draft_ids)
        self._target = target
        self._layer = layer.to(target.dtype).eval()
        pack_layers(self._layer)
        self._states: dict[str, tuple[int, Tensor]] = {}
        """Index and state of each request's last computed token."""
        self._gather_head()

    @property
    def taps(self) -> Taps:
        """The final states."""
        return self._layer.config.taps

    @property
    def is_ready(self) -> bool:
        """Whether its maps are not all zero, as those of a fresh layer are."""
        return any(bool(each.any()) for each in self._layer.parameters())

    @property
    def lookback(self) -> int:
        """Only the last token is read."""
        return 1

    def statistics(self) -> SequenceSums:
        """Return new sums, from which its weights can follow."""
        return SequenceSums(self._target, self._layer.config.slots)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the layer's weights and, if given, the draft vocabulary."""
        load_parameters(self._layer, weights)
        pack_layers(self._layer)
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
        # Made at the first draft: only then is the target certain to be packed.
        self.__dict__.pop("_kernel", None)
        self._head = drafting_head(self._target, self._draft_ids)

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

    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft no deeper than a block."""
        if strategy.depth > (slots := self._layer.config.slots):
            strategy = replace(strategy, depth=slots, size=strategy.num_nodes)
        return super().propose(requests, strategy, noise)

    def _walker(self, requests: Sequence[Draftable]) -> Walker:
        roots = torch.tensor([each.tokens[-1] for each in requests])
        inputs = torch.cat((self._inputs(requests), self._target.embedding(roots)), 1)
        return _RidgeWalker(self._layer, self._target, self._head, inputs)

    def _chains(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree] | None:
        if self._kernel is None:
            return None
        states = self._inputs(requests)
        return self._kernel.run(requests, strategy, noise, self.curve, states)

    @cached_property
    def _kernel(self) -> RidgeChains | None:
        """The native draft round for the present weights, if this machine supports one."""
        slots, head = self._layer.config.slots, self._head.native
        linear = (*self._layer.streams, *self._layer.transitions)
        maps = [own for each in linear if isinstance(each, Linear) and (own := each.native)]
        if head is None or len(maps) < len(linear):
            return None
        embedding = self._target.embedding.weight.detach()
        return RidgeChains(maps[:slots], maps[slots:], embedding, head, self._draft_ids)

    def _is_observed(self, request: Draftable) -> bool:
        known = self._states.get(request.request_id)
        return known is not None and known[0] == len(request.tokens) - 2

    def _inputs(self, requests: Sequence[Draftable]) -> Float[Tensor, "requests hidden"]:
        """Return the states before the roots."""
        states = torch.stack([self._states[each.request_id][1] for each in requests])
        return states.to(self._target.dtype)


@final
class _RidgeWalker(Walker):
    """One draft round; the pairs of state and embedding are the inputs of every level."""

    def __init__(
        self,
        layer: RidgeLayer,
        target: Transformer,
        head: Linear,
        inputs: Float[Tensor, "requests joined"],
    ) -> None:
        self._layer, self._target, self._head, self._inputs = layer, target, head, inputs

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Score the successors of the roots."""
        return self._head(self._layer(1, self._inputs, None))

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Score the successors of nodes: their slot's stream, moved by their token."""
        before, slot = self._target.embedding(frontier.tokens), frontier.depth + 1
        return self._head(self._layer(slot, self._inputs, before, frontier.per_request))
