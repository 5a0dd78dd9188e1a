"""Growing drafts level by level, for every drafter that scores a whole vocabulary.

Nodes of one depth take the same place of the text, hence meet the same noise. With it, a node's
children are the tokens that a target which agreed with the drafter would draw there (coupled):

    children = top-W_v ( log q(v) + g[r, t, v] )        greedy, or not coupled: top-W_v log q(v)

log q need not be normalised: neither the order nor a margin depends on it. Each level, the nodes
likeliest to be reached are drafted on (`Strategy.beam`), those that promise enough
(`DraftThresholds`); all nodes seen compete for the draft's size.

What the host knows goes to the device before the first pass, and what was drafted comes back in one
transfer at the end: between the two the device is only told what to do, unless the policy looks.
"""

import abc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.depth import DepthPolicy
from longtail.speculation.drafter import Draftable, Noise
from longtail.speculation.strategy import DraftThresholds, Strategy
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


class _Level(NamedTuple):
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


@final
class Scoring:
    """How a drafter's logits, on `device`, become scores of tokens.

    `draft_ids` maps a reduced draft vocabulary to the target's tokens; None where it is the same.
    """

    def __init__(
        self,
        *,
        requests: Sequence[Draftable],
        noise: Noise | None,
        device: torch.device,
        draft_ids: Int[Tensor, "draft_vocab"] | None = None,
    ) -> None:
        self.requests, self.device, self._draft_ids = requests, device, draft_ids
        temperatures = [each.sampling.temperature for each in requests]
        self._noise = noise if any(temperatures) else None
        self._uneven: Float[Tensor, "2 requests 1"] | None = None
        """What logits are divided by, and noise multiplied; a greedy request hears none."""
        if any(temperature != 1.0 for temperature in temperatures):
            uneven = [[t or 1.0 for t in temperatures], [float(t > 0) for t in temperatures]]
            self._uneven = torch.tensor(uneven, dtype=torch.float64, device=device)[:, :, None]

    def scores(
        self, logits: Float[Tensor, "nodes vocab"], depth: int, per_request: int
    ) -> Float[Tensor, "nodes vocab"]:
        """Divide by the temperature and add the noise of the place, where there is any."""
        if self._uneven is not None:
            logits = logits / self._uneven[0].to(logits.dtype).repeat_interleave(per_request, 0)
        if self._noise is None:
            return logits
        noise = self._noise.at_depth(depth)
        if self._draft_ids is not None:
            noise = noise[:, self._draft_ids]
        if self._uneven is not None:
            noise = noise * self._uneven[1].to(noise.dtype)
        return logits + (noise if per_request == 1 else noise.repeat_interleave(per_request, 0))

    def tokens(self, chosen: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Name chosen entries of the draft vocabulary by the target's tokens."""
        return chosen if self._draft_ids is None else self._draft_ids[chosen]


def deepest(requests: Sequence[Draftable], strategy: Strategy) -> int:
    """Return the depth of the longest draft that some request can use."""
    return min(strategy.depth, strategy.num_nodes, max(each.max_depth for each in requests))


def grow(
    walker: Walker,
    scoring: Scoring,
    strategy: Strategy,
    curve: ConfidenceCurve,
    policy: DepthPolicy,
) -> list[DraftTree]:
    """Draft for every request; one pass of the walker a level, as deep as the policy says.

    Requests that stop early stay in the passes, but nothing more is proposed for them.
    """
    requests, thresholds = scoring.requests, strategy.thresholds
    last, device = deepest(requests, strategy), scoring.device
    sure = _Sureness.of(curve, device)
    limits = torch.tensor([[each.max_depth] for each in requests], device=device)
    logits = walker.root()
    numbers = torch.zeros_like(limits)
    reach = torch.ones(limits.shape, dtype=torch.float64, device=device)
    levels: list[_Level] = []
    gains: list[Tensor] = []
    total = 0
    for depth in range(1, last + 1):
        level = _children(scoring, logits, depth, (numbers, reach), strategy.width, sure)
        levels.append(level)
        if depth == last:
            break
        reach, best = level.reach.sort(dim=1, descending=True, stable=True)
        reach, best = reach[:, : strategy.num_expanded], best[:, : strategy.num_expanded]
        follows = (reach >= max(thresholds.expand, thresholds.verify, _THERE)) & (limits > depth)
        if thresholds.level or thresholds.expand:
            gains.append(_gain(reach, follows, thresholds))
            if not policy.should_extend(gains):
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
    candidates = [torch.cat(parts, 1) for parts in zip(*levels, strict=True)]
    tokens, margins, parents, reach, *known = _read(*candidates, *gains)
    if known:
        policy.learn([each.item() for each in known])
    found = _Level(tokens.long(), margins, parents.long(), reach)
    return _trees(found, strategy)


def _gain(
    reach: Float[Tensor, "requests followed"],
    follows: Bool[Tensor, "requests followed"],
    thresholds: DraftThresholds,
) -> Float[Tensor, ""]:
    """By how much the nodes to be drafted on promise more, together, than a pass costs.

    Below zero if there are none, even where a pass costs nothing.
    """
    return ((reach - thresholds.expand) * follows).sum() - max(thresholds.level, _THERE)


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


def _read(*tensors: Shaped[Tensor, "..."]) -> list[Float[Tensor, "..."]]:
    """Bring all to the host in one transfer; float64 holds tokens, and float32, as they are."""
    flat = torch.cat([each.double().flatten() for each in tensors]).cpu()
    parts = torch.split(flat, [each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _trees(found: _Level, strategy: Strategy) -> list[DraftTree]:
    """Cut each request's candidates to its draft."""
    trees = []
    for some, margins, above, likely in zip(*(each.tolist() for each in found), strict=True):
        tree = DraftTree(
            tokens=tuple(some), parents=tuple(above), margins=tuple(margins), reach=tuple(likely)
        )
        tree = keep_reached(ranked(tree), max(strategy.thresholds.verify, _THERE))
        trees.append(prune(tree, strategy.num_nodes))
    return trees
