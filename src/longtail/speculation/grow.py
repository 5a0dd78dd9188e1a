"""Growing drafts level by level, for every drafter that scores a whole vocabulary.

Nodes of one depth have the same position and therefore the same noise. With noise, the children of
a node are the tokens that a target which agrees with the drafter would draw there (coupled):

    children = top-W_v ( log q(v) + g[r, t, v] )        greedy, or not coupled: top-W_v log q(v)

log q need not be normalised: neither order nor margins depend on it. In each level the likeliest
nodes are expanded (`Strategy.beam`) if they reach their threshold (`DraftThresholds`), and a level
is drafted while its expected gain is not negative; all candidates compete for the draft's size.
"""

import abc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.drafter import Draftable, Drafter, Noise
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import EMPTY, DraftTree, keep_reached, prune, ranked

_MIN_REACH = sys.float_info.min
"""Smallest probability of a node: 0 marks an entry of a tensor that is not a node."""
_EDGES = torch.tensor(EDGES, dtype=torch.float64)


class GrowingDrafter(Drafter):
    """A drafter that scores a vocabulary. It drafts for requests whose tokens were observed."""

    def __init__(self, draft_ids: Int[Tensor, "draft_vocab"] | None = None) -> None:
        super().__init__()
        self._draft_ids = draft_ids

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft for every request whose tokens before the root were observed; EMPTY for others."""
        ready = [at for at, each in enumerate(requests) if self._is_observed(each)]
        trees = [EMPTY] * len(requests)
        if not ready:
            return trees
        if noise is not None and len(ready) < len(requests):
            noise = noise.rows(ready)
        asked, drafts, started = [requests[at] for at in ready], None, time.perf_counter()
        if strategy.num_expanded == 1 and strategy.width <= 2:
            drafts = self._chains(asked, strategy, noise)
        if drafts is None:
            drafts = self.grow(asked, strategy, noise)
        self.forward_s += time.perf_counter() - started
        for at, tree in zip(ready, drafts, strict=True):
            trees[at] = tree
        return trees

    @torch.inference_mode()
    def grow(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft level by level for observed requests: any tree shape."""
        scoring = Scoring(requests=requests, noise=noise, draft_ids=self._draft_ids)
        return grow(self._walker(requests), scoring, strategy, self.curve)

    @abc.abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights and, if given, the draft vocabulary; between any two calls.

        Raises CheckpointError, with nothing changed, if they are misshapen.
        """

    @abc.abstractmethod
    def _is_observed(self, request: Draftable) -> bool:
        """Return whether the tokens before the request's root were observed."""

    @abc.abstractmethod
    def _chains(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree] | None:
        """Return what `grow` returns, by one native call; None if there is none.

        One node per level is expanded, with at most one sibling.
        """

    @abc.abstractmethod
    def _walker(self, requests: Sequence[Draftable]) -> "Walker":
        """Return the model of a round for observed requests."""


class Walker(abc.ABC):
    """A drafter's model, evaluated level by level for several requests at once."""

    @abc.abstractmethod
    def root(self) -> Float[Tensor, "requests vocab"]:
        """Return scores of the tokens after each request's root."""

    @abc.abstractmethod
    def descend(self, frontier: "Frontier") -> Float[Tensor, "nodes vocab"]:
        """Return scores of the tokens after each node of the frontier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The expanded nodes of one depth, `per_request` of each request, in order.

    Example: two requests, two nodes each: tokens (5, 6, 9, 9), parents (0, 0, 0, 1), depth 2
    """

    depth: int
    per_request: int
    tokens: Int[Tensor, "nodes"]
    parents: Int[Tensor, "nodes"]
    """Index of the parent among its request's nodes of the previous frontier."""


class _Level(NamedTuple):
    """All candidates of one depth."""

    tokens: Int[Tensor, "requests candidates"]
    margins: Float[Tensor, "requests candidates"]
    parents: Int[Tensor, "requests candidates"]
    """Number of the parent among all earlier candidates, counted from 1; 0: the root."""
    reach: Float[Tensor, "requests candidates"]
    """Probability of acceptance; 0 below a node that is not expanded."""


