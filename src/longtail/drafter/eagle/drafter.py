"""EAGLE at work: drafts for the requests of an engine, from features that the engine captured.

    observe     features of new tokens ---> Windows
    propose     pairs to catch up on -> fc, keys, values        (one pass, all requests)
                root pairs           -> attention, head -> children of the root
                level by level       -> attention, head -> children of the nodes drafted on

The embedding and the LM head are the target's own modules, so they follow every policy update.
"""

import time
from collections.abc import Mapping, Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.walker import DraftModules, EaglePasses, EagleWalker
from longtail.drafter.eagle.weights import load_parameters
from longtail.drafter.eagle.windows import Windows
from longtail.model.kernels import native
from longtail.model.kernels.draft import ChainKernel, ChainRound, Chains, ChainWeights
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.ops import NATIVE_HEAD_DIMS
from longtail.model.transformer import Transformer
from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.depth import select_depth_policy
from longtail.speculation.drafter import Draftable, Drafter, Noise, Observed
from longtail.speculation.grow import Scoring, deepest, grow
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import Taps
from longtail.speculation.tree import EMPTY, DraftTree
from longtail.speculation.verify import Accepted


@final
class EagleDrafter(Drafter):
    """Drafts with an EAGLE layer for one target.

    `window` replaces the layer's own (0: unbounded); `draft_ids` names the target's tokens of a
    reduced draft vocabulary; `head`, of a published drafter, scores them in the place of the
    target's. The layer is packed for drafting and belongs to the drafter.
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
        self._config = config = layer.config
        self._target, self._draft_ids, self._own_head = target, draft_ids, head
        self._window = config.window if window is None else window
        self.windows = Windows(
            window=self._window,
            max_len=target.config.max_positions,
            feature_size=config.feature_size,
            kv_heads=config.shape.num_kv_heads,
            head_dim=config.shape.head_dim,
            dtype=target.dtype,
            device=target.device,
        )
        self._curve = ConfidenceCurve()
        self._depth_policy = select_depth_policy(target.device)
        self._forward_s = 0.0
        self._layer = self._prepared(layer)
        self._head = target.head
        self._passes: EaglePasses | None = None
        """Refer to the layer and the head; stay when the target's weights change in place."""
        self.refresh()

    @property
    def taps(self) -> Taps:
        """Features of the recipe."""
        return self._layer.config.taps

    @property
    def lookback(self) -> int:
        """Its window."""
        return self._window

    @torch.inference_mode()
    def refresh(self) -> None:
        """Forget features of the old weights, and read the rows of the new head."""
        self.windows.clear()
        rows = self._own_head
        if rows is None and self._draft_ids is not None:  # derived, never saved
            rows = self._target.head.weight[self._draft_ids]
        if rows is not None:
            head = Linear(rows.shape[1], len(rows))
            head.weight.data = rows.to(self._target.device, self._target.dtype)
            head.pack()
            self._head = head
            self._passes = None
        self._forget_kernel()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Go on with other weights, as training keeps them; CheckpointError if misshapen.

        At any moment between two calls: requests in progress are drafted for at once, as if they
        had been seen by a drafter that always had these weights. Confidences are kept, for they
        are learned anew soon enough. The target is not touched.
        """
        dtype = next(iter(weights.values())).dtype if weights else self._layer.dtype
        layer = EagleLayer(self._config).to(self._target.device, dtype)
        load_parameters(layer, weights)
        self._layer = self._prepared(layer)
        self.windows.restart()
        self._passes = None
        self._forget_kernel()

    def _prepared(self, layer: EagleLayer) -> EagleLayer:
        """Make a layer that was trained ready to draft, in the target's dtype."""
        layer.fold()
        layer.to(self._target.dtype).eval()
        layer.pack()
        return layer

    def _forget_kernel(self) -> None:
        # Made when first needed: the target may be packed only then.
        self._kernel: ChainKernel | None = None
        self._has_kernel: bool | None = None

    def _chain_kernel(self) -> ChainKernel | None:
        """Return the native round for the present weights, where this machine has one."""
        own, eagle3 = self._layer, self._layer.config.recipe == "eagle3"
        mlp, shape = own.feed_forward, self._layer.config.shape
        packed = [each.native for each in (own.fc, own.qkv, own.output, mlp.gate_up, mlp.down)]
        packed.append(self._head.native)
        fc, qkv, output, gate_up, down, head = packed
        if native.chains(self._target.dtype) is None or shape.head_dim not in NATIVE_HEAD_DIMS:
            return None
        if own.config.norm_before_residual:
            return None
        if not (fc and qkv and output and gate_up and down and head):
            return None
        return ChainKernel(
            ChainWeights(
                eagle3=eagle3, heads=shape.num_heads, kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim, feature_size=own.config.feature_size,
                window=self._window, eps=shape.norm_eps,
                embedding=self._target.embedding.weight.detach(), fc=fc, qkv=qkv, output=output,
                gate_up=gate_up, down=down, head=head, head_size=self._head.weight.shape[0],
                inner_size=shape.intermediate_size,
                embedding_norm=own.embedding_norm.weight.detach() if eagle3 else None,
                feature_norm=own.feature_norm.weight.detach() if eagle3 else None,
                feed_forward_norm=own.feed_forward_norm.weight.detach(),
                norm=own.norm.weight.detach() if eagle3 else None, draft_ids=self._draft_ids,
            ),
            own.rope,
            EDGES,
        )  # fmt: skip

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
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Keep the features."""
        assert features is not None, "EAGLE reads the target's features"
        if seen:
            self.windows.observe(seen, features)

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Calibrate confidences."""
        for tree, found in zip(trees, accepted, strict=True):
            self._curve.learn(tree, found)

    def forget(self, request_id: str) -> None:
        """Free the request's window."""
        self.windows.forget(request_id)

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
        if self._has_kernel is None:
            self._kernel = self._chain_kernel()
            self._has_kernel = self._kernel is not None
        is_chain = strategy.num_expanded == 1 and strategy.width <= 2
        draft = self._chains if self._has_kernel and is_chain else self.grow
        for i, tree in zip(ready, draft(asking, strategy, noise), strict=True):
            trees[i] = tree
        return trees

    @torch.inference_mode()
    def grow(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft level by level, for requests that are ready: any shape, any device."""
        if self._passes is None:
            parts = DraftModules(
                layer=self._layer,
                embedding=self._target.embedding,
                head=self._head,
                window=self._window,
                graphs=self._target.graphs,
            )
            self._passes = EaglePasses(parts, self.windows)
        scoring = Scoring(
            requests=requests,
            noise=noise,
            device=self._target.device,
            draft_ids=self._draft_ids,
        )
        walker = EagleWalker(self._passes, self.windows, requests, deepest(requests, strategy))
        trees = grow(walker, scoring, strategy, self._curve, self._depth_policy)
        self._forward_s += walker.seconds
        return trees

    def _chains(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft in one call, one node of a level drafted on: what `grow` drafts, sooner."""
        assert self._kernel is not None, "chains need the native round"
        windows, depth = self.windows, deepest(requests, strategy)
        heard = None if noise is None else noise.up_to(depth)
        if heard is not None and self._draft_ids is not None:
            heard = heard[:, :, self._draft_ids]
        pending = windows.catch_up(requests)
        temperatures = [each.sampling.temperature for each in requests]
        asked = ChainRound(
            pairs=pending.pairs,
            lasts=pending.lasts,
            furthest=pending.furthest,
            depth=depth,
            depths=[each.max_depth for each in requests],
            strategy=strategy,
            confidences=self._curve.table(),
            noise=heard,
            inverse_temperatures=torch.tensor([1.0 / t if t else 0.0 for t in temperatures]),
        )
        started = time.perf_counter()
        chains = self._kernel.run(asked, windows.features, windows.keys, windows.values)
        self._forward_s += time.perf_counter() - started
        return _trees(chains)

    def _is_ready(self, request: Draftable) -> bool:
        window = self.windows.get(request.request_id)
        return window is not None and window.next_token == len(request.tokens) - 1


def _trees(chains: Chains) -> list[DraftTree]:
    """Cut the nodes of all requests into their drafts."""
    tokens, parents, margins, reach = chains.tokens, chains.parents, chains.margins, chains.reach
    trees, start = [], 0
    for count in chains.counts:
        end = start + count
        trees.append(
            DraftTree(
                tokens=tokens[start:end],
                parents=parents[start:end],
                margins=margins[start:end],
                reach=reach[start:end],
            )
        )
        start = end
    return trees


@final
class _NoiseOfSome(Noise):
    """Noise of some of the requests that it was asked for."""

    def __init__(self, noise: Noise, rows: Tensor) -> None:
        self._noise, self._rows = noise, rows

    def at_depth(self, depth: int) -> Float[Tensor, "requests vocab"]:
        """Pick the rows."""
        return self._noise.at_depth(depth)[self._rows]

    def up_to(self, depth: int) -> Float[Tensor, "requests depth vocab"]:
        """Pick the rows."""
        return self._noise.up_to(depth)[self._rows]
