"""The seam between the engine and whoever decides how much to draft, and the two simplest.

Order of calls: `begin`, then for every step that could draft `plan`, if it drafts `select_nodes`,
and `learn`, one step late: when the next one is planned. A tuner sees times only through
`learn` and the cost model, so the same outcomes give the same decisions.
"""

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from longtail.speculation.budget import merge
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree
from longtail.tuner.cost import CostModel
from longtail.tuner.records import Batch, Outcome, Plan


class Tuner(abc.ABC):
    """Decides, step by step, whether to draft, who does, how much, and what is verified."""

    @property
    def needs_costs(self) -> bool:
        """Tell whether `begin` must be given what was measured."""
        return False

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:  # noqa: B027
        """Start over, with these drafters; the engine goes on correcting the costs."""

    @abc.abstractmethod
    def plan(self, batch: Batch) -> Plan:
        """Decide what to ask drafters for."""

    def select_nodes(
        self, batch: Batch, plan: Plan, proposals: Sequence[Sequence[DraftTree]]
    ) -> list[DraftTree]:
        """Decide what is verified, given each drafter's drafts of the requests asked for."""
        return merge_proposals(proposals)

    def learn(self, outcome: Outcome) -> None:  # noqa: B027
        """Take note of how a step went, drafted or not."""

    def reset_estimates(self) -> None:  # noqa: B027
        """Take note that a drafter was changed: what is known of it may be untrue."""


PLAIN = Plan(strategy=None)


@final
class OffTuner(Tuner):
    """Decodes plainly; the drafter keeps up."""

    def plan(self, batch: Batch) -> Plan:
        """Ask nobody."""
        return PLAIN


@final
class FixedTuner(Tuner):
    """One strategy for every step with at most `max_running` requests (0: any number)."""

    def __init__(self, strategy: Strategy, *, max_running: int = 0) -> None:
        self._strategy, self._max_running = strategy, max_running
        self._num_drafters = 1

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Ask all of them."""
        self._num_drafters = num_drafters

    def plan(self, batch: Batch) -> Plan:
        """Ask for the strategy, as far as there is room."""
        if self._max_running and batch.num_sampled > self._max_running:
            return PLAIN
        return fit_strategy(self._strategy, batch, self._num_drafters)


def merge_proposals(proposals: Sequence[Sequence[DraftTree]]) -> list[DraftTree]:
    """Make one draft of several drafters' for each request."""
    if len(proposals) == 1:
        return list(proposals[0])
    return [merge(trees) for trees in zip(*proposals, strict=True)]


def fit_strategy(strategy: Strategy, batch: Batch, num_drafters: int) -> Plan:
    """Ask all drafters for what fits into the step's room, were every draft as large as may be."""
    nodes = min(strategy.num_nodes, batch.room // max(batch.num_draftable * num_drafters, 1))
    if not nodes:
        return PLAIN
    cut = replace(strategy, depth=min(strategy.depth, nodes), size=nodes)
    return Plan(strategy=cut, drafters=tuple(range(num_drafters)))
