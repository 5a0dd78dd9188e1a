"""Growing drafts level by level, for every drafter that scores a whole vocabulary.

Nodes of one depth take the same place of the text, hence meet the same noise. With it, a node's
children are the tokens that a target which agreed with the drafter would draw there (coupled):

    children = top-W_v ( log q(v) + g[r, t, v] )        greedy, or not coupled: top-W_v log q(v)

log q need not be normalised: neither the order nor a margin depends on it. Each level, the nodes
likeliest to be reached are drafted on (`Strategy.beam`), those that promise enough (`Worth`); all
nodes seen compete for the draft's size.
"""

import abc
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.drafter import Draftable, Noise
from longtail.speculation.strategy import Strategy, Worth
from longtail.speculation.tree import DraftTree, keep_reached, prune, ranked

_THERE = sys.float_info.min
"""Reach 0 marks a place in a tensor where no node is; nodes have more, for confidences do."""


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
    reach: Float[Tensor, "requests candidates"]
    """Probability of being reached and right; 0 below a node that is not drafted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sureness:
    """A confidence curve in tensors, as it is when drafting begins."""

    table: Float[Tensor, "bins"]
    edges: Float[Tensor, "edges"]

    @staticmethod
    def of(curve: ConfidenceCurve, device: torch.device) -> "_Sureness":
        """Take the table; in float64, so that a product is the same wherever it is taken."""
        table, edges = (
            torch.tensor(of, dtype=torch.float64, device=device) for of in (curve.table(), EDGES)
        )
        return _Sureness(table=table, edges=edges)

    def confidences(
        self, margins: Float[Tensor, "requests candidates"]
    ) -> Float[Tensor, "requests candidates"]:
        """Look margins up."""
        return self.table[torch.bucketize(margins.double(), self.edges, right=True)]


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


def grow(
    walker: Walker, scoring: Scoring, strategy: Strategy, curve: ConfidenceCurve
) -> list[DraftTree]:
    """Draft for every request; one pass of the walker a level.

    Requests that stop early stay in the passes, but nothing more is proposed for them.
    """
    requests, worth = scoring.requests, strategy.worth
    last = deepest(requests, strategy)
    logits = walker.root()
    sure = _Sureness.of(curve, logits.device)
    limits = torch.tensor([[each.max_depth] for each in requests], device=logits.device)
    numbers = torch.zeros_like(limits)
    reach = torch.ones(limits.shape, dtype=torch.float64, device=logits.device)
    levels: list[_Level] = []
    total = 0
    for depth in range(1, last + 1):
        level = _children(scoring, logits, depth, (numbers, reach), strategy.width, sure)
        levels.append(level)
        if depth == last:
            break
        reach, best = level.reach.sort(dim=1, descending=True, stable=True)
        reach, best = reach[:, : strategy.num_followed], best[:, : strategy.num_followed]
        follows = (reach >= max(worth.extend, worth.verify, _THERE)) & (limits > depth)
        if (worth.level or worth.extend) and not _is_worth_a_level(reach, follows, worth):
            break
        reach = reach * follows
        numbers = total + 1 + best
        total += level.tokens.shape[1]
        logits = walker.descend(
            Frontier(
                depth=depth,
                per_request=best.shape[1],
                tokens=level.tokens.gather(1, best).reshape(-1),
                parents=(best // strategy.width).reshape(-1),
            )
        )
    return _trees(levels, strategy)


def _is_worth_a_level(
    reach: Float[Tensor, "requests followed"],
    follows: Bool[Tensor, "requests followed"],
    worth: Worth,
) -> bool:
    """Tell whether the nodes to be drafted on promise enough, together, for a pass.

    One read of the device a level, where a strategy asks; others are launched without a look.
    """
    promised = ((reach - worth.extend) * follows).sum()
    return bool(follows.any() & (promised >= worth.level))


def _children(
    scoring: Scoring,
    logits: Float[Tensor, "nodes vocab"],
    depth: int,
    above: tuple[Int[Tensor, "requests per_request"], Float[Tensor, "requests per_request"]],
    width: int,
    sure: _Sureness,
) -> _Level:
    """Take the best `width` children of every node, and by how much each leads its best rival."""
    numbers, reach = above
    num, per_request = numbers.shape
    scores = scoring.scores(logits, depth, per_request)
    values, chosen = scores.topk(min(width + 1, scores.shape[1]), dim=1)
    rivals = values[:, :1].expand(-1, width).clone()
    rivals[:, 0] = values[:, 1] if values.shape[1] > 1 else values[:, 0]
    margins = (values[:, :width] - rivals).reshape(num, -1)
    return _Level(
        tokens=scoring.tokens(chosen[:, :width]).reshape(num, -1),
        margins=margins,
        parents=numbers.repeat_interleave(width, 1),
        reach=reach.repeat_interleave(width, 1) * sure.confidences(margins),
    )


def _trees(levels: Sequence[_Level], strategy: Strategy) -> list[DraftTree]:
    """Cut each request's candidates to its draft."""
    tokens = torch.cat([level.tokens for level in levels], 1).tolist()
    margins = torch.cat([level.margins for level in levels], 1).tolist()
    parents = torch.cat([level.parents for level in levels], 1).tolist()
    reach = torch.cat([level.reach for level in levels], 1).tolist()
    trees = []
    for some, by, above, likely in zip(tokens, margins, parents, reach, strict=True):
        tree = DraftTree(
            tokens=tuple(some), parents=tuple(above), margins=tuple(by), reach=tuple(likely)
        )
        tree = keep_reached(ranked(tree), max(strategy.worth.verify, _THERE))
        trees.append(prune(tree, strategy.num_nodes))
    return trees