@final
class Scoring:
    """Converts a drafter's logits to scores of tokens.

    `draft_ids` maps a reduced draft vocabulary to the target's tokens; None where it is the same.
    """

    def __init__(
        self,
        *,
        requests: Sequence[Draftable],
        noise: Noise | None,
        draft_ids: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        self.requests, self._draft_ids = requests, draft_ids
        temperatures = [each.sampling.temperature for each in requests]
        self._noise = noise if any(temperatures) else None
        self._uneven: Float[Tensor, "2 requests 1"] | None = None
        """Divisor of the logits and factor of the noise, 0 for greedy requests."""
        if any(temperature != 1.0 for temperature in temperatures):
            uneven = [[t or 1.0 for t in temperatures], [float(t > 0) for t in temperatures]]
            self._uneven = torch.tensor(uneven, dtype=torch.float64)[:, :, None]

    def scores(
        self, logits: Float[Tensor, "nodes vocab"], depth: int, per_request: int
    ) -> Float[Tensor, "nodes vocab"]:
        """Divide by the temperature and add the noise of the position, if any."""
        if self._uneven is not None:
            logits = logits / self._uneven[0].to(logits.dtype).repeat_interleave(per_request, 0)
        if self._noise is None:
            return logits
        noise = self._noise.at_depth(depth, self._draft_ids)
        if self._uneven is not None:
            noise = noise * self._uneven[1].to(noise.dtype)
        return logits + (noise if per_request == 1 else noise.repeat_interleave(per_request, 0))

    def tokens(self, chosen: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Map entries of the draft vocabulary to the target's tokens."""
        return chosen if self._draft_ids is None else self._draft_ids[chosen]


def deepest(requests: Sequence[Draftable], strategy: Strategy) -> int:
    """Return the depth of the deepest draft that any request can use."""
    return min(strategy.depth, strategy.num_nodes, max(each.max_depth for each in requests))


def grow(
    walker: Walker, scoring: Scoring, strategy: Strategy, curve: ConfidenceCurve
) -> list[DraftTree]:
    """Draft for every request with one pass of the walker per level, as deep as that pays.

    Requests that end early stay in the passes, without further proposals.
    """
    requests, thresholds = scoring.requests, strategy.thresholds
    last, table = deepest(requests, strategy), torch.tensor(curve.table(), dtype=torch.float64)
    limits = torch.tensor([[each.max_depth] for each in requests])
    logits = walker.root()
    numbers = torch.zeros_like(limits)
    reach = torch.ones(limits.shape, dtype=torch.float64)
    levels: list[_Level] = []
    total = 0
    for depth in range(1, last + 1):
        level = _children(scoring, logits, depth, (numbers, reach), strategy.width, table)
        levels.append(level)
        if depth == last:
            break
        reach, best = level.reach.sort(dim=1, descending=True, stable=True)
        reach, best = reach[:, : strategy.num_expanded], best[:, : strategy.num_expanded]
        floor = max(thresholds.expand, thresholds.verify, _MIN_REACH)
        follows = (reach >= floor) & (limits > depth)
        if thresholds.level or thresholds.expand:
            gain = ((reach - thresholds.expand) * follows).sum()
            if gain < max(thresholds.level, _MIN_REACH):  # without nodes even if a pass is free
                break
        reach = reach * follows
        numbers = total + 1 + best
        total += level.tokens.shape[1]
        frontier = Frontier(
            depth=depth,
            per_request=best.shape[1],
            tokens=level.tokens.gather(1, best).reshape(-1),
            parents=(best // strategy.width).reshape(-1),
        )
        logits = walker.descend(frontier)
    found = _Level(*(torch.cat(parts, 1) for parts in zip(*levels, strict=True)))
    return _trees(found, strategy)


def _children(
    scoring: Scoring,
    logits: Float[Tensor, "nodes vocab"],
    depth: int,
    above: tuple[Int[Tensor, "requests per_request"], Float[Tensor, "requests per_request"]],
    width: int,
    confidences: Float[Tensor, "bins"],
) -> _Level:
    """Return the best `width` children of every node, with their margins."""
    numbers, reach = above
    num, per_request = numbers.shape
    scores = scoring.scores(logits, depth, per_request)
    values, chosen = scores.topk(min(width + 1, scores.shape[1]), dim=1)
    rivals = values[:, :1].expand(-1, width).clone()
    rivals[:, 0] = values[:, 1] if values.shape[1] > 1 else values[:, 0]
    margins = (values[:, :width] - rivals).reshape(num, -1)
    bins = torch.bucketize(margins.double(), _EDGES, right=True)
    return _Level(
        tokens=scoring.tokens(chosen[:, :width]).reshape(num, -1),
        margins=margins,
        parents=numbers.repeat_interleave(width, 1),
        reach=reach.repeat_interleave(width, 1) * confidences[bins],
    )


def _trees(found: _Level, strategy: Strategy) -> list[DraftTree]:
    """Return the draft of each request: its likeliest candidates."""
    trees = []
    for tokens, margins, parents, reach in zip(*(each.tolist() for each in found), strict=True):
        tree = DraftTree(
            tokens=tuple(tokens), parents=tuple(parents), margins=tuple(margins), reach=tuple(reach)
        )
        tree = keep_reached(ranked(tree), max(strategy.thresholds.verify, _MIN_REACH))
        trees.append(prune(tree, strategy.num_nodes))
    return trees
