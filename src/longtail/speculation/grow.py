"""Growing drafts level by level, for every drafter that scores a whole vocabulary.

Nodes of one depth take the same place of the text, hence meet the same noise. With it, a node's
children are the tokens that a target which agreed with the drafter would draw there (coupled):

    children = top-W_v ( log q(v) + g[r, t, v] )        greedy, or not coupled: top-W_v log q(v)

log q need not be normalised: neither the order nor a margin depends on it. Each level, the `width`
nodes likeliest to be reached are drafted on; all nodes seen compete for the draft's size.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.drafter import Draftable, Noise
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree, cut_depth, prune, reach_probabilities


class Walker(abc.ABC):
    """A drafter's model on its way down the drafts of several requests at once."""

    @abc.abstractmethod
    def root(self) -> Float[Tensor, "requests vocab"]:
        """Score the tokens that may follow each request's root."""

    @abc.abstractmethod
    def descend(self, frontier: "Frontier") -> Float[Tensor, "nodes vocab"]:
        """Score the tokens that may follow each node of the next level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The nodes of one depth that are drafted on, `per_request` of each request, in order.

    Example: two requests, two nodes each: tokens (5, 6, 9, 9), parents (0, 0, 0, 1), depth 2
    """

    depth: int
    per_request: int
    tokens: Int[Tensor, "nodes"]
    parents: Int[Tensor, "nodes"]
    """Which of its request's nodes of the frontier above is the parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Every candidate of one depth."""

    tokens: Int[Tensor, "requests candidates"]
    margins: Float[Tensor, "requests candidates"]
    parents: Int[Tensor, "requests candidates"]
    """Candidates of all levels above, counted from 1 in order; 0 is the root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a drafter's logits become scores of tokens.

    `draft_ids` maps a reduced draft vocabulary to the target's tokens; None where it is the same.
    """

    requests: Sequence[Draftable]
    noise: Noise | None
    draft_ids: Int[Tensor, "draft_vocab"] | None = None

    def scores(
        self, logits: Float[Tensor, "nodes vocab"], depth: int, per_request: int
    ) -> Float[Tensor, "nodes vocab"]:
        """Divide by the temperature and add the noise of the place, where there is any."""
        temperatures = [each.sampling.temperature for each in self.requests]
        alike = all(temperature == 1.0 for temperature in temperatures)
        if not alike:
            scale = torch.tensor([t or 1.0 for t in temperatures], dtype=logits.dtype)
            scale = scale.to(logits.device).repeat_interleave(per_request)
            logits = logits / scale[:, None]
        if self.noise is None or not any(temperatures):
            return logits
        noise = self.noise.at_depth(depth)
        if self.draft_ids is not None:
            noise = noise[:, self.draft_ids]
        if not alike:  # a greedy request hears none
            noise = noise * torch.tensor([float(t > 0) for t in temperatures]).to(noise)[:, None]
        return logits + (noise if per_request == 1 else noise.repeat_interleave(per_request, 0))

    def tokens(self, chosen: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Name chosen entries of the draft vocabulary by the target's tokens."""
        return chosen if self.draft_ids is None else self.draft_ids[chosen]


def deepest(requests: Sequence[Draftable], strategy: Strategy) -> int:
    """Return the depth of the longest draft that some request can use."""
    return min(strategy.depth, strategy.num_nodes, max(each.max_depth for each in requests))


def chain_trees(
    tokens: Sequence[Sequence[int]],
    margins: Sequence[Sequence[float]],
    requests: Sequence[Draftable],
    strategy: Strategy,
) -> list[DraftTree]:
    """Make each request's chain a tree, as long as it can use."""
    trees = []
    for request, some, by in zip(requests, tokens, margins, strict=True):
        size = min(len(some), request.max_depth, strategy.num_nodes)
        trees.append(
            DraftTree(
                tokens=tuple(some[:size]), parents=tuple(range(size)), margins=tuple(by[:size])
            )
        )
    return trees


def grow(
    walker: Walker, scoring: Scoring, strategy: Strategy, curve: ConfidenceCurve
) -> list[DraftTree]:
    """Draft for every request; one pass of the walker a level."""
    num, width = len(scoring.requests), strategy.width
    levels: list[_Level] = []
    last = deepest(scoring.requests, strategy)
    logits, per_request = walker.root(), 1
    numbers = torch.zeros(num, 1, dtype=torch.int64, device=logits.device)
    reach = torch.ones(num, 1, device=logits.device)
    table = torch.tensor(curve.table(), device=logits.device) if width > 1 else None
    edges = torch.tensor(EDGES, device=logits.device) if width > 1 else None
    total = 0
    for depth in range(1, last + 1):
        level = _children(scoring, logits, depth, numbers, width)
        levels.append(level)
        if depth == last:
            break
        tokens, parents = level.tokens, torch.zeros_like(level.tokens)
        numbers = total + 1 + torch.arange(tokens.shape[1], device=logits.device).expand_as(tokens)
        if table is not None and edges is not None:
            sure = table[torch.bucketize(level.margins, edges, right=True)]
            reach = reach.repeat_interleave(width, 1) * sure
            reach, best = reach.topk(min(width, reach.shape[1]), dim=1)
            tokens, numbers, parents = (
                tokens.gather(1, best),
                numbers.gather(1, best),
                best // width,
            )
        total += level.tokens.shape[1]
        per_request = tokens.shape[1]
        logits = walker.descend(
            Frontier(
                depth=depth,
                per_request=per_request,
                tokens=tokens.reshape(-1),
                parents=parents.reshape(-1),
            )
        )
    return _trees(levels, scoring.requests, strategy, curve)


def _children(
    scoring: Scoring,
    logits: Float[Tensor, "nodes vocab"],
    depth: int,
    numbers: Int[Tensor, "requests per_request"],
    width: int,
) -> _Level:
    """Take the best `width` children of every node, and by how much each leads its best rival."""
    num, per_request = numbers.shape
    scores = scoring.scores(logits, depth, per_request)
    values, chosen = scores.topk(min(width + 1, scores.shape[1]), dim=1)
    rivals = values[:, :1].expand(-1, width).clone()
    rivals[:, 0] = values[:, 1] if values.shape[1] > 1 else values[:, 0]
    return _Level(
        tokens=scoring.tokens(chosen[:, :width]).reshape(num, -1),
        margins=(values[:, :width] - rivals).reshape(num, -1),
        parents=numbers.repeat_interleave(width, 1),
    )


def _trees(
    levels: Sequence[_Level],
    requests: Sequence[Draftable],
    strategy: Strategy,
    curve: ConfidenceCurve,
) -> list[DraftTree]:
    """Cut each request's candidates to its draft."""
    tokens = torch.cat([level.tokens for level in levels], 1).tolist()
    margins = torch.cat([level.margins for level in levels], 1).tolist()
    parents = torch.cat([level.parents for level in levels], 1).tolist()
    trees = []
    for request, some, by, above in zip(requests, tokens, margins, parents, strict=True):
        tree = DraftTree(tokens=tuple(some), parents=tuple(above), margins=tuple(by))
        tree = cut_depth(tree, request.max_depth)
        if tree.size > strategy.num_nodes:
            sure = curve.confidences(tree.margins)
            tree = prune(tree, reach_probabilities(tree.parents, sure), strategy.num_nodes)
        trees.append(tree)
    return trees
