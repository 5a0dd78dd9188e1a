"""The interface of tuners, and the two simplest ones.

Order of calls: `begin`, then for each step that may draft `plan`, if it drafts `select_nodes`, and
`learn`, one step late. A tuner knows times only from `learn` and the cost model, so equal outcomes
lead to equal decisions.
"""

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from longtail.speculation.budget import merge
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree
from longtail.tuner.cost import CostModel
from longtail.tuner.messages import Batch, Outcome, Plan


class Tuner(abc.ABC):
    """Decides in each step whether to draft, with which drafters, and which nodes to verify."""

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:  # noqa: B027
        """Start over with these drafters; the engine keeps correcting the costs."""

    @abc.abstractmethod
    def plan(self, batch: Batch) -> Plan:
        """Decide whether and how to draft."""

    def select_nodes(
        self, batch: Batch, plan: Plan, proposals: Sequence[Sequence[DraftTree]]
    ) -> list[DraftTree]:
        """Return the draft to verify for each request, given the proposals of each drafter."""
        return merge_proposals(proposals)

    def learn(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn from a step, with drafts or without."""

    def reset_estimates(self) -> None:  # noqa: B027
        """Drop estimates of drafters, since one was changed."""

    def plain_s(self, running: int) -> float | None:
        """Return the seconds of a plain step; None where none of the kind was seen."""
        return None


PLAIN = Plan(strategy=None)


@final
class OffTuner(Tuner):
    """Decodes plainly; drafters still observe."""

    def plan(self, batch: Batch) -> Plan:
        """Return the plain plan."""
        return PLAIN


@final
class FixedTuner(Tuner):
    """Uses one strategy in each step of at most `max_running` requests (0: any number)."""

    def __init__(self, strategy: Strategy, *, max_running: int = 0) -> None:
        self._strategy, self._max_running = strategy, max_running
        self._num_drafters = 1

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Use all drafters."""
        self._num_drafters = num_drafters

    def plan(self, batch: Batch) -> Plan:
        """Return the strategy, cut to the step's room."""
        if self._max_running and batch.num_sampled > self._max_running:
            return PLAIN
        return fit_strategy(self._strategy, batch, self._num_drafters)


def merge_proposals(proposals: Sequence[Sequence[DraftTree]]) -> list[DraftTree]:
    """Merge the drafters' proposals to one draft for each request."""
    if len(proposals) == 1:
        return list(proposals[0])
    return [merge(trees) for trees in zip(*proposals, strict=True)]


def fit_strategy(strategy: Strategy, batch: Batch, num_drafters: int) -> Plan:
    """Return a plan of all drafters whose largest drafts together fit into the step's room."""
    nodes = min(strategy.num_nodes, batch.room // max(batch.num_draftable * num_drafters, 1))
    if not nodes:
        return PLAIN
    cut = replace(strategy, depth=min(strategy.depth, nodes), size=nodes)
    return Plan(strategy=cut, drafters=tuple(range(num_drafters)))
